package requeue

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// attemptsFixture is attempts for a cluster of 1,000 nodes with one pending pod. The test moves the clock and calls the
// rounds.
type attemptsFixture struct {
	*attempts
	clock *clocktesting.FakeClock
	// pod is nil once it is no longer pending.
	pod *corev1.Pod
	// room is the node with room, or "" if there is none.
	room     string
	requeues []string
	standby  error
}

func newAttemptsFixture() *attemptsFixture {
	f := &attemptsFixture{clock: clocktesting.NewFakeClock(begin), pod: newPod("p", 10), room: "n1"}
	roomFor := func(*corev1.Pod) (string, bool) { return f.room, f.room != "" }
	f.attempts = &attempts{
		clock: f.clock, begun: make(chan struct{}, 1), pods: map[gpu.PodUID]triedPod{},
		pending: func(uid gpu.PodUID) (*corev1.Pod, bool) { return f.pod, f.pod != nil && uid == gpu.PodUID(f.pod.UID) },
		roomFor: roomFor, anyFit: func(gpu.Pod) (string, bool) { return roomFor(nil) },
		requeue: func(node string) { f.requeues = append(f.requeues, node) },
		nodes:   func() int { return 1000 }, leading: func() error { return f.standby },
	}
	return f
}

// pass lets time pass and makes the rounds that run would make.
func (f *attemptsFixture) pass(time time.Duration) {
	for end := f.clock.Now().Add(time); ; {
		pause, some := f.sleep()
		if !some || f.clock.Now().Add(pause).After(end) {
			f.clock.SetTime(end)
			return
		}
		f.clock.Step(pause)
		f.round()
	}
}

func (f *attemptsFixture) reject() {
	f.pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable}}
}

const podP = gpu.PodUID("uid-p")

func TestSampledPodIsRequeued(t *testing.T) {
	f := newAttemptsFixture()
	f.sampled(podP, minSample)
	f.pass(attemptPause)
	if diff := cmp.Diff([]string{"n1"}, f.requeues); diff != "" {
		t.Fatalf("requeues (-want +got):\n%s", diff)
	}
	// The pod is rejected repeatedly. Soon every node has been in a sample twice, and from then on the pauses grow.
	f.sampled(podP, minSample)
	f.pass(time.Minute)
	first := len(f.requeues)
	f.pass(time.Hour)
	if later := len(f.requeues) - first; first < 22 || later < 10 || later > 20 {
		t.Errorf("%d requeues in the first minute and %d in the hour after it, want at least 22 and 10 to 20", first, later)
	}
}

func TestSampledPodIsNotRequeuedInVain(t *testing.T) {
	for name, act := range map[string]func(f *attemptsFixture){
		"no node was left out":           func(f *attemptsFixture) { f.sampled(podP, minSample-1) },
		"no other node has room":         func(f *attemptsFixture) { f.sampled(podP, minSample); f.room = "" },
		"the pod passed since":           func(f *attemptsFixture) { f.sampled(podP, minSample); f.passed(podP) },
		"a bind of the pod came":         func(f *attemptsFixture) { f.sampled(podP, minSample); f.forget(podP) },
		"the pod isn't pending any more": func(f *attemptsFixture) { f.sampled(podP, minSample); f.pod = nil },
		"the pod is unknown":             func(f *attemptsFixture) { f.sampled("unknown", minSample) },
		"another replica leads":          func(f *attemptsFixture) { f.sampled(podP, minSample); f.standby = errors.New("standby") },
	} {
		t.Run(name, func(t *testing.T) {
			f := newAttemptsFixture()
			act(f)
			f.pass(10 * time.Minute)
			if len(f.requeues) > 0 {
				t.Errorf("requeued by %v", f.requeues)
			}
			if f.standby == nil && len(f.pods) > 0 {
				t.Errorf("still remembered: %v", f.pods)
			}
		})
	}
}

// filter names a few nodes and no bind follows: once kube-scheduler has rejected the pod it is requeued, and filter
// names every node.
func TestFewNamedNodesWithoutBind(t *testing.T) {
	f := newAttemptsFixture()
	if f.mustNameAll(podP) {
		t.Fatal("every node is to be named for a pod that was never filtered")
	}
	f.namedFew(podP)
	f.pass(10 * time.Second) // A step before the bind takes time, such as the creation of a volume.
	if len(f.requeues) > 0 {
		t.Fatalf("requeued by %v, though kube-scheduler hasn't rejected the pod", f.requeues)
	}
	f.reject()
	f.pass(10 * time.Second)
	if diff := cmp.Diff([]string{""}, f.requeues); diff != "" {
		t.Fatalf("requeues (-want +got):\n%s", diff)
	}
	if !f.mustNameAll(podP) {
		t.Error("few nodes are to be named again")
	}
	f.passed(podP)
	f.pass(time.Hour) // The pod is rejected although filter named every node, so filter is not the cause.
	if len(f.requeues) != 1 || !f.mustNameAll(podP) {
		t.Errorf("requeues %q, and then few nodes are named again", f.requeues)
	}
	f.forget(podP)
	if f.mustNameAll(podP) || len(f.pods) > 0 {
		t.Errorf("the pod is remembered after its bind: %v", f.pods)
	}
}

// A second filter call without a bind in between gets every node, even before the pod is due.
func TestNameAllWithoutRequeue(t *testing.T) {
	f := newAttemptsFixture()
	f.namedFew(podP)
	if !f.mustNameAll(podP) {
		t.Error("few nodes are to be named again")
	}
	f.sampled(podP, minSample)
	f.passed(podP)
	if !f.mustNameAll(podP) {
		t.Error("a rejection in between makes filter name few nodes again")
	}
}

// Requests for pods that do not exist do not exhaust memory.
func TestAttemptsAreBounded(t *testing.T) {
	f := newAttemptsFixture()
	for i := range maxRefused + 10 {
		f.namedFew(gpu.PodUID(fmt.Sprint(i)))
	}
	if len(f.pods) != maxRefused {
		t.Errorf("%d pods are remembered, want %d", len(f.pods), maxRefused)
	}
}

// In the running cluster, the pod is requeued by a change of the node that has room and that the pod's spec allows.
func TestSampledPodIsRequeuedByANodeInReach(t *testing.T) {
	pod := newPod("p", 60)
	pod.Spec.NodeSelector = map[string]string{"pool": "a"}
	inReach := func(cards ...int64) *corev1.Node {
		node := newNode(t, "in-reach", cards...)
		node.Labels = pod.Spec.NodeSelector
		return node
	}
	f := start(t, patient, newNode(t, "elsewhere", 100), inReach(100), boundPod("b", 60, "in-reach", 0))
	f.publishObject(pod)
	f.await("the pod to be known", func() bool { _, known := f.pending.object(podP); return known })
	f.Sampled(gpu.PodUID(pod.UID), minSample)
	f.await("the pod to be forgotten, since it may go to no node with room", func() bool {
		f.clock.Step(settleInterval)
		f.attempts.mu.Lock()
		defer f.attempts.mu.Unlock()
		return len(f.attempts.pods) == 0
	})
	if got := f.server.wakes(); len(got) > 0 {
		t.Fatalf("requeued by %v", got)
	}
	f.publishNode(inReach(100, 100))
	f.await("room", func() bool { return f.fits(gpu.Pod{UID: podP, Request: 60}, "in-reach") })
	f.Sampled(gpu.PodUID(pod.UID), minSample)
	f.awaitWakes("in-reach")
	f.server.set(pod)
	if err := f.Bind(t.Context(), f.request(pod, "in-reach")); err != nil {
		t.Fatal(err)
	}
	f.attempts.mu.Lock()
	defer f.attempts.mu.Unlock()
	if len(f.attempts.pods) > 0 {
		t.Errorf("remembered after the bind: %v", f.attempts.pods)
	}
}
