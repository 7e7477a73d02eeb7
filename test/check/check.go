// Package check has the assertions of tests that need neither a cluster nor other goroutines.
package check

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Must ends the test if err is not nil.
func Must(t testing.TB, err error) {
	if err != nil {
		t.Helper() // Only here: it costs more than most of what tests do in a loop.
		t.Fatal(err)
	}
}

// NoError fails the test if err is not nil, and lets it go on.
func NoError(t testing.TB, err error) {
	if err != nil {
		t.Helper()
		t.Error(err)
	}
}

// Equal fails the test if the values differ. what names them.
func Equal(t testing.TB, what string, want, got any, options ...cmp.Option) {
	if diff := cmp.Diff(want, got, options...); diff != "" {
		t.Helper()
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}
