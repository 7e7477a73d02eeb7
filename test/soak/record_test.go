package main

import (
	"math"
	"testing"
	"time"
)

// TestGrowth checks that the growth of a series is found under a load that follows the time of day, and none where there is none.
func TestGrowth(t *testing.T) {
	week := func(perDay float64) *series {
		s := &series{}
		for i := range 7 * 48 {
			at := time.Duration(i) * time.Hour / 48
			days := at.Hours()
			s.samples = append(s.samples, sample{at, 100 + 50*math.Sin(2*math.Pi*days) + 100*perDay*days})
		}
		return s
	}
	for name, perDay := range map[string]float64{"flat": 0, "grows": 0.02, "shrinks": -0.02} {
		s := week(perDay)
		want := perDay * 100 / (100 + 100*perDay*3.99)
		if got := s.growth(time.Hour); math.Abs(got-want) > 0.001 {
			t.Errorf("%s: growth %v, want %v", name, got, want)
		}
	}
}
