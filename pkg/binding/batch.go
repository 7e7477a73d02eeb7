package binding

import (
	"context"
	"sync"
	"time"

	"k8s.io/utils/clock"
)

// windowPerBind is the time by which each bind that was sent delays the next ones. If binds arrive faster than that,
// the batches grow, up to what arrives in one window. If they arrive more slowly, the batches shrink.
const windowPerBind = 20 * time.Millisecond

// batch sends binds together when many arrive close together. The API server and etcd then need less work per bind
// (etcd writes its log once for all requests that it receives at a time), watchers wake up less often, and binds
// compete less with each other.
type batch struct {
	clock clock.WithTicker
	// window is the longest time for which binds are collected. Zero sends each at once.
	window time.Duration

	mu sync.Mutex
	// open is the time from which a bind is sent at once.
	open time.Time
	// next is closed to send the waiting binds; nil if none waits.
	next chan struct{}
	// waiting is the number of waiting binds.
	waiting int
}

// wait blocks until the bind may be sent: for one window at most, or until ctx ends.
func (b *batch) wait(ctx context.Context) {
	next := b.join()
	if next == nil {
		return
	}
	select {
	case <-next:
	case <-ctx.Done():
	}
}

// join returns the channel to wait for, or nil if the bind may be sent at once.
func (b *batch) join() <-chan struct{} {
	if b.window == 0 {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.next == nil {
		now := b.clock.Now()
		left := b.open.Sub(now)
		if left <= 0 {
			b.gone(now, 1)
			return nil
		}
		b.next = make(chan struct{})
		timer := b.clock.NewTimer(min(left, b.window)) // A clock that was set back must not lengthen the wait.
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
	b.gone(b.clock.Now(), b.waiting)
	close(b.next)
	b.next, b.waiting = nil, 0
}

// gone records that n binds were sent. The caller holds mu.
func (b *batch) gone(now time.Time, n int) {
	b.open = now.Add(min(time.Duration(n)*windowPerBind, b.window))
}
