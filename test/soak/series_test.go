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
		"three percent a day in a long run":           {long, always, func(p, _ float64) float64 { return 50 * (1 + 0.21*p) }, grows},
		"the same for latencies":                      {long, inLongRuns, func(p, _ float64) float64 { return 50 * (1 + 0.21*p) }, grows},
		"the same for what isn't judged":              {long, never, func(p, _ float64) float64 { return 50 * (1 + 0.21*p) }, ""},
		"the same below the day's course":             {long, always, func(p, h float64) float64 { return 50 * (1 + 0.21*p + 0.3*math.Sin(h)) }, grows},
		"the day's course alone passes":               {long, always, func(_, h float64) float64 { return 50 * (1 + 0.3*math.Sin(h)) }, ""},
		"half a percent a day passes":                 {long, always, func(p, _ float64) float64 { return 50 * (1 + 0.035*p) }, ""},
		"noise alone passes":                          {long, always, func(_, _ float64) float64 { return 50 * noise(0.05) }, ""},
		"warming up passes":                           {long, always, func(p, _ float64) float64 { return 50 * min(1, 0.2+10*p) }, ""},
		"faults pass":                                 {long, always, func(_, _ float64) float64 { return []float64{50, 50, 50, 500}[random.IntN(4)] }, ""},
		"three percent a day in a short run is noise": {short, always, func(p, _ float64) float64 { return 50 * (1 + 0.21*p) }, ""},
		"more than a doubling in a short run":         {short, always, func(p, _ float64) float64 { return 50 * (1 + 3*p) }, grows},
		"latencies in a short run aren't judged":      {short, inLongRuns, func(p, _ float64) float64 { return 50 * (1 + 3*p) }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			err := recorded(tc.calendar, tc.judged, tc.value).growth(tc.calendar)
			if tc.want == "" && err != nil || tc.want != "" && !strings.Contains(fmt.Sprint(err), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}
