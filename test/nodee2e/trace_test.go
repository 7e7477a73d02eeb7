package nodee2e

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/simkubelet"
)

// TestTrace plays one trace against the real kubelet and against the simulated kubelet that other tests use. Both must
// behave the same: the order and content of their calls to a device plugin, the pods that PodResources shows at each call,
// the devices that they reuse, and the calls and pods that they reject, with the messages.
func TestTrace(t *testing.T) {
	r := startRig(t, cardMiB)
	sim := startSimulated(t, r)
	got := map[string][]string{}
	for _, k := range []traced{realKubelet(r), sim} {
		t.Run(k.node, func(t *testing.T) { got[k.node] = playTrace(t, r, k) })
	}
	if diff := cmp.Diff(got["real"], got["simulated"]); diff != "" {
		t.Errorf("the simulated kubelet (+) doesn't do what the real one (-) does:\n%s", diff)
	}
	t.Logf("the real kubelet's trace:\n%s", strings.Join(got["real"], "\n"))
}

// traced is a kubelet against which the trace is played.
type traced struct {
	node                        string
	devicePlugins, podResources string
	kill                        func() error
	start                       func(context.Context) error
	loseCheckpoint              func() error
	crash                       func(ctx context.Context, pod types.UID, container string) error
}

func realKubelet(r *rig) traced {
	n := r.node
	return traced{
		node: n.name, devicePlugins: n.devicePluginDir(), podResources: n.podResourcesSocket(),
		kill: n.kubelet.Kill, start: n.kubelet.Start,
		loseCheckpoint: func() error { return os.Remove(n.checkpoint()) },
		crash: func(ctx context.Context, pod types.UID, container string) error {
			c, err := n.find(pod, container)
			if err != nil {
				return err
			}
			return n.end(ctx, c)
		},
	}
}

func startSimulated(t *testing.T, r *rig) traced {
	t.Helper()
	root, err := os.MkdirTemp("", "sim-")
	must(t, err)
	k, err := simkubelet.New(simkubelet.Options{
		NodeName: "simulated", Client: r.bed.Client, Root: root, LiftNotReadyTaint: true,
		Labels: map[string]string{protocol.LabelShared: "true"},
	})
	must(t, err)
	must(t, k.Start(t.Context()))
	t.Cleanup(func() {
		k.Stop()
		must(t, os.RemoveAll(root))
	})
	return traced{
		node: "simulated", devicePlugins: k.DevicePluginDir(), podResources: k.PodResourcesSocket(),
		kill: func() error { k.Stop(); return nil }, start: k.Start,
		loseCheckpoint: func() error { return os.Remove(filepath.Join(k.DevicePluginDir(), "kubelet_internal_checkpoint")) },
		crash: func(_ context.Context, pod types.UID, container string) error {
			return k.CrashContainer(pod, container)
		},
	}
}

// playTrace plays the trace and returns the record, without the names that differ between runs.
func playTrace(t *testing.T, r *rig, k traced) []string {
	p := &player{scene: r.scene(t), traced: k, recorder: &recorder{dir: k.devicePlugins, podResources: k.podResources}}
	t.Cleanup(p.recorder.stop)
	p.offer()

	p.part("a pod with an init container, a sidecar and two containers; another one beside it")
	p.create("whole", initAsks("init", 4), sidecarAsks("sidecar", 2), asks("main", 3), asks("second", 1))
	p.awaitPhase("whole", corev1.PodRunning)
	p.nextSecond()
	p.create("plain", asks("main", 2))
	p.awaitPhase("plain", corev1.PodRunning)

	p.part("pods that are bound one after the other, the one created last first")
	p.unbound("one", "two")
	p.bind("two", "one")
	p.awaitPhase("one", corev1.PodRunning)
	p.awaitPhase("two", corev1.PodRunning)

	p.part("a pod that asks for more than there is, in its second container")
	p.create("big", asks("main", 1), asks("second", devices))
	p.tellFailed("big")

	p.part("a pod that the plugin refuses")
	p.recorder.refuseNext(status.Error(codes.ResourceExhausted, "no card"))
	p.create("refused", asks("main", 1))
	p.tellFailed("refused")

	p.part("a pod in its grace period, and after it")
	p.create("stubborn", asks("main", 1), deaf)
	p.awaitPhase("stubborn", corev1.PodRunning)
	p.deletePods(4, "stubborn")
	p.create("meanwhile", asks("main", 1))
	p.awaitPhase("meanwhile", corev1.PodRunning)
	p.awaitGone("stubborn")
	p.create("afterwards", asks("main", 1))
	p.awaitPhase("afterwards", corev1.PodRunning)

	p.part("a pod that has come to its end")
	p.create("ended", asks("main", 1), brief)
	p.awaitPhase("ended", corev1.PodSucceeded)
	p.create("next", asks("main", 1))
	p.awaitPhase("next", corev1.PodRunning)

	p.part("devices that fail")
	p.recorder.lists <- offered(3)
	p.awaitOffer(devices - 3)
	p.create("fewer", asks("main", 1))
	p.awaitPhase("fewer", corev1.PodRunning)
	p.remove("fewer", "next", "meanwhile", "afterwards", "one", "two")
	p.recorder.lists <- offered(0)
	p.awaitOffer(devices)

	p.part("a container that ends and is started again")
	p.crashAndAwait("plain", "main", 1)

	p.part("the kubelet starts again: pods bound meanwhile, the one created last first")
	must(p, p.kill())
	p.unbound("three", "four")
	p.bind("four", "three")
	must(p, p.start(p.Context()))
	p.offer()
	p.awaitPhase("three", corev1.PodRunning)
	p.awaitPhase("four", corev1.PodRunning)

	p.part("the kubelet starts again without its checkpoint")
	p.remove("three", "four")
	must(p, p.kill())
	must(p, p.loseCheckpoint())
	must(p, p.start(p.Context()))
	p.offer()
	p.create("new", asks("main", 1))
	p.awaitPhase("new", corev1.PodRunning)

	p.part("a container without books that ends and is started again")
	p.crashAndAwait("plain", "main", 2)

	p.part("more questions than PodResources answers")
	p.flood()

	p.part("the plugin goes")
	p.recorder.stop()
	p.awaitOffer(0)
	p.create("late", asks("main", 1))
	p.tellFailed("late")

	lines := p.recorder.lines
	for i := range lines {
		lines[i] = strings.NewReplacer(p.name, "NAMESPACE", p.node, "NODE").Replace(lines[i])
	}
	return lines
}
