package main

import "testing"

// TestComparable: only what differs each time is left out of a comparison.
func TestComparable(t *testing.T) {
	for _, test := range []struct {
		name, page, output string
		equal              bool
	}{
		{"widths and times", "Pending  2026-11-22T09:30:12Z  no room", "Pending    2027-01-02T03:04:05Z    no room", true},
		{"names of a Deployment's pods", "default/binpack-1-74b449d478-pvp24 to n2", "default/binpack-1-58b9865c98-jsdht to n2", true},
		{"the name of a Deployment", "default/binpack-1-74b449d478-pvp24 to n2", "default/binpack-2-74b449d478-pvp24 to n2", false},
		{"ages", "Warning  Failed  2s    scheduler", "Warning  Failed  3m31s (x2 over 4m)  scheduler", true},
		{"nanoseconds", "ASSUME_TIME: 1795296606622809725", "ASSUME_TIME: 1795710022414819156", true},
		{"amounts", "n2  16207/16276", "n2  16207/16277", false},
		{"words", "0/4 nodes are available: 4 a", "0/4 nodes are available: 3 a", false},
	} {
		if got := comparable(test.page) == comparable(test.output); got != test.equal {
			t.Errorf("%s: %q and %q are equal: %v, want %v", test.name, comparable(test.page), comparable(test.output), got, test.equal)
		}
	}
}
