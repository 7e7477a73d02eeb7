package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

// recorded returns a series with a value for each interval of the run. progress is from 0 to 1, and hour the time of day in radians.
func recorded(c calendar, judged judgement, value func(progress, hour float64) float64) *series {
	s := &series{name: "figure", judged: judged}
	for at := c.interval; at <= c.length; at += c.interval {
		progress := float64(at) / float64(c.length)
		s.samples = append(s.samples, sample{at, value(progress, 2*math.Pi*7*progress)})
	}
	return s
}

var (
	short = newCalendar(105 * time.Second)
	long  = newCalendar(time.Hour)
)

// TestTrend checks that the slope is found under a load that follows the time of day, and none where there is none.
func TestTrend(t *testing.T) {
	for name, perDay := range map[string]float64{"flat": 0, "grows": 0.02, "shrinks": -0.02} {
		s := recorded(long, always, func(progress, hour float64) float64 { return 100 + 50*math.Sin(hour) + 100*perDay*7*progress })
		want := perDay * 100 / (100 + 100*perDay*7*0.55) // The mean is that of the last nine tenths.
		if got := s.trend(long); math.Abs(got.slope-want) > 0.001 {
			t.Errorf("%s: slope %v, want %v", name, got.slope, want)
		}
	}
}

func TestGrowth(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	noise := func(deviation float64) float64 { return 1 + deviation*random.NormFloat64() }
	const grows = "figure grows"
	for name, tc := range map[string]struct {
		calendar calendar
		judged   judgement
		value    func(progress, hour float64) float64
		want     string
	}{
		"a flat series in a long run passes":       {long, always, func(_, _ float64) float64 { return 50 }, ""},
		"two percent a day in a long run":          {long, always, func(p, _ float64) float64 { return 50 * (1 + 0.14*p) }, grows},
		"the same for latencies":                   {long, inLongRuns, func(p, _ float64) float64 { return 50 * (1 + 0.14*p) }, grows},
		"the same for what isn't judged":           {long, never, func(p, _ float64) float64 { return 50 * (1 + 0.14*p) }, ""},
		"half a percent a day passes":              {long, always, func(p, _ float64) float64 { return 50 * (1 + 0.035*p) }, ""},
		"two percent a day below the day's course": {long, always, func(p, h float64) float64 { return 50 * (1 + 0.14*p + 0.3*math.Sin(h)) }, grows},
		"the day's course alone passes":            {long, always, func(_, h float64) float64 { return 50 * (1 + 0.3*math.Sin(h)) }, ""},
		"noise alone passes":                       {long, always, func(_, _ float64) float64 { return 50 * noise(0.2) }, ""},
		"a rise above noise":                       {long, always, func(p, _ float64) float64 { return 50 * (1 + 0.7*p) * noise(0.1) }, grows},
		"warming up passes":                        {long, always, func(p, _ float64) float64 { return 50 * min(1, 0.2+10*p) }, ""},
		"faults pass": {long, always, func(p, _ float64) float64 {
			if p > 0.5 && random.IntN(10) == 0 {
				return 500
			}
			return 50
		}, ""},
		"one goroutine more for each fault":                {long, always, func(p, _ float64) float64 { return 100 + math.Floor(60*p) }, grows},
		"two percent a day in a short run is within noise": {short, always, func(p, _ float64) float64 { return 50 * (1 + 0.14*p) }, ""},
		"a doubling in a short run":                        {short, always, func(p, _ float64) float64 { return 50 * (1 + 3*p) }, grows},
		"latencies in a short run aren't judged":           {short, inLongRuns, func(p, _ float64) float64 { return 50 * (1 + 3*p) }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			err := recorded(tc.calendar, tc.judged, tc.value).growth(tc.calendar)
			if tc.want == "" && err != nil || tc.want != "" && !strings.Contains(fmt.Sprint(err), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

func TestTooFewSamples(t *testing.T) {
	for name, c := range map[string]calendar{"short": short, "long": long} {
		s := recorded(c, always, func(_, _ float64) float64 { return 50 })
		if err := judgeSeries([]*series{s}, c); err != nil {
			t.Errorf("%s, all samples: %v", name, err)
		}
		s.samples = s.samples[:len(s.samples)/3]
		if err := judgeSeries([]*series{s}, c); err == nil {
			t.Errorf("%s: a third of the samples is enough", name)
		}
	}
}
