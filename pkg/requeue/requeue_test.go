package requeue

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// wakerFixture is a running waker with a fake clock. Its run loop sleeps while the clock has a waiter.
type wakerFixture struct {
	*waker
	t      *testing.T
	clock  *clocktesting.FakeClock
	server *server
	counts *counts
	room   atomic.Bool // true if a rejected pod would fit now
}

func startWaker(t *testing.T) *wakerFixture {
	f := &wakerFixture{
		t: t, clock: clocktesting.NewFakeClock(time.Unix(1_000_000, 0)),
		server: &server{}, counts: &counts{n: map[string]int{}},
	}
	f.room.Store(true)
	f.waker = newWaker(f.clock, f.server, f.counts, func(gpu.Pod, string) bool { return f.room.Load() },
		func(gpu.Pod) (string, bool) { return "n1", f.room.Load() }, func() error { return nil })
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- f.run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("run: %v", err)
		}
	})
	return f
}

// sleeps waits until the waker waits for the clock.
func (f *wakerFixture) sleeps() {
	f.t.Helper()
	await(f.t, "the waker to sleep", f.clock.HasWaiters)
}

// round runs one round of the waker: memory of the node comes free, time passes, and the waker handles the free memory.
func (f *wakerFixture) round(node string) {
	f.t.Helper()
	f.freed(node)
	f.sleeps()
	f.clock.Step(wakeInterval + wakeDelay)
	await(f.t, "the waker's round", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return len(f.freedAt) == 0
	})
}

func (f *wakerFixture) wantWakes(want ...string) {
	f.t.Helper()
	await(f.t, "the wakes", func() bool { return len(f.server.wakes()) >= len(want) })
	if got := f.server.wakes(); !slices.Equal(got, want) {
		f.t.Errorf("woken by %v, want %v", got, want)
	}
}

func (f *wakerFixture) refusedPods() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.refused)
}

func pod(uid string) gpu.Pod {
	return gpu.Pod{UID: gpu.PodUID(uid), Namespace: "default", Name: uid, Request: 10}
}

func TestMemoryThatComesFreeWakesTheQueueOnce(t *testing.T) {
	f := startWaker(t)
	f.refuse(pod("a"), f.clock.Now())
	f.refuse(pod("b"), f.clock.Now())
	f.clock.Step(time.Second)
	f.round("n1")
	f.wantWakes("n1")
	await(t, "the refusals to be done with", func() bool { return f.refusedPods() == 0 })
	// No rejected pod is left: memory that comes free next causes no write.
	f.round("n1")
	f.round("n2")
	f.wantWakes("n1")
	if f.counts.of("woken") != 1 || f.counts.of("write node") != 1 {
		t.Errorf("counted %v", f.counts.n)
	}
}

// A rejection that is recorded long after filter read the ledger may miss the round of the memory that it needs.
func TestARefusalThatIsNotedLateIsLookedIntoAtOnce(t *testing.T) {
	f := startWaker(t)
	looked := f.clock.Now()
	f.clock.Step(time.Nanosecond)
	f.round("n1")
	f.refuse(pod("a"), looked)
	f.sleeps()
	f.clock.Step(wakeInterval + wakeDelay)
	f.wantWakes("n1")
}

func TestNobodyIsWokenInVain(t *testing.T) {
	tests := map[string]func(f *wakerFixture){
		"no pod was rejected": func(f *wakerFixture) {},
		"the pod asked again since": func(f *wakerFixture) {
			f.refuse(pod("a"), f.clock.Now())
			f.clock.Step(time.Second)
			f.freed("n1")
			f.sleeps()
			f.clock.Step(wakeDelay / 2)
			f.refuse(pod("a"), f.clock.Now())
		},
		"the pod has passed since": func(f *wakerFixture) {
			f.refuse(pod("a"), f.clock.Now())
			f.freed("n1")
			f.forget("a")
		},
		"the pod still wouldn't fit": func(f *wakerFixture) {
			f.refuse(pod("a"), f.clock.Now())
			f.room.Store(false)
		},
		"the refusal is so old that the scheduler has looked again by itself": func(f *wakerFixture) {
			f.refuse(pod("a"), f.clock.Now())
			f.clock.Step(refusalLife)
		},
	}
	for name, before := range tests {
		t.Run(name, func(t *testing.T) {
			f := startWaker(t)
			before(f)
			if name != "the pod asked again since" {
				f.clock.Step(time.Nanosecond)
				f.freed("n1")
				f.sleeps()
			}
			f.clock.Step(wakeInterval + wakeDelay)
			await(t, "the round", func() bool {
				f.mu.Lock()
				defer f.mu.Unlock()
				return len(f.freedAt) == 0
			})
			// A round with a reason shows that the previous one ended without a write.
			f.room.Store(true)
			f.refuse(pod("z"), f.clock.Now())
			f.clock.Step(time.Second)
			f.round("last")
			f.wantWakes("last")
		})
	}
}

func TestWakingIsRateLimited(t *testing.T) {
	f := startWaker(t)
	f.refuse(pod("a"), f.clock.Now())
	f.clock.Step(time.Nanosecond)
	f.freed("n1")
	f.sleeps()
	f.clock.Step(wakeDelay)
	f.wantWakes("n1")
	await(t, "the refusals to be done with", func() bool { return f.refusedPods() == 0 })

	f.refuse(pod("a"), f.clock.Now())
	f.clock.Step(time.Nanosecond)
	f.freed("n2")
	f.sleeps()
	f.clock.Step(wakeDelay)
	if !f.clock.HasWaiters() {
		t.Error("the second wake doesn't wait")
	}
	f.wantWakes("n1")
	f.clock.Step(wakeInterval)
	f.wantWakes("n1", "n2")
}

func TestAWakeThatFailsIsTriedAgain(t *testing.T) {
	f := startWaker(t)
	f.server.with(func(s *server) { s.noAnnotations = errors.New("no answer") })
	f.refuse(pod("a"), f.clock.Now())
	f.clock.Step(time.Nanosecond)
	f.freed("n1")
	f.sleeps()
	f.clock.Step(wakeInterval)
	await(t, "the first attempt", func() bool { return f.counts.of("write node") == 1 })
	f.sleeps() // No further memory comes free.
	f.server.with(func(s *server) { s.noAnnotations = nil })
	f.clock.Step(wakeInterval)
	f.wantWakes("n1")
	if f.counts.of("woken") != 1 {
		t.Errorf("counted %v", f.counts.n)
	}
}

// Memory came free on two nodes, and the write that would requeue the pods fails. At the retry, the node of the failed
// write has no room any more. The other node still counts.
func TestFailedRequeueRemembersEveryNode(t *testing.T) {
	f := startWaker(t)
	var taken atomic.Pointer[string]
	f.fits = func(_ gpu.Pod, node string) bool {
		if f.counts.of("write node") == 0 {
			taken.Store(&node) // The node of the first write.
		}
		return node != *taken.Load() || f.counts.of("write node") == 0
	}
	f.server.with(func(s *server) { s.noAnnotations = errLost })
	f.refuse(pod("a"), f.clock.Now())
	f.clock.Step(time.Nanosecond)
	f.freed("n1")
	f.freed("n2")
	f.sleeps()
	f.clock.Step(wakeInterval + wakeDelay)
	await(t, "the failed write", func() bool { return f.counts.of("write node") == 1 })
	f.sleeps()
	f.server.with(func(s *server) { s.noAnnotations = nil })
	f.clock.Step(wakeInterval + wakeDelay)
	f.wantWakes(map[string]string{"n1": "n2", "n2": "n1"}[*taken.Load()])
}

// The whole path: a pod is rejected because the watch lags, then the watch reports the change.
func TestALateWatchParksNoPod(t *testing.T) {
	holder, waits := boundPod("holder", 100, "n1", 0), newPod("waits", 60)
	f := start(t, patient, newNode(t, "n1", 100), holder, waits)
	want := gpu.Pod{UID: "uid-waits", Namespace: "default", Name: "waits", Request: 60}
	if f.fits(want, "n1") {
		t.Fatal("the node isn't full")
	}
	f.Refused(want, f.clock.Now())
	f.clock.Step(2 * time.Second)
	f.publishGone(holder)
	f.awaitHeld(holder, "not held")
	f.await("the wake", func() bool {
		f.clock.Step(settleInterval)
		return slices.Equal(f.server.wakes(), []string{"n1"})
	})
	if err := f.bind(waits); err != nil {
		t.Fatal(err)
	}
	// Rejections of bound pods are dropped.
	f.Refused(want, f.clock.Now())
	f.publish(waits)
	f.await("the refusal to be forgotten", func() bool {
		f.waker.mu.Lock()
		defer f.waker.mu.Unlock()
		return len(f.waker.refused) == 0
	})
	f.Refused(want, f.clock.Now())
	f.Passed(want.UID)
	if n := len(f.waker.refused); n != 0 {
		t.Errorf("%d refusals after the pod passed", n)
	}
}

// One check is enough for a node that helps no rejected pod, however many there are.
func TestManyRefusalsCostLittle(t *testing.T) {
	looks, room := 0, gpu.Memory(99)
	w := newWaker(clocktesting.NewFakeClock(time.Unix(1_000_000, 0)), &server{}, &counts{n: map[string]int{}},
		func(p gpu.Pod, _ string) bool { looks++; return p.Request <= room },
		func(gpu.Pod) (string, bool) { return "", false }, func() error { return nil })
	for i := range 10_000 {
		w.refuse(gpu.Pod{UID: gpu.PodUID(fmt.Sprint(i)), Request: gpu.Memory(100 + i%100), Priority: int32(i % 7)}, w.clock.Now().Add(-time.Second))
	}
	free := func() {
		for i := range 1000 {
			w.freed(fmt.Sprint("n", i))
		}
	}
	free()
	if node, _, _ := w.reason(); node != "" || looks > 1000 {
		t.Errorf("reason %q after %d looks, want none after one a node", node, looks)
	}
	free()
	looks, room = 0, 100
	if node, pod, _ := w.reason(); node == "" || pod.Request != 100 || looks > 2 {
		t.Errorf("reason %q, a pod of %d, after %d looks", node, pod.Request, looks)
	}
}

// Requests for pods that do not exist, and that are therefore never deleted, do not exhaust memory.
func TestRefusalsAreBounded(t *testing.T) {
	f := startWaker(t)
	for i := range maxRefused + 100 {
		f.refuse(pod(fmt.Sprint(i)), f.clock.Now())
	}
	if n := f.refusedPods(); n != maxRefused {
		t.Errorf("%d refusals are remembered, want %d", n, maxRefused)
	}
}

// The pod of leastOf stays off a node only if every pod stays off it.
func TestOneStandsForAll(t *testing.T) {
	f := start(t, patient, newNode(t, "n1", 100))
	rival := gpu.Pod{UID: "rival", Request: 100, Priority: 5}
	f.ledger.Nominate("n1", rival)
	small := gpu.Pod{UID: "small", Request: 10, Priority: 5}
	if f.fits(small, "n1") || !f.fits(rival, "n1") {
		t.Fatal("the nomination isn't held for")
	}
	if !f.fits(leastOf([]gpu.Pod{small, rival}), "n1") {
		t.Error("the nominated pod itself would not be woken")
	}
	f.ledger.Nominate("n1", gpu.Pod{UID: "higher", Request: 100, Priority: 7})
	if f.fits(leastOf([]gpu.Pod{small, rival}), "n1") {
		t.Error("a pod that all of them stand back for is passed over")
	}
}

// A pod that a former extender rejected before it was killed is requeued if there is room for it now.
func TestRefusalsAreInherited(t *testing.T) {
	for name, test := range map[string]struct {
		objects []runtime.Object
		wake    bool
	}{
		"room for a pod that waits":    {[]runtime.Object{newPod("large", 101), newPod("small", 60)}, true},
		"no room":                      {[]runtime.Object{newPod("large", 101), boundPod("b", 60, "n1", 0), newPod("small", 60)}, false},
		"no pending pod":               {[]runtime.Object{boundPod("b", 60, "n1", 0)}, false},
		"no pending pod of ours":       {[]runtime.Object{newPod("p", 0)}, false},
		"a pod that has ended unbound": {[]runtime.Object{ended(newPod("p", 10))}, false},
	} {
		for leads, begin := range map[string]func(t *testing.T, f *fixture){
			"the only extender": func(*testing.T, *fixture) {},
			"a new leader": func(t *testing.T, f *fixture) {
				f.server.with(func(s *server) { s.annotated = nil })
				if err := f.TakeOver(t.Context()); err != nil {
					t.Fatal(err)
				}
			},
		} {
			t.Run(name+", "+leads, func(t *testing.T) {
				t.Parallel()
				f := start(t, patient, append(test.objects, newNode(t, "n1", 100))...)
				if leads == "a new leader" && test.wake {
					f.awaitWakes("n1") // The first requeue comes from the cache sync, before the extender becomes a leader.
				}
				begin(t, f)
				if !test.wake {
					// A later requeue shows that the previous round ended without a write.
					f.waker.refuse(gpu.Pod{UID: "z", Request: 1}, f.clock.Now())
					f.clock.Step(time.Second)
					f.publishNode(newNode(t, "n2", 1))
					f.awaitWakes("n2")
					return
				}
				f.awaitWakes("n1")
			})
		}
	}
}

// A node may fit the pod of leastOf and none of the pods. The waker must then check the other nodes as well.
func TestAnInheritedRefusalIsLookedIntoOnEveryNode(t *testing.T) {
	objects := []runtime.Object{newNode(t, "room", 100), ranked(newPod("small", 30), 0), ranked(newPod("important", 1000), 9)}
	for i := range 20 {
		// 40 units are free, and held for the preemptor of the leaving pod.
		node := fmt.Sprint("n", i)
		nominated := ranked(newPod("nominated-"+node, 100), 5)
		nominated.Status.NominatedNodeName = node
		leaves := ranked(boundPod("leaves-"+node, 60, node, 0), 1)
		leaves.DeletionTimestamp, leaves.Finalizers = &metav1.Time{Time: begin}, []string{"test/kubelet"}
		objects = append(objects, newNode(t, node, 100), nominated, leaves)
	}
	f := start(t, patient, objects...)
	f.await("a wake", func() bool {
		f.clock.Step(settleInterval)
		return len(f.server.wakes()) > 0
	})
}

func ended(pod *corev1.Pod) *corev1.Pod {
	pod.Status.Phase = corev1.PodFailed
	return pod
}

// awaitWakes lets time pass until exactly these nodes were changed to requeue pods.
func (f *fixture) awaitWakes(nodes ...string) {
	f.t.Helper()
	f.await("the wakes", func() bool {
		f.clock.Step(settleInterval)
		return len(f.server.wakes()) >= len(nodes)
	})
	if got := f.server.wakes(); !slices.Equal(got, nodes) {
		f.t.Errorf("woken by %v, want %v", got, nodes)
	}
}

func TestAPodThatMayGoAnywhereAgainIsWoken(t *testing.T) {
	f := startWaker(t)
	f.refuse(pod("a"), f.clock.Now())
	f.clock.Step(time.Second)
	f.released("b") // That pod was not rejected.
	if f.clock.HasWaiters() {
		t.Fatal("a pod that wasn't refused set the waker going")
	}
	f.released("a")
	f.sleeps()
	f.clock.Step(wakeInterval + wakeDelay)
	f.wantWakes("n1")
}
