package nodee2e

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpushare/gpushare/test/controlplane"
)

//go:embed machine.sh
var machineScript []byte

// machine is a machine within this one. Its processes have their own /var and /run and see only each other. When the
// machine is stopped or the test dies, the kernel ends all its processes and removes its mounts.
type machine struct {
	dir string
	// anchor is the process that keeps the namespaces alive.
	anchor *controlplane.Process
}

// startMachine starts a machine in dir, which should be empty and have a short path. The machine's /var is dir/var.
func startMachine(ctx context.Context, dir string) (*machine, error) {
	m := &machine{dir: dir}
	script := filepath.Join(dir, "machine.sh")
	if err := os.WriteFile(script, machineScript, 0o600); err != nil {
		return nil, fmt.Errorf("writing the machine's script: %w", err)
	}
	unshare, err := exec.LookPath("unshare")
	if err != nil {
		return nil, fmt.Errorf("looking for util-linux: %w", err)
	}
	m.anchor = &controlplane.Process{
		Name: "machine", Path: unshare,
		Args:    []string{"--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "/bin/sh", script, dir},
		LogPath: filepath.Join(dir, "machine.log"),
		Ready: func(context.Context) error {
			_, err := os.Stat(filepath.Join(dir, "up"))
			return err
		},
	}
	if err := m.anchor.Start(ctx); err != nil {
		return m, err
	}
	return m, m.sweepStale()
}

// process returns a process that runs in the machine when it is started. It ends with the process that represents it
// outside of the machine.
func (m *machine) process(name string, args ...string) (*controlplane.Process, error) {
	command, err := m.command(args...)
	if err != nil {
		return nil, err
	}
	return &controlplane.Process{
		Name: name, Path: command[0], Args: command[1:], LogPath: filepath.Join(m.dir, "logs", name+".log"),
	}, nil
}

// command returns the command line that runs a command in the machine.
func (m *machine) command(args ...string) ([]string, error) {
	nsenter, err := exec.LookPath("nsenter")
	if err != nil {
		return nil, fmt.Errorf("looking for util-linux: %w", err)
	}
	namespaces := "/proc/" + strconv.Itoa(m.anchor.Pid()) + "/ns/"
	return append([]string{
		nsenter, "--mount=" + namespaces + "mnt", "--pid=" + namespaces + "pid_for_children", "--wd=/", "--",
		"setpriv", "--pdeathsig", "KILL", "--",
	}, args...), nil
}

// run runs a command in the machine.
func (m *machine) run(ctx context.Context, args ...string) error {
	_, err := m.output(ctx, args...)
	return err
}

// output runs a command in the machine and returns what it prints.
func (m *machine) output(ctx context.Context, args ...string) (string, error) {
	command, err := m.command(args...)
	if err != nil {
		return "", err
	}
	out, err := exec.CommandContext(ctx, command[0], command[1:]...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%v: %w: %s", args, err, out)
	}
	return string(out), nil
}

// path returns the path outside of the machine for a path inside it. It is valid while the machine runs.
func (m *machine) path(inside ...string) string {
	root := "/proc/" + strconv.Itoa(m.anchor.Pid()) + "/root"
	return filepath.Join(append([]string{root}, inside...)...)
}

// stop stops the machine and removes the cgroups of its containers, which the kernel keeps.
func (m *machine) stop() error {
	cgroups, err := os.OpenRoot(m.path("sys/fs/cgroup")) // It stays valid when the machine's mounts end.
	if err != nil {
		return errors.Join(err, m.anchor.Kill())
	}
	defer cgroups.Close()
	if err := m.anchor.Kill(); err != nil {
		return err
	}
	containers, err := filepath.Glob(filepath.Join(m.dir, "runtimes", "created", "*"))
	if err != nil {
		return err
	}
	return sweepCgroups(cgroups, containers)
}

// staleAge is longer than any container of a machine starts without a process in its cgroup.
const staleAge = time.Hour

// sweepStale removes the empty cgroups of machines whose test was killed, so that none was left to remove them.
func (m *machine) sweepStale() error {
	cgroups, err := os.OpenRoot(m.path("sys/fs/cgroup"))
	if err != nil {
		return err
	}
	defer cgroups.Close()
	entries, err := fs.ReadDir(cgroups.FS(), cgroupParent)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, entry := range entries {
		info, err := entry.Info()
		if err != nil || !info.IsDir() || time.Since(info.ModTime()) < staleAge {
			continue // It is gone, or too young.
		}
		if err := removeCgroup(cgroups, filepath.Join(cgroupParent, entry.Name())); err != nil && !errors.Is(err, syscall.EBUSY) {
			return err
		}
	}
	return nil
}

// cgroupParent is containerd's cgroup for the containers of the kubelet. All machines share it.
const cgroupParent = "k8s.io"

// sweepCgroups removes the cgroups of these containers. They are empty as soon as the kernel has removed the last process.
// It also removes the parent cgroup, unless another containerd has cgroups in it.
func sweepCgroups(cgroups *os.Root, containers []string) error {
	var last error
	err := wait.PollUntilContextTimeout(context.Background(), 20*time.Millisecond, 30*time.Second, true, func(context.Context) (bool, error) {
		last = nil
		for _, container := range containers {
			last = errors.Join(last, removeCgroup(cgroups, filepath.Join(cgroupParent, filepath.Base(container))))
		}
		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("removing the machine's cgroups: %w", errors.Join(err, last))
	}
	if err := removeCgroup(cgroups, cgroupParent); err != nil && !errors.Is(err, syscall.EBUSY) {
		return fmt.Errorf("removing the machine's cgroups: %w", err)
	}
	return nil
}

// removeCgroup removes a cgroup, if it still exists. The files in it can't be removed and don't have to be.
func removeCgroup(cgroups *os.Root, path string) error {
	if err := cgroups.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
