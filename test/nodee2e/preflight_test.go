package nodee2e

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// requireEnv is the environment variable that makes the test fail instead of skip on a machine that can't run a node.
const requireEnv = "GPUSHARE_REQUIRE_NODE"

// requireNode skips the test, with a visible message, on a machine that can't run a real node.
func requireNode(t *testing.T) {
	t.Helper()
	skipIf(t, missing(t.Context()))
	_, err := buildRecordEnv()
	framework.Must(t, err)
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
	if err := missingProgram("containerd", "ctr", "runc", "unshare", "nsenter", "setpriv"); err != nil {
		return err
	}
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(root, "bin/kube/kubelet")); err != nil {
		return fmt.Errorf("%w: `make kube` builds it", err)
	}
	out, err := exec.CommandContext(ctx, "unshare", "--mount", "--pid", "--fork", "--mount-proc",
		"/bin/sh", "-c", "mount --make-rshared / && mount -t tmpfs tmpfs /run").CombinedOutput()
	if err != nil {
		return fmt.Errorf("mount and process namespaces can't be created (in a container: run it privileged): %w: %s", err, out)
	}
	return missingCgroups()
}

// missingCgroups returns an error if a cgroup hierarchy that the kubelet and runc need is missing or not writable.
func missingCgroups() error {
	const mount = "/sys/fs/cgroup"
	hierarchies := []string{""} // the unified hierarchy
	if _, err := os.Stat(filepath.Join(mount, "cgroup.controllers")); errors.Is(err, fs.ErrNotExist) {
		hierarchies = []string{"cpu", "cpuacct", "cpuset", "memory", "devices", "pids"}
	}
	for _, name := range hierarchies {
		probe, err := os.MkdirTemp(filepath.Join(mount, name), "gpushare-probe-")
		if err != nil {
			return fmt.Errorf("the cgroups that a kubelet needs can't be created (in a container: run it privileged): %w", err)
		}
		if err := os.Remove(probe); err != nil {
			return fmt.Errorf("removing a cgroup: %w", err)
		}
	}
	return nil
}
