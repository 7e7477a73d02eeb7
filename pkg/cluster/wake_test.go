package cluster

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// wakerFixture is a running waker whose time the test moves. Its run sleeps whenever the clock has a waiter.
type wakerFixture struct {
	*waker
	t      *testing.T
	clock  *clocktesting.FakeClock
	server *server
	counts *counts
	room   atomic.Bool // whether a refused pod would fit now
}

func startWaker(t *testing.T) *wakerFixture {
	f := &wakerFixture{
		t: t, clock: clocktesting.NewFakeClock(time.Unix(1_000_000, 0)),
		server: &server{}, counts: &counts{n: map[string]int{}},
	}
	f.room.Store(true)
	f.waker = newWaker(f.clock, f.server, f.counts, func(gpu.Pod, string) bool { return f.room.Load() },
		func(gpu.Pod) string { return "n1" }, func() error { return nil })
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

// sleeps waits until the waker waits for time to pass.
func (f *wakerFixture) sleeps() {
	f.t.Helper()
	await(f.t, "the waker to sleep", f.clock.HasWaiters)
}

// round lets the waker go through one round: something came free, time passes, and what was free is looked at.
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
	// Nobody is refused any more: nothing is written for what comes free next.
	f.round("n1")
	f.round("n2")
	f.wantWakes("n1")
	if f.counts.of("woken") != 1 || f.counts.of("write node") != 1 {
		t.Errorf("counted %v", f.counts.n)
	}
}

func TestNobodyIsWokenInVain(t *testing.T) {
	tests := map[string]func(f *wakerFixture){
		"nobody was refused": func(f *wakerFixture) {},
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
			// A round with a reason shows that the one before ended without a write.
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
	f.sleeps() // Without anything new that comes free.
	f.server.with(func(s *server) { s.noAnnotations = nil })
	f.clock.Step(wakeInterval)
	f.wantWakes("n1")
	if f.counts.of("woken") != 1 {
		t.Errorf("counted %v", f.counts.n)
	}
}

// The whole way: a pod is refused since the watch lags, then the watch tells.
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
	// Bound pods are no longer waited for.
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

func TestAPodThatMayGoAnywhereAgainIsWoken(t *testing.T) {
	f := startWaker(t)
	f.refuse(pod("a"), f.clock.Now())
	f.clock.Step(time.Second)
	f.released("b") // Nobody refused that one.
	if f.clock.HasWaiters() {
		t.Fatal("a pod that wasn't refused set the waker going")
	}
	f.released("a")
	f.sleeps()
	f.clock.Step(wakeInterval + wakeDelay)
	f.wantWakes("n1")
}
