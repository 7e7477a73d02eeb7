// Package background runs functions: once in an interval, several at a time, or at a signal.
package background

import (
	"context"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/utils/clock"
)

// Group runs functions concurrently, such as an errgroup.Group. In simulations it runs coroutines on a virtual clock.
type Group interface {
	// Go starts the function, and waits before if the limit is reached.
	Go(run func() error)
	// Wait waits until all functions have returned, and returns the first error.
	Wait() error
}

// Goroutines returns a Group that runs at most limit functions at a time; a negative limit means none.
func Goroutines(limit int) Group {
	group := new(errgroup.Group)
	group.SetLimit(limit)
	return group
}

// Every makes a step per interval until ctx ends. It returns no error.
func Every(ctx context.Context, c clock.WithTicker, interval time.Duration, step func(context.Context)) error {
	ticker := c.NewTicker(interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
		}
		step(ctx)
	}
}

// Signal is a channel that wakes a goroutine: any number of calls of Raise before a receive are one. Use NewSignal.
type Signal chan struct{}

// NewSignal returns a signal that isn't raised.
func NewSignal() Signal { return make(Signal, 1) }

// Raise wakes the receiver. It doesn't block.
func (s Signal) Raise() {
	select {
	case s <- struct{}{}:
	default:
	}
}
