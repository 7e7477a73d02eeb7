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
	// sendAt is the time from which a bind is sent at once.
	sendAt time.Time
	// next is closed to send the waiting binds, at the time sendAt; nil if none waits.
	next chan struct{}
	// waiting is the number of waiting binds.
	waiting int
}

// wait blocks until the bind of a pod that has been pending for this time may be sent, or until ctx ends. It reports whether it waited.
func (b *batch) wait(ctx context.Context, pending time.Duration) (waited bool) {
	next := b.join(pending)
	if next == nil {
		return false
	}
	select {
	case <-next:
	case <-ctx.Done():
	}
	return true
}

// join returns the channel to wait for, or nil if the bind may be sent at once.
func (b *batch) join(pending time.Duration) <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.clock.Now()
	left := min(b.sendAt.Sub(now), b.window) // A clock that was set back must not lengthen the wait.
	switch {
	case left > pending/pendingPerWait:
		return nil
	case b.next == nil && left <= 0:
		b.sent(now, 1)
		return nil
	case b.next == nil:
		b.next = make(chan struct{})
		timer := b.clock.NewTimer(left)
		go func() {
			<-timer.C()
			b.release()
		}()
	}
	b.waiting++
	return b.next
}

// release sends all waiting binds.
func (b *batch) release() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sent(b.clock.Now(), b.waiting)
	close(b.next)
	b.next, b.waiting = nil, 0
}

// sent records that n binds were sent. The caller holds mu.
func (b *batch) sent(now time.Time, n int) {
	b.sendAt = now.Add(min(time.Duration(n)*windowPerBind, b.window))
}
