package nodee2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/controlplane"
)

// requireEnv is the environment variable that makes the test fail instead of skip on a machine that can't run a node.
const requireEnv = "GPUSHARE_REQUIRE_NODE"

// requireNode skips the test, with a visible message, on a machine that can't run a real node.
func requireNode(t *testing.T) {
	t.Helper()
	skipIf(t, missing(t.Context()))
	_, err := buildRecordEnv()
	check.Must(t, err)
	_, err = buildOCIRuntime()
	check.Must(t, err)
}

// skipIf skips the test if err is not nil, or fails it if requireEnv is set.
func skipIf(t *testing.T, err error) {
	t.Helper()
	if err == nil {
		return
	}
	if os.Getenv(requireEnv) != "" {
		t.Fatalf("no real node on this machine, and %s is set: %v", requireEnv, err)
	}
	fmt.Fprintf(os.Stderr, "SKIPPED %s: no real node on this machine: %v\n", t.Name(), err)
	t.Skip(err)
}

// missingProgram returns an error if a program is not installed.
func missingProgram(programs ...string) error {
	for _, program := range programs {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("%w: hack/node-packages.sh installs what is needed", err)
		}
	}
	return nil
}

// missing returns why this machine can't run a real node; nil if it can.
func missing(ctx context.Context) error {
	if runtime.GOOS != "linux" || os.Geteuid() != 0 {
		return errors.New("root on Linux is required")
	}
	if err := missingProgram("unshare", "nsenter", "setpriv"); err != nil {
		return err
	}
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return err
	}
	for program, target := range map[string]string{filepath.Join(controlplane.KubeDir(root), "kubelet"): "kube", filepath.Join(root, "bin/kube/containerd"): "kube-node"} {
		if _, err := os.Stat(program); err != nil {
			return fmt.Errorf("%w: `make %s` builds it", err, target)
		}
	}
	// As machine.sh does it.
	out, err := exec.CommandContext(ctx, "unshare", "--mount", "--pid", "--fork", "--mount-proc", "/bin/sh", "-ec", `
		mount --make-rshared /
		mount -t tmpfs tmpfs /run
		[ -e /sys/fs/cgroup/cgroup.controllers ] || mount -t cgroup2 cgroup2 /sys/fs/cgroup
		rmdir "$(mktemp -d /sys/fs/cgroup/gpushare-probe-XXXXXX)"`).CombinedOutput()
	if err != nil {
		return fmt.Errorf("namespaces, mounts or cgroups can't be created (in a container: run it privileged): %w: %s", err, out)
	}
	return nil
}
