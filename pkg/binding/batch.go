package binding

import (
	"context"
	"sync"
	"time"

	"k8s.io/utils/clock"
)

const (
	// windowPerBind is the time by which each bind that was sent delays the next ones. If binds arrive faster than that,
	// the batches grow, up to what arrives in one window. If they arrive more slowly, the batches shrink.
	windowPerBind = 20 * time.Millisecond
	// pendingPerWait limits the wait of a bind: it is at most the time for which the pod has been pending, divided by this.
	pendingPerWait = 10
)

// batch sends binds together while pods arrive faster than they are bound. The API server and etcd then need less work per bind
// (etcd writes its log once for all requests that it receives at a time), watchers wake up less often, and binds compete less
// with each other. Pods that queue have been pending for long. So a bind waits only if the wait is short compared to that time, and
// a pod that is tried as soon as it is created is bound without a wait.
type batch struct {
	clock clock.WithTicker
	// window is the longest time for which binds are collected. Zero sends each at once.
	window time.Duration

	mu sync.Mutex
	// sendAt is when the waiting binds are sent, or were sent. Without any it is the time from which a bind is sent at once.
	sendAt time.Time
	// waiting is the number of binds that are sent at sendAt.
	waiting int
}

// wait blocks until the bind of a pod that has been pending for this time may be sent, or until ctx ends. It reports whether it waited.
func (b *batch) wait(ctx context.Context, pending time.Duration) (waited bool) {
	left := b.join(pending)
	if left <= 0 {
		return false
	}
	select {
	case <-b.clock.After(left):
	case <-ctx.Done():
	}
	return true
}

// join returns how long the bind has to wait, zero if it may be sent at once. All binds that wait at the same time end their waits together.
func (b *batch) join(pending time.Duration) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.clock.Now()
	if b.waiting > 0 && !now.Before(b.sendAt) {
		b.sent(b.sendAt, b.waiting)
	}
	left := min(b.sendAt.Sub(now), b.window) // A clock that was set back must not lengthen the wait.
	switch {
	case left > pending/pendingPerWait:
		return 0
	case left <= 0:
		b.sent(now, 1)
		return 0
	}
	b.sendAt, b.waiting = now.Add(left), b.waiting+1
	return left
}

// sent records that n binds were sent at a time, and that none waits. The caller holds mu.
func (b *batch) sent(at time.Time, n int) {
	b.sendAt, b.waiting = at.Add(min(time.Duration(n)*windowPerBind, b.window)), 0
}
