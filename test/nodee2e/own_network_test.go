package nodee2e

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/controlplane"
)

// toolsEnv holds the folder of helm and kubectl, in the process with its own network.
const toolsEnv = "GPUSHARE_TEST_TOOLS"

// inOwnNetwork runs the test again in a process with its own network namespace, so that the network ends with the
// process. It returns true in that process, in which the caller must run the test. The process begins before the tests that run in parallel,
// and beside them: it takes longest, and waits for most of its time.
func inOwnNetwork(t *testing.T) bool {
	t.Helper()
	requireNode(t)
	skipIf(t, missingProgram("ip", "iptables"))
	if os.Getenv(toolsEnv) != "" {
		return true
	}
	tools := t.TempDir()
	for _, name := range []string{"helm", "kubectl"} {
		// The tools are built before the new network starts, because nothing can be downloaded in it.
		path, err := controlplane.Tool(t.Context(), name)
		check.Must(t, err)
		check.Must(t, os.Symlink(path, filepath.Join(tools, name)))
	}
	command := exec.Command("unshare", "--net", "--", "setpriv", "--pdeathsig", "KILL", "--",
		os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=20m")
	command.Env = append(os.Environ(), toolsEnv+"="+tools)
	var out bytes.Buffer
	command.Stdout, command.Stderr = &out, &out
	check.Must(t, command.Start())
	t.Parallel()
	err := command.Wait()
	t.Logf("in its own network:\n%s", &out)
	check.Must(t, err)
	return false
}

// The network of the nodes. The first node's address is that of a bridge, to which the pods of both nodes are attached.
const (
	nodeAddress   = "10.88.0.1"
	workerAddress = "10.88.0.2"
)

// podNetwork returns the CNI configuration that gives pods addresses from 10.88.0.FIRST to 10.88.0.LAST.
func podNetwork(first, last int) string {
	return fmt.Sprintf(`{"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "pods0", "isGateway": true,
  "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/24", "rangeStart": "10.88.0.%d", "rangeEnd": "10.88.0.%d"}]],
    "routes": [{"dst": "0.0.0.0/0"}]}}]}`, first, last)
}

// startNetwork sets up the loopback device, the bridge and the nodes' addresses in this process's network.
func startNetwork(ctx context.Context) error {
	for _, args := range []string{
		"link set lo up", "link add pods0 type bridge", "address add " + nodeAddress + "/24 dev pods0", "link set pods0 up",
		"route add default dev pods0", "address add " + workerAddress + "/32 dev lo",
	} {
		if out, err := exec.CommandContext(ctx, "ip", strings.Fields(args)...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", args, err, out)
		}
	}
	return nil
}

// startProxy starts the real kube-proxy. One serves both nodes, because they share a network.
func (n *node) startProxy(ctx context.Context) (*controlplane.Process, error) {
	kubeconfig, err := n.cluster.Kubeconfig("system:kube-proxy")
	if err != nil {
		return nil, err
	}
	process, err := n.machine.process("kube-proxy", n.cluster.Binary("kube/kube-proxy"), "--kubeconfig="+kubeconfig,
		"--hostname-override="+n.name, "--proxy-mode=iptables", "--cluster-cidr=10.88.0.0/24", "--v=2",
		"--healthz-bind-address=127.0.0.1:10256", "--metrics-bind-address=127.0.0.1:10249",
		// These settings belong to the whole kernel.
		"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0")
	if err != nil {
		return nil, err
	}
	process.Ready = controlplane.HTTPReady("http://127.0.0.1:10256/healthz")
	return process, process.Start(ctx)
}

// adminShell is an administrator's shell: bash with helm and kubectl, and the cluster's kubeconfig.
type adminShell struct{ home, root, kubeconfig string }

// run runs commands in dir, or in the repository's root if dir is empty.
func (d adminShell) run(t *testing.T, dir, commands string) string {
	t.Helper()
	shell := controlplane.Shell{Dir: cmp.Or(dir, d.root), Path: os.Getenv(toolsEnv), Home: d.home, Kubeconfig: d.kubeconfig}
	out, err := shell.Run(t.Context(), commands, "")
	check.Must(t, err)
	return out
}
