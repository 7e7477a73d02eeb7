package fairness

import (
	"testing"

	"github.com/gpushare/gpushare/test/check"
)

func TestShares(t *testing.T) {
	r := Room{Memory: [Pools]int64{10, 20, 30}, CPU: [Pools]int64{2, 4, 6}}
	for title, test := range map[string]struct {
		claims []Claim
		want   []int64
	}{
		"in proportion to the weights":                {[]Claim{{1, 100, Anywhere}, {2, 100, Anywhere}}, []int64{20, 40}},
		"what one doesn't ask for goes to the others": {[]Claim{{1, 5, Anywhere}, {1, 100, Anywhere}, {1, 100, Anywhere}}, []int64{5, 28, 27}},
		"a pool":                            {[]Claim{{1, 100, FirstPool}, {1, 100, Anywhere}}, []int64{10, 50}},
		"two in one pool":                   {[]Claim{{1, 100, FirstPool}, {4, 100, FirstPool}, {1, 100, SecondPool}, {1, 100, Anywhere}}, []int64{2, 8, 20, 30}},
		"CPU":                               {[]Claim{{1, 100, ByCPU}, {1, 100, Anywhere}}, []int64{12, 48}},
		"CPU in pools that are nearly full": {[]Claim{{1, 9, FirstPool}, {1, 100, ByCPU}, {1, 18, SecondPool}, {1, 100, Anywhere}}, []int64{9, 11, 16, 24}},
	} {
		check.Equal(t, title, test.want, Shares(r, test.claims))
	}
}

func TestJain(t *testing.T) {
	for _, test := range []struct {
		values []float64
		want   float64
	}{{[]float64{0.5, 0.5}, 1}, {[]float64{1, 0, 0, 0}, 0.25}, {[]float64{1, 3}, 0.8}, {nil, 1}} {
		if got := Jain(test.values); got != test.want {
			t.Errorf("Jain(%v) = %v, want %v", test.values, got, test.want)
		}
	}
}
