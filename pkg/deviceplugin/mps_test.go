package deviceplugin

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/pkg/nodeconfig"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

// writeStatus writes what the supervisor of the MPS daemons knows of both cards.
func (o *isolationOptions) writeStatus(t *testing.T, status isolation.MPSStatus) {
	t.Helper()
	status.At = time.Now()
	for _, uuid := range []string{"GPU-0", "GPU-1"} {
		check.Must(t, os.MkdirAll(filepath.Join(string(o.mps), uuid), 0o755))
		check.Must(t, o.mps.WriteStatus(uuid, status))
	}
}

// volta is a driver for MPS: its cards have the compute capability 7.0.
var volta = limiter{hard: inventory.NoLimit, compute: inventory.Compute{Major: 7, Mode: inventory.ComputeExclusiveProcess}}

// ready is the status of a daemon that serves.
var ready = isolation.MPSStatus{State: isolation.MPSReady, Servers: []int{os.Getpid()}}

// startMPS starts a plugin in mode mps on a node whose daemons are ready.
func startMPS(t *testing.T, driver limiter, cards []gpu.Card) (*fixture, *kubelet, *Plugin, func()) {
	t.Helper()
	return startIsolated(t, isolation.MPS, driver, cards)
}

// TestMPSCards: the supervisor of the daemons gets the cards that the node shares, among them excluded ones that pods still use.
func TestMPSCards(t *testing.T) {
	b, k, p, _ := startMPS(t, volta, reservedCards())
	named := func(want ...string) {
		t.Helper()
		await.True(t, fmt.Sprintf("the cards %v", want), func() bool {
			got, err := b.isolation.mps.ReadCards()
			return err == nil && slices.Equal(got, want)
		})
	}
	named("GPU-0", "GPU-1")
	pod := newPod("a", main(2), assumed(0, 1))
	b.create(p, pod)
	k.mustAdmit(pod)
	exclude := func(cards ...int) {
		t.Helper()
		var excluded nodeconfig.Cards
		for _, card := range cards {
			excluded = append(excluded, nodeconfig.CardSelector{Index: card})
		}
		p.cards.Exclude(excluded)
		p.configurator.wake.Raise()
	}
	exclude(1)
	named("GPU-0")
	exclude(0)
	named("GPU-0", "GPU-1")
	b.delete(p, pod)
	k.removePod(pod)
	named("GPU-1")
	exclude(0, 1)
	named()
}

// TestMPS follows a share from Allocate to the pod's annotation, through a restart of the plugin.
func TestMPS(t *testing.T) {
	b, k, p, stop := startMPS(t, volta, reservedCards())
	node, err := protocol.ParseInventory(b.node().Annotations)
	if err != nil || node.Isolation != "mps" || node.Cards[0].MaxContainers != 16 {
		t.Errorf("the inventory has the mode %q and %+v, %v", node.Isolation, node.Cards, err)
	}
	pod := newPod("a", main(2), assumed(1, 1))
	b.create(p, pod)
	k.mustAdmit(pod)
	response := k.responseOf(t, pod)
	root := string(b.isolation.mps)
	mounts := map[string]string{}
	for _, mount := range response.Mounts {
		mounts[mount.ContainerPath] = mount.HostPath
	}
	check.Equal(t, "mounts", map[string]string{root + "/GPU-1/pipe": root + "/GPU-1/pipe", "/dev/shm": root + "/shm"}, mounts)
	for name, want := range map[string]string{"CUDA_MPS_PIPE_DIRECTORY": root + "/GPU-1/pipe", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "GPU-1=2048M"} {
		if got := response.Envs[name]; got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	b.awaitAssigned("a", 1)
	stop()
	p, _ = b.start(reservedCards())
	await.True(t, "the annotation", func() bool {
		p.Measure(volta)
		return b.pod("a").Annotations[protocol.AnnotationIsolation] == "mps" && p.allocator.snapshots.record.Pod("uid-a")["main"].Mode == "mps"
	})
}

// TestMPSChanges: no container starts on a card whose daemon or compute mode has changed since the cards were checked.
func TestMPSChanges(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*isolator, *isolationOptions)
		want   string
	}{
		"nothing": {func(*isolator, *isolationOptions) {}, ""},
		"the daemon hangs": {func(_ *isolator, o *isolationOptions) {
			o.writeStatus(t, isolation.MPSStatus{State: "failing", Reason: "no answer"})
		}, "isolation mode mps: its MPS daemon is failing: no answer"},
		"the compute mode": {func(i *isolator, _ *isolationOptions) {
			i.Ask(limiter{compute: inventory.Compute{Major: 8}})
		}, "isolation mode mps: its compute mode is DEFAULT, not EXCLUSIVE_PROCESS"},
	} {
		t.Run(name, func(t *testing.T) {
			o := newIsolation(t, isolation.MPS)
			o.writeStatus(t, isolation.MPSStatus{State: isolation.MPSReady})
			p := &Plugin{cards: newCardState(), options: Options{Isolation: isolation.Options{MPS: o.mps}}}
			p.addIsolator()
			p.cards.Set(gpu.GiB, reservedCards(), nil, nil, "")
			p.isolator.Configure(isolation.MPS)
			p.isolator.SetNode(&corev1.Node{})
			p.isolator.Ask(volta)
			test.change(p.isolator, o)
			decision, _ := p.isolator.Isolate(allocation.Decision{Cards: reservedCards()[:1], Container: allocation.Container{Request: 2}}, gpu.GiB)
			if got := decision.Rejection; (got == nil) != (test.want == "") || got != nil && got.Text != test.want {
				t.Errorf("got %+v, want %q", got, test.want)
			}
		})
	}
}

// TestMPSSharedMemory: a pod with its own /dev/shm could not reach its daemon.
func TestMPSSharedMemory(t *testing.T) {
	b, k, p, _ := startMPS(t, volta, reservedCards())
	pod := newPod("a", main(2), assumed(0, 1))
	pod.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "shm", MountPath: "/dev/shm/"}}
	b.create(p, pod)
	want := "isolation mode mps: the container mounts a volume at /dev/shm"
	if _, err := k.admit(pod); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want %q", err, want)
	}
	b.awaitEvent("GPUCardRefused container main: " + want)
}

// TestMPSContainers: a card takes as many containers as its daemon takes clients. A pod that was not scheduled gets another card.
func TestMPSContainers(t *testing.T) {
	const most = 16
	b, k, p, _ := startMPS(t, volta, []gpu.Card{{Index: 0, UUID: "GPU-0", Memory: 128}, {Index: 1, UUID: "GPU-1", Memory: 128}})
	admit := func(pod *corev1.Pod) (string, error) {
		t.Helper()
		b.create(p, pod)
		b.isolation.writeStatus(t, ready) // An old one doesn't count.
		env, err := k.admit(pod)
		return cardOf(env["main"]), err
	}
	for i := range 2 * most {
		if card, err := admit(newPod(fmt.Sprint("pod-", i), initStep(1), main(1))); err != nil || card != fmt.Sprint(i/most) {
			t.Fatalf("pod %d got card %q, %v", i, card, err)
		}
	}
	want := "no GPU card with enough free memory takes more containers by MPS"
	if _, err := admit(newPod("one-more", main(1), assumed(0, most))); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want %q", err, want)
	}
	b.delete(p, newPod("pod-0"))
	k.removePod(newPod("pod-0"))
	if card, err := admit(newPod("again", main(1), assumed(0, most+2))); err != nil || card != "0" {
		t.Errorf("got card %q, %v", card, err)
	}
}

// TestMPSServerUse: what the driver attributes to the MPS server isn't the use of a container.
func TestMPSServerUse(t *testing.T) {
	_, _, p, _ := startMPS(t, volta, reservedCards())
	p.Measure(serverOnly{volta})
	report := p.meter.Report()
	if card := report.Cards[0]; card.MPS != 7 || card.Host != 0 || card.Unresolved != 0 || len(report.Containers) > 0 {
		t.Errorf("%+v, %+v", card, report.Containers)
	}
}

// serverOnly is a driver that lists only the MPS server on each card.
type serverOnly struct{ limiter }

func (serverOnly) Processes(string) ([]inventory.Process, error) {
	return []inventory.Process{{PID: os.Getpid(), Bytes: 7}}, nil
}

// A node isn't drained before mode mps is switched off: a container that restarts runs without a limit. An init container that has ended doesn't.
func TestLimitByMPSWithoutDaemon(t *testing.T) {
	b, k, p, _ := startMPS(t, volta, reservedCards())
	pod, ended := newPod("a", main(2), assumed(0, 1)), newPod("b", initStep(2), main(0), assumed(0, 2))
	b.create(p, pod, ended)
	k.mustAdmit(pod)
	k.mustAdmit(ended)
	annotated := func(driver limiter, want string) {
		t.Helper()
		await.True(t, "the annotation "+want, func() bool {
			p.Measure(driver)
			return b.pod("a").Annotations[protocol.AnnotationIsolation] == want
		})
	}
	annotated(volta, "mps")
	// The supervisor has ended, and has set the compute mode back.
	b.isolate(t, new("none"))
	for _, uuid := range []string{"GPU-0", "GPU-1"} {
		check.Must(t, b.isolation.mps.RemoveStatus(uuid))
	}
	off := volta
	off.compute.Mode = inventory.ComputeDefault
	annotated(off, "mps: container main: the compute mode of its card is DEFAULT, in which programs need no MPS daemon")
	b.awaitEvent("GPULimitNotInForce container main: the compute mode")
	if state, _ := p.limits.Isolation("uid-b"); state.String() != "mps" {
		t.Errorf("of the pod whose init container has ended, it says %q", state)
	}
}
