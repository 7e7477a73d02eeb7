package cluster

import (
	"context"
	"sync"
	"time"

	"k8s.io/utils/clock"
)

// windowPerBind is for how long each bind that goes keeps others waiting: where binds come more often than that, more and
// more of them go together, up to what comes in a window; where they come more rarely, fewer and fewer.
const windowPerBind = 20 * time.Millisecond

// batch has binds go together in a storm of them: the API server and etcd then take less for each (etcd, for one, writes
// its log once for all that it is given at a time), every watcher is woken less often, and all of them get less in each
// other's way.
type batch struct {
	clock clock.WithTicker
	// window is for how long binds are gathered at most; zero lets each go at once.
	window time.Duration

	mu sync.Mutex
	// open is from when on one may go at once.
	open time.Time
	// next lets those go that wait, once it is closed; nil where none waits.
	next chan struct{}
	// waiting is how many wait.
	waiting int
}

// wait returns when the bind may go, after a window at most, or when ctx ends.
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

// join returns what to wait for, nil for nothing.
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
		timer := b.clock.NewTimer(min(left, b.window)) // A clock that was set back must not make it longer.
		go func() {
			<-timer.C()
			b.release()
		}()
	}
	b.waiting++
	return b.next
}

// release lets all go that wait.
func (b *batch) release() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.gone(b.clock.Now(), b.waiting)
	close(b.next)
	b.next, b.waiting = nil, 0
}

// gone notes that so many went. It needs the lock.
func (b *batch) gone(now time.Time, n int) {
	b.open = now.Add(min(time.Duration(n)*windowPerBind, b.window))
}
