package nodee2e

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fakenvml"
	"github.com/gpushare/gpushare/test/framework"
)

// limitEnv is the environment variable from which NVIDIA's hook reads a container's limit in MiB, requestEnv that of what is
// guaranteed.
const (
	limitEnv   = "NVIDIA_GPU_MEMORY_LIMIT"
	requestEnv = "NVIDIA_GPU_MEMORY_REQUEST"
)

// injectedEnv is the variable that the test's CDI specification sets for a card.
func injectedEnv(card int) string { return fmt.Sprintf("INJECTED_CARD_%d", card) }

// testCDI: with --device-list-strategy=cdi-cri containerd adds to each container what the host's specification says of its card's CDI device.
func (c *cluster) testCDI(t *testing.T) {
	t.Helper()
	check.Must(t, c.node.restartPlugin(t.Context(), "--device-list-strategy=cdi-cri", "--cdi-directories="+c.node.machine.path("run/cdi")))
	c.waitCards(t)
	c.run(t, "each container gets the device of its card", func(s *scenario) {
		s.createAndWait(s.pod(2).Container("second", 1), s.pod(10).Container("second", 1), s.pod(1).InitContainer("init", 2), s.pod(8))
		s.checkDevices()
	})
}

// limited sets the memory limit of a pod's containers.
func limited(pod *framework.PodWrapper, mib int) *framework.PodWrapper {
	for i := range pod.Spec.Containers {
		pod.Spec.Containers[i].Env = []corev1.EnvVar{{Name: limitEnv, Value: strconv.Itoa(mib)}, {Name: requestEnv, Value: "0"}}
	}
	return pod
}

// cdiKind is the kind of the devices in the specification of NVIDIA's toolkit.
const cdiKind = "nvidia.com/gpu"

// addCDISpecification writes the CDI specification of the machine's cards. It has the part of the toolkit's own specification
// that the machine can use, the hook for memory limits, and an environment variable that shows the device.
func (n *node) addCDISpecification() error {
	type object = map[string]any
	var devices []object
	for i := range n.cards {
		// Arguments and life cycle as in the toolkit (internal/discover/hooks.go).
		devices = append(devices, object{"name": cardUUID(i), "containerEdits": object{
			"env": []string{injectedEnv(i) + "=" + cardUUID(i)},
			"hooks": []object{{
				"hookName": "createRuntime", "path": n.cluster.Binary("kube/nvidia-cdi-hook"),
				"args": []string{"nvidia-cdi-hook", "apply-cuda-memory-limits", "--driver-root", n.driverRoot(), "--gpu-id", cardUUID(i)},
				"env":  append(n.driver.Env(), "NVIDIA_CTK_DEBUG=false"),
			}},
		}})
	}
	specification, err := json.Marshal(object{"cdiVersion": "0.6.0", "kind": cdiKind, "devices": devices})
	if err != nil {
		return err
	}
	library, err := os.ReadFile(n.cluster.Binary("fake-nvml/libnvidia-ml.so.1"))
	if err != nil {
		return err
	}
	return writeFiles(map[string]file{
		filepath.Join(n.driverRoot(), "usr/lib64/libnvidia-ml.so.1"): {mode: 0o755, content: library},
		n.machine.path("run/cdi/nvidia.json"):                        {mode: 0o644, content: specification},
	})
}

// driverRoot is the folder in which the hook finds the driver.
func (n *node) driverRoot() string { return filepath.Join(n.machine.dir, "driver") }

// checkDevices checks that each container that started, init containers included, got the devices of its cards and no other.
func (s *scenario) checkDevices() {
	s.Helper()
	starts, err := s.node.starts()
	check.Must(s, err)
	for _, o := range starts {
		cards, err := o.cards()
		check.Must(s, err)
		for i := range s.node.cards {
			if got := o.Env[injectedEnv(i)] != ""; got != slices.Contains(cards, i) {
				s.Errorf("container %s of pod %s got the CDI device of card %d: %t; it has cards %v", o.Container, o.PodUID, i, got, cards)
			}
		}
	}
}

// checkLimits compares the limits of the running containers' cgroups with the environment of these containers, of which
// some number has a limit.
func (s *scenario) checkLimits(number int) {
	s.Helper()
	running, err := s.node.running()
	check.Must(s, err)
	var want, got []fakenvml.Limit
	containers := 0
	for _, o := range running {
		cgroup, inode, err := s.node.cgroup(o)
		check.Must(s, err)
		if text := o.Env[limitEnv]; text != "" {
			mib, err := strconv.ParseUint(text, 10, 64)
			check.Must(s, err)
			cards, err := o.cards()
			check.Must(s, err)
			containers++
			for _, card := range cards {
				want = append(want, fakenvml.Limit{Card: cardUUID(card), Cgroup: cgroup, Inode: inode, Hard: mib << 20})
			}
		}
	}
	limits, err := s.node.driver.Limits()
	check.Must(s, err)
	for _, limit := range limits {
		info, err := os.Stat(s.node.machine.path(limit.Cgroup))
		if errors.Is(err, fs.ErrNotExist) {
			continue // The container has ended.
		}
		check.Must(s, err)
		if info.Sys().(*syscall.Stat_t).Ino == limit.Inode {
			got = append(got, limit)
		}
	}
	order := func(a, b fakenvml.Limit) int {
		return cmp.Or(strings.Compare(a.Cgroup, b.Cgroup), strings.Compare(a.Card, b.Card))
	}
	slices.SortFunc(want, order)
	slices.SortFunc(got, order)
	if diff := gocmp.Diff(want, got); diff != "" || containers != number {
		s.Errorf("%d containers have a limit, want %d; limits of cgroups (-want +got):\n%s", containers, number, diff)
	}
}

// cgroup returns the path in the machine and the inode of a container's cgroup, by its process.
func (n *node) cgroup(o observed) (path string, inode uint64, err error) {
	text, err := os.ReadFile(n.machine.path("proc", strconv.Itoa(o.Pid), "cgroup"))
	if err != nil {
		return "", 0, err
	}
	for line := range strings.Lines(string(text)) {
		if inner, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			path = filepath.Join("/sys/fs/cgroup", inner)
		}
	}
	if filepath.Base(path) != o.ID {
		return "", 0, fmt.Errorf("container %s of pod %s has the cgroup %q: %q", o.ID, o.PodUID, path, text)
	}
	info, err := os.Stat(n.machine.path(path))
	if err != nil {
		return "", 0, err
	}
	return path, info.Sys().(*syscall.Stat_t).Ino, nil
}
