package nodee2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/test/controlplane"
)

// helmEnv names helm's binary in the process that has a network of its own.
const helmEnv = "GPUSHARE_TEST_HELM"

// inNetworkOfItsOwn runs the test again, in a process whose network is its own: what it sets up there ends with it. It
// returns true in that process, whose test is to be done.
func inNetworkOfItsOwn(t *testing.T) bool {
	t.Helper()
	requireNode(t)
	for _, program := range []string{"ip", "iptables", "/usr/lib/cni/bridge"} {
		if _, err := exec.LookPath(program); err != nil {
			err = fmt.Errorf("%w: hack/node-packages.sh installs what is needed", err)
			if os.Getenv(requireEnv) != "" {
				t.Fatal(err)
			}
			fmt.Fprintf(os.Stderr, "SKIPPED %s: %v\n", t.Name(), err)
			t.Skip(err)
		}
	}
	if os.Getenv(helmEnv) != "" {
		return true
	}
	t.Parallel()
	root, err := controlplane.RepositoryRoot()
	must(t, err)
	// While there is a network to get it from.
	helm, err := exec.Command("go", "-C", filepath.Join(root, "hack", "helm"), "tool", "-n", "helm").Output()
	must(t, err)
	command := exec.Command("unshare", "--net", "--", "setpriv", "--pdeathsig", "KILL", "--",
		os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=10m")
	command.Env = append(os.Environ(), helmEnv+"="+strings.TrimSpace(string(helm)))
	out, err := command.CombinedOutput()
	t.Logf("in a network of its own:\n%s", out)
	if err != nil {
		t.Fatal(err)
	}
	return false
}

// The network of the node: its address is a bridge's, on which the pods are.
const (
	nodeAddress = "10.88.0.1"
	podNetwork  = `{"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "pods0", "isGateway": true,
  "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}`
)

// startNetwork gives this process's network its loopback and the node's bridge.
func startNetwork(ctx context.Context) error {
	for _, args := range []string{
		"link set lo up", "link add pods0 type bridge", "address add " + nodeAddress + "/24 dev pods0", "link set pods0 up",
		"route add default dev pods0",
	} {
		if out, err := exec.CommandContext(ctx, "ip", strings.Fields(args)...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", args, err, out)
		}
	}
	return nil
}

// startProxy starts the real kube-proxy.
func (n *node) startProxy(ctx context.Context) (*controlplane.Process, error) {
	kubeconfig, err := n.bed.Kubeconfig("system:kube-proxy")
	if err != nil {
		return nil, err
	}
	process, err := n.machine.process("kube-proxy", n.bed.Binary("kube/kube-proxy"), "--kubeconfig="+kubeconfig,
		"--hostname-override="+n.name, "--proxy-mode=iptables", "--cluster-cidr=10.88.0.0/24", "--v=2",
		"--healthz-bind-address=127.0.0.1:10256", "--metrics-bind-address=127.0.0.1:10249",
		// They are the whole kernel's.
		"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0")
	if err != nil {
		return nil, err
	}
	process.Ready = controlplane.HTTPReady("http://127.0.0.1:10256/healthz")
	return process, process.Start(ctx)
}

// helm runs helm on this repository's chart.
type helm struct{ path, home, root, kubeconfig string }

func (h helm) run(t *testing.T, args ...string) string {
	t.Helper()
	out, err := h.try(args...)
	if err != nil {
		t.Fatalf("helm %s: %v", strings.Join(args, " "), err)
	}
	return out
}

func (h helm) try(args ...string) (string, error) {
	command := exec.Command(h.path, args...)
	command.Dir = h.root
	command.Env = []string{"HOME=" + h.home, "PATH=" + os.Getenv("PATH"), "KUBECONFIG=" + h.kubeconfig}
	out, err := command.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		err = fmt.Errorf("%w: %s", err, exit.Stderr)
	}
	return string(out), err
}
