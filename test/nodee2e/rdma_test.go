package nodee2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fakesysfs"
	"github.com/gpushare/gpushare/test/framework"
)

// rdmaAdapters are those of cards 0 to 2, each behind one PCIe switch with its card. The last has no link. Card 3 has none.
var rdmaAdapters = []fakesysfs.Adapter{
	{Name: "mlx5_0", Device: "uverbs0", Path: "pci0000:00/0000:00:01.0/0000:10:00.0/0000:11:01.0/0000:20:00.0", States: []string{"ACTIVE"}},
	{Name: "mlx5_1", Device: "uverbs1", Path: "pci0000:00/0000:00:02.0/0000:12:00.0/0000:13:01.0/0000:21:00.0", States: []string{"ACTIVE"}},
	{Name: "mlx5_2", Device: "uverbs2", Path: "pci0000:80/0000:80:01.0/0000:14:00.0/0000:15:01.0/0000:22:00.0", NUMANode: 1, States: []string{"DOWN"}},
}

// rdmaCards are the places of the cards. The fake driver's cards are on the buses 1, 2 and so on.
var rdmaCards = []string{
	"pci0000:00/0000:00:01.0/0000:10:00.0/0000:11:00.0/0000:01:00.0",
	"pci0000:00/0000:00:02.0/0000:12:00.0/0000:13:00.0/0000:02:00.0",
	"pci0000:80/0000:80:01.0/0000:14:00.0/0000:15:00.0/0000:03:00.0",
	"pci0000:80/0000:80:02.0/0000:04:00.0",
}

// rdmaMinors are the minor numbers of the devices that stand for those of adapters: devices of the kernel's memory, which have the major number 1.
var rdmaMinors = map[string]uint64{"uverbs0": 3, "uverbs1": 5, "uverbs2": 7, "rdma_cm": 8}

// TestRDMA: each container has exactly the devices of the adapters near its cards if its pod asks for them, and none otherwise, through restarts of
// the plugin, the kubelet and the containers. Only sysfs and the devices are made up.
func TestRDMA(t *testing.T) {
	c := startCluster(t, cardMiB, cardMiB, cardMiB, cardMiB)
	sysfs := fakesysfs.Machine{Root: t.TempDir()}
	for i, card := range rdmaCards {
		check.Must(t, sysfs.AddDevice(card, i/2))
	}
	for _, adapter := range rdmaAdapters {
		check.Must(t, sysfs.AddAdapter(adapter))
	}
	// The directory is the whole machine's, and what is mounted there only the node's.
	if err := os.Mkdir("/dev/infiniband", 0o755); err == nil {
		t.Cleanup(func() { _ = os.Remove("/dev/infiniband") })
	} else if !errors.Is(err, os.ErrExist) {
		t.Fatal(err)
	}
	commands := []string{"mount -t tmpfs tmpfs /dev/infiniband"}
	for name, minor := range rdmaMinors {
		commands = append(commands, fmt.Sprintf("mknod -m 666 /dev/infiniband/%s c 1 %d", name, minor))
	}
	check.Must(t, c.node.machine.run(t.Context(), "/bin/sh", "-c", "set -e; "+strings.Join(commands, "; ")))
	check.Must(t, c.node.restartPlugin(t.Context(), "--sysfs-root="+sysfs.Root, "--health-quiet-period=2s"))
	c.waitCards(t)

	asks := func(pod *framework.PodWrapper, value string) *framework.PodWrapper {
		return pod.Label(protocol.LabelRDMA, value)
	}
	c.run(t, "containers get the adapters of their cards", func(s *scenario) {
		s.waitPorts("mlx5_0:1", "mlx5_1:1", "", "")
		own := asks(s.pod(2), protocol.RDMARequired)
		own.Spec.Containers[0].Env = append(own.Spec.Containers[0].Env, corev1.EnvVar{Name: protocol.EnvRDMAPorts, Value: "own"})
		// Pods without the label would fill the cards that others need.
		s.createAndWait(asks(setCards(s.pod(4), 2, 0), protocol.RDMARequired), setCards(s.pod(8), 4, 0), asks(setCards(s.pod(4), 4, 0), protocol.RDMAPreferred))
		s.createAndWait(
			asks(s.pod(2), protocol.RDMARequired), asks(s.pod(4), protocol.RDMARequired), own, asks(s.pod(2).Container("second", 2), protocol.RDMARequired),
		)
		s.createAndWait(s.pod(2), s.pod(4), asks(s.pod(3), protocol.RDMAPreferred))
		before := s.checkAdapters()
		// Cards 2 and 3 have room for it.
		pending := asks(s.pod(13), protocol.RDMARequired)
		s.create(pending)
		s.WaitUnschedulable(pending.Name, "too few GPU cards have enough free memory and cores, though the node's cards together have")
		s.delete(pending.Name)
		s.waitTerminated()

		for _, test := range []struct {
			what    string
			restart func()
		}{
			{"the plugin", func() { check.Must(s, s.node.plugin.Restart(s.Context())); s.waitPlugin() }},
			{"the kubelet", func() { check.Must(s, s.node.kubelet.Restart(s.Context())) }},
			{"the plugin, after links failed", func() {
				check.Must(s, errors.Join(sysfs.SetPort(rdmaAdapters[0], 1, "DOWN"), sysfs.SetPort(rdmaAdapters[1], 1, "DOWN")))
				check.Must(s, s.node.plugin.Restart(s.Context()))
				s.waitPlugin()
				s.waitPorts("", "", "", "")
			}},
		} {
			test.restart()
			s.waitConsistent()
			for _, name := range s.names() { // The kubelet starts these containers with what it was answered.
				if pod := s.Get(name); len(pod.Spec.Containers) == 1 && s.random.IntN(3) == 0 {
					s.killContainer(name)
				}
			}
			s.waitConsistent()
			if diff := cmp.Diff(before, s.checkAdapters()); diff != "" {
				s.Errorf("after a restart of %s (-before +now):\n%s", test.what, diff)
			}
		}
		// The kubelet calls Allocate again, and the links have failed.
		s.restartWithoutCheckpoint(func() {})
		s.otherDevices = true
		s.waitConsistent()
		for _, name := range s.names() {
			if len(s.Get(name).Spec.Containers) == 1 {
				s.killContainer(name)
			}
		}
		s.waitConsistent()
		if diff := cmp.Diff(before, s.checkAdapters()); diff != "" {
			s.Errorf("after the loss of the checkpoint (-before +now):\n%s", diff)
		}
		const noPort = "no GPU card of the node is near an RDMA adapter with an active port"
		pending = asks(s.pod(2), protocol.RDMARequired)
		s.create(pending)
		s.WaitUnschedulable(pending.Name, noPort)
		unscheduled := asks(s.pod(2), protocol.RDMARequired).Node(s.node.name)
		s.create(unscheduled)
		s.Eventually("the pod without a scheduler is rejected", func(context.Context) error {
			if status := s.Get(unscheduled.Name).Status; status.Reason != "UnexpectedAdmissionError" || !strings.Contains(status.Message, noPort) {
				return fmt.Errorf("it is %s: %s: %s", status.Phase, status.Reason, status.Message)
			}
			return nil
		})
		s.delete(unscheduled.Name)
		check.Must(s, sysfs.SetPort(rdmaAdapters[2], 1, "ACTIVE")) // The node's only one, and on the NUMA node of card 3.
		s.waitConsistent()
		o, err := s.node.find(s.Get(pending.Name).UID, framework.MainContainer)
		check.Must(s, err)
		if cards, err := o.cards(); err != nil || !slices.Contains([]int{2, 3}, cards[0]) {
			s.Errorf("the pod got the cards %v, %v", cards, err)
		}
		s.wantAdapters(o, s.Get(pending.Name), 2)
	})
}

// waitPorts waits until the inventory has these ports near the cards.
func (s *scenario) waitPorts(want ...string) {
	s.Helper()
	s.Eventually(fmt.Sprintf("the inventory has the ports %q", want), func(ctx context.Context) error {
		object, err := s.Client.CoreV1().Nodes().Get(ctx, s.node.name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		var got []string
		for _, card := range protocol.ParseNode(object).Cards {
			got = append(got, card.RDMAPorts)
		}
		if !slices.Equal(got, want) {
			return fmt.Errorf("it has %q", got)
		}
		return nil
	})
}

// checkAdapters compares the devices and the variable of each running container with its cards and its pod's label. It returns them by container.
func (s *scenario) checkAdapters() map[string]string {
	s.Helper()
	running, err := s.node.running()
	check.Must(s, err)
	found := map[string]string{}
	pods := map[string]*corev1.Pod{}
	for _, pod := range s.list() {
		pods[string(pod.UID)] = &pod
	}
	for _, o := range running {
		pod := pods[o.PodUID]
		if pod == nil {
			continue
		}
		cards, err := o.cards()
		check.Must(s, err)
		label := pod.Labels[protocol.LabelRDMA]
		var near []int
		for _, card := range cards {
			if label != "" && card < 2 {
				near = append(near, card)
			} else if label == protocol.RDMARequired {
				s.Errorf("container %s of pod %s needs an adapter, and has card %d", o.Container, pod.Name, card)
			}
		}
		devices := s.wantAdapters(o, pod, near...)
		found[pod.Name+"/"+o.Container] = fmt.Sprint(cards, " ", o.Env[protocol.EnvRDMAPorts], " ", devices)
	}
	if len(found) == 0 {
		s.Error("no container runs")
	}
	return found
}

// wantAdapters compares the devices and the variable of a running container with these of rdmaAdapters. It returns the devices' names.
func (s *scenario) wantAdapters(o observed, pod *corev1.Pod, adapters ...int) []string {
	s.Helper()
	var ports []string
	want := map[string]uint64{}
	for _, i := range adapters {
		ports = append(ports, rdmaAdapters[i].Name+":1")
		for _, device := range []string{rdmaAdapters[i].Device, "rdma_cm"} {
			want[device] = rdmaMinors[device]
		}
	}
	variable := strings.Join(ports, ",")
	for _, env := range pod.Spec.Containers[0].Env {
		if env.Name == protocol.EnvRDMAPorts {
			variable = env.Value
		}
	}
	inside, err := devicesIn(s.node.machine.path("proc", fmt.Sprint(o.Pid), "root/dev/infiniband"))
	check.Must(s, err)
	if got := o.Env[protocol.EnvRDMAPorts]; !maps.Equal(want, inside) || got != variable {
		s.Errorf("container %s of pod %s with label %q has the devices %v and %s=%q, want %v and %q",
			o.Container, pod.Name, pod.Labels[protocol.LabelRDMA], inside, protocol.EnvRDMAPorts, got, want, variable)
	}
	return slices.Sorted(maps.Keys(inside))
}

// devicesIn returns the character devices in a directory with their minor numbers; none if it doesn't exist.
func devicesIn(directory string) (map[string]uint64, error) {
	devices := map[string]uint64{}
	entries, err := os.ReadDir(directory)
	if errors.Is(err, os.ErrNotExist) {
		return devices, nil
	}
	for _, entry := range entries {
		info, err := entry.Info()
		if err != nil {
			return nil, err
		}
		stat, ok := info.Sys().(*syscall.Stat_t)
		if !ok || info.Mode()&os.ModeCharDevice == 0 || stat.Rdev>>8 != 1 {
			return nil, fmt.Errorf("%s/%s is none of the devices: %v", directory, entry.Name(), info.Mode())
		}
		devices[entry.Name()] = stat.Rdev & 0xff
	}
	return devices, err
}
