package scheduling

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
)

func (f *fixture) used(node string) []gpu.Memory {
	n, _ := f.ledger.Node(node)
	return n.Used
}

func TestTheLedgerIsRebuiltFromTheServer(t *testing.T) {
	ended := boundPod("ended", 50, "n1", 0)
	ended.Status.Phase = corev1.PodFailed
	presumed := newPod("presumed", 30)
	presumed.Spec.NodeName = "n1" // Another scheduler bound it, and its annotations name no card.
	f := start(t, patient, newNode(t, "n1", 100, 100), newNode(t, "plain"),
		boundPod("a", 40, "n1", 1), ended, newPod("waits", 10), presumed, newPod("asks nothing", 0))
	f.wantHeld(newPod("a", 0), "bound n1 card 1")
	f.wantHeld(ended, "not held")
	f.wantHeld(newPod("waits", 0), "not held")
	f.wantHeld(presumed, "bound n1 card 1")
	nodes := f.ledger.Nodes()
	if len(nodes) != 1 || !cmp.Equal(nodes[0].Used, []gpu.Memory{0, 70}) {
		t.Errorf("nodes %+v", nodes)
	}
}

func TestMemoryComesFreeWhenAPodEndsOrIsGoneAndNotBefore(t *testing.T) {
	for _, phase := range []corev1.PodPhase{corev1.PodSucceeded, corev1.PodFailed} {
		t.Run(string(phase), func(t *testing.T) {
			pod, mark := boundPod("p", 40, "n1", 0), boundPod("mark", 1, "n1", 1)
			f := start(t, patient, newNode(t, "n1", 100, 100), pod)
			f.awaitHeld(pod, "bound n1 card 0")

			// The grace period has begun. The watch has reported this once it reports the pod that is published next.
			now := metav1.Now()
			pod.DeletionTimestamp, pod.DeletionGracePeriodSeconds = &now, new(int64)
			pod.Finalizers = []string{"x/y"}
			pod.Status.Phase = corev1.PodRunning
			f.publishObject(pod)
			f.publishObject(mark)
			f.awaitHeld(mark, "bound n1 card 1")
			f.wantHeld(pod, "bound n1 card 0")

			pod.Status.Phase = phase
			f.publishObject(pod)
			f.awaitHeld(pod, "not held")
		})
	}
}

func TestANameUsedAgainIsAnotherPod(t *testing.T) {
	first, second := boundPod("p", 40, "n1", 0), boundPod("p", 10, "n1", 1)
	second.UID = "second"
	f := start(t, patient, newNode(t, "n1", 100, 100), first)
	// The watch was interrupted in the meantime: it reports an update instead of a deletion.
	f.publishObject(second)
	f.awaitHeld(second, "bound n1 card 1")
	f.awaitHeld(first, "not held")

	// A successor without a node frees the card as well.
	third := newPod("p", 10)
	third.UID = "third"
	f.publishObject(third)
	f.awaitHeld(second, "not held")
	f.wantHeld(third, "not held")
}

func TestADeletionThatWasMissed(t *testing.T) {
	pod := boundPod("p", 40, "n1", 0)
	f := start(t, patient, newNode(t, "n1", 100), pod)
	f.awaitHeld(pod, "bound n1 card 0")
	slimmer := new(slimmer)
	f.podEvents().OnDelete(cache.DeletedFinalStateUnknown{Key: "default/p", Obj: slimmer.pack(slimmer.pod(pod))})
	f.wantHeld(pod, "not held")
	f.nodeEvents().OnDelete(cache.DeletedFinalStateUnknown{Key: "n1", Obj: newNode(t, "n1", 100)})
	if nodes := f.ledger.Nodes(); len(nodes) != 0 {
		t.Errorf("nodes %+v", nodes)
	}
}

func TestANodeDeletedAndMadeAnewFindsItsPods(t *testing.T) {
	pod := boundPod("p", 40, "n1", 1)
	f := start(t, patient, newNode(t, "n1", 100, 100), pod)
	if err := f.client.CoreV1().Nodes().Delete(t.Context(), "n1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	asks := gpu.Pod{UID: "x", Request: 1}
	reason := func() (got placement.Reason) {
		f.ledger.Check(asks, []string{"n1"}, func(_ string, r placement.Reason) { got = r })
		return got
	}
	f.await("the node to go", func() bool { return reason() == placement.NotShared })
	f.wantHeld(pod, "bound n1 card 1")
	f.publishNode(newNode(t, "n1", 100, 100))
	f.await("the node to come", func() bool { return reason() == placement.Fits })
	if used := f.used("n1"); !cmp.Equal(used, []gpu.Memory{0, 40}) {
		t.Errorf("used %v", used)
	}
}

func TestANodeChanges(t *testing.T) {
	f := start(t, patient, newNode(t, "n1", 100))
	spec := func() ledger.NodeSpec {
		n, _ := f.ledger.Node("n1")
		return n.NodeSpec
	}
	f.publishNode(newNode(t, "n1", 100, 200))
	f.await("a card more", func() bool { return len(spec().Cards) == 2 })

	whole := newNode(t, "n1", 100, 200)
	whole.Status.Capacity[protocol.ResourceWholeCard] = amount("x", 2)["x"]
	f.publishNode(whole)
	f.await("whole cards", func() bool { return spec().WholeCards })

	plain := newNode(t, "n1", 100, 100)
	plain.Annotations = nil
	f.publishNode(plain)
	f.await("an existing plugin's node", func() bool { s := spec(); return s.Unit == 0 && len(s.Cards) == 2 })

	f.publishNode(newNode(t, "n1"))
	f.await("a node that shares nothing", func() bool { return len(f.ledger.Nodes()) == 0 })
}

func TestForgedAnnotationsOfABoundPodNeverChangeHowMuchItTakes(t *testing.T) {
	pod := boundPod("p", 40, "n1", 0)
	pod.Annotations[protocol.AnnotationPod] = "1"
	far := boundPod("far", 10, "n1", 99)
	f := start(t, patient, newNode(t, "n1", 100), pod, far)
	if used := f.used("n1"); !cmp.Equal(used, []gpu.Memory{40}) {
		t.Errorf("used %v", used)
	}
	f.wantHeld(far, "bound n1 card 99")
	changed := pod.DeepCopy()
	changed.Annotations[protocol.AnnotationAssumeTime] = protocol.Assignment{AssumeTime: time.Unix(9, 0)}.Annotations()[protocol.AnnotationAssumeTime]
	changed.Annotations[protocol.AnnotationPod] = "-5"
	f.publishObject(changed)
	f.await("the change", func() bool {
		_, h, _ := f.ledger.Lookup("uid-p")
		return h.AssumeTime.Equal(time.Unix(9, 0))
	})
	if used := f.used("n1"); !cmp.Equal(used, []gpu.Memory{40}) {
		t.Errorf("used %v", used)
	}
}
