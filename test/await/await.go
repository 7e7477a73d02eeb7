// Package await waits in tests for what other goroutines do.
package await

import (
	"context"
	"sync"
	"testing"
	"time"
)

// patience only ends a failed test, so it is far longer than any wait takes.
const patience = time.Minute

// True waits until the condition is true. what names it in the error of a test that fails.
func True(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("timed out waiting: %s", what)
		}
	}
}

// Receive waits for a value from the channel, or for its end. what names the value in the error of a test that fails.
func Receive[T any](t testing.TB, what string, from <-chan T) (value T) {
	t.Helper()
	select {
	case value = <-from:
	case <-time.After(patience):
		t.Fatalf("timed out waiting: %s", what)
	}
	return value
}

// Run runs a part of a program in another goroutine until stop is called or the test ends. Both wait for its end. An error that it returns fails
// the test.
func Run(t testing.TB, run func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}
