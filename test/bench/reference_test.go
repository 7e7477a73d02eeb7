package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestFairShares(t *testing.T) {
	r := room{memory: [pools]int64{10, 20, 30}, cpu: [pools]int64{2, 4, 6}}
	for title, test := range map[string]struct {
		claims []claim
		want   []int64
	}{
		"in proportion to the weights":                {[]claim{{1, 100, anywhere}, {2, 100, anywhere}}, []int64{20, 40}},
		"what one doesn't ask for goes to the others": {[]claim{{1, 5, anywhere}, {1, 100, anywhere}, {1, 100, anywhere}}, []int64{5, 28, 27}},
		"a pool":                            {[]claim{{1, 100, firstPool}, {1, 100, anywhere}}, []int64{10, 50}},
		"two in one pool":                   {[]claim{{1, 100, firstPool}, {4, 100, firstPool}, {1, 100, secondPool}, {1, 100, anywhere}}, []int64{2, 8, 20, 30}},
		"CPU":                               {[]claim{{1, 100, byCPU}, {1, 100, anywhere}}, []int64{12, 48}},
		"CPU in pools that are nearly full": {[]claim{{1, 9, firstPool}, {1, 100, byCPU}, {1, 18, secondPool}, {1, 100, anywhere}}, []int64{9, 11, 16, 24}},
	} {
		if diff := cmp.Diff(test.want, fairShares(r, test.claims)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", title, diff)
		}
	}
}

func TestJain(t *testing.T) {
	for _, test := range []struct {
		values []float64
		want   float64
	}{{[]float64{0.5, 0.5}, 1}, {[]float64{1, 0, 0, 0}, 0.25}, {[]float64{1, 3}, 0.8}, {nil, 1}} {
		if got := jain(test.values); got != test.want {
			t.Errorf("jain(%v) = %v, want %v", test.values, got, test.want)
		}
	}
}
