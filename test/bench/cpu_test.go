package main

import (
	"strings"
	"testing"
	"time"
)

func TestParseStat(t *testing.T) {
	const rest = " S 7 1 1 0 -1 0 0 0 0 0 150 50 0 0 20 0 1 0 1 1 1"
	for text, want := range map[string]string{
		"12 (etcd)" + rest:      "etcd",
		"12 (a) b) (c)" + rest:  "a) b) (c",
		"12 (two words)" + rest: "two words",
	} {
		name, parent, took, err := parseStat(text)
		if err != nil || name != want || parent != "7" || took != 2*time.Second {
			t.Errorf("%q: %q, parent %q, took %v, %v", text, name, parent, took, err)
		}
	}
	for _, text := range []string{"", "12", "12 (etcd)", ") (", "12 (etcd" + rest, strings.Replace("12 (etcd)"+rest, "150", "x", 1)} {
		if _, _, _, err := parseStat(text); err == nil {
			t.Errorf("%q: no error", text)
		}
	}
}

func TestSpending(t *testing.T) {
	before := spending{"etcd": time.Second}
	got := spending{"etcd": 3 * time.Second, "bench": 500 * time.Millisecond}.since(before)
	if got.String() != "bench 0.5, etcd 2.0" || got.total() != 2500*time.Millisecond {
		t.Errorf("%v, total %v", got, got.total())
	}
}
