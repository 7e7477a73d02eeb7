package framework

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fakenvml"
)

// Workload is what the containers of a node's pods use of its cards: a real process for each container, in a real cgroup with the
// container's name, and memory of cards in the fake driver. The device plugin measures it as it does that of a program.
type Workload struct {
	t    testing.TB
	node *Node
	// root is a hierarchy of cgroup v2.
	root string
	// processes are the processes by pod name.
	processes map[string]fakenvml.Process
}

// NewWorkload returns the workload of a node's pods, which is empty. It skips the test if no cgroup can be made.
func (n *Node) NewWorkload(t testing.TB) *Workload {
	t.Helper()
	w := &Workload{t: t, node: n, processes: map[string]fakenvml.Process{}}
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		if _, err := os.Stat(filepath.Join(root, "cgroup.controllers")); err == nil {
			w.root = root
		}
	}
	probe := filepath.Join(w.root, "gpushare-probe-"+n.Name)
	if err := os.Mkdir(probe, 0o755); w.root == "" || err != nil {
		t.Skipf("SKIPPED, not tested: no hierarchy of cgroup v2 can be changed: %v", err)
	}
	check.Must(t, os.Remove(probe))
	return w
}

// Use lets a process of the pod's container use this much memory of a card.
func (w *Workload) Use(s *Namespace, name string, card int, mebibytes int64) {
	w.t.Helper()
	p, ok := w.processes[name]
	if !ok {
		pod := s.WaitPod(name, "has a container", func(pod *corev1.Pod) bool {
			return len(pod.Status.ContainerStatuses) > 0 && pod.Status.ContainerStatuses[0].State.Running != nil
		})
		p.PID = w.start(pod)
	}
	p.Card, p.MiB = w.node.Cards[card].UUID, mebibytes
	w.processes[name] = p
	w.write()
}

// End removes what the pod uses.
func (w *Workload) End(name string) {
	w.t.Helper()
	delete(w.processes, name)
	w.write()
}

func (w *Workload) write() {
	w.t.Helper()
	var all []fakenvml.Process
	for _, p := range w.processes {
		all = append(all, p)
	}
	check.Must(w.t, w.node.Machine.SetProcesses(all...))
}

// start starts a process in a cgroup for the pod's first container, as kubelet and runtime with systemd's names make it. Both end
// with the test.
func (w *Workload) start(pod *corev1.Pod) (pid int) {
	w.t.Helper()
	_, id, _ := strings.Cut(pod.Status.ContainerStatuses[0].ContainerID, "://")
	slice := filepath.Join(w.root, "kubepods-pod"+strings.ReplaceAll(string(pod.UID), "-", "_")+".slice")
	scope := filepath.Join(slice, "cri-"+id+".scope")
	check.Must(w.t, os.MkdirAll(scope, 0o755))
	command := exec.CommandContext(context.Background(), "sleep", "1000")
	w.t.Cleanup(func() {
		if command.Process != nil {
			_ = command.Process.Kill()
			_ = command.Wait()
		}
		for _, cgroup := range []string{scope, slice} {
			check.Must(w.t, os.Remove(cgroup))
		}
	})
	check.Must(w.t, command.Start())
	check.Must(w.t, os.WriteFile(filepath.Join(scope, "cgroup.procs"), fmt.Append(nil, command.Process.Pid), 0o600))
	return command.Process.Pid
}
