// Package await waits in tests for what other goroutines do.
package await

import (
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
