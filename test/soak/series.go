package main

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"
)

// sample is a figure at a time since the start.
type sample struct {
	at    time.Duration
	value float64
}

// judgement says in which runs a series must not grow.
type judgement int

const (
	never judgement = iota
	// inLongRuns is for figures that faults change for a while, such as latencies.
	inLongRuns
	always
)

// series is a figure over the week.
type series struct {
	name, unit string
	judged     judgement
	samples    []sample
}

// calendar is how the week is divided. A day is a whole number of intervals.
type calendar struct {
	length time.Duration
	// interval is the time between two samples.
	interval time.Duration
}

// newCalendar returns the calendar of a run. Samples cost something, so they are at least five seconds apart.
func newCalendar(length time.Duration) calendar {
	perDay := min(max(length/7/(5*time.Second), 1), 72)
	return calendar{length: length, interval: length / 7 / perDay}
}

// day and hour are the real time that a simulated day and hour take.
func (c calendar) day() time.Duration  { return c.length / 7 }
func (c calendar) hour() time.Duration { return c.day() / 24 }

// warmUp is the time at the start that isn't judged, a tenth of the run.
func (c calendar) warmUp() time.Duration { return c.length / 10 }

// trend is how a series changes after the first tenth of the run.
type trend struct {
	// slope is the rise per simulated day, as a part of the mean over the same time.
	slope float64
	// rising is the part of the compared pairs of samples of which the later one is higher. For noise it is about a half.
	rising float64
	// mean is the mean over that time, and middle the median.
	mean, middle float64
}

// trend fits a robust line to the samples after the first tenth of the run. Its slope is the median of the slopes between all pairs
// of samples that are a whole number of days apart (the seasonal form of the Theil-Sen estimator). So what a few faults do to some
// samples doesn't change it, and the load, which follows the time of day, is the same for both samples of a pair.
func (s *series) trend(c calendar) trend {
	type point struct{ days, value float64 }
	times := map[int][]point{} // By the time of day.
	perDay := int(math.Round(float64(c.day()) / float64(c.interval)))
	var values []float64
	for _, p := range s.samples {
		if p.at >= c.warmUp() {
			number := int(math.Round(float64(p.at) / float64(c.interval)))
			times[number%perDay] = append(times[number%perDay], point{float64(number / perDay), p.value})
			values = append(values, p.value)
		}
	}
	var slopes []float64
	rising := 0
	for _, points := range times {
		for i, later := range points {
			for _, earlier := range points[:i] {
				if later.days > earlier.days {
					slopes = append(slopes, (later.value-earlier.value)/(later.days-earlier.days))
				}
				if later.days > earlier.days && later.value > earlier.value {
					rising++
				}
			}
		}
	}
	t := trend{mean: mean(values), middle: median(values)}
	if len(slopes) > 0 && t.mean != 0 {
		t.slope, t.rising = median(slopes)/t.mean, float64(rising)/float64(len(slopes))
	}
	return t
}

func mean(values []float64) (mean float64) {
	for _, v := range values {
		mean += v / float64(len(values))
	}
	return mean
}

// median returns the median, 0 of nothing. It sorts the values.
func median(values []float64) float64 {
	slices.Sort(values)
	n := len(values)
	if n == 0 {
		return 0
	}
	return (values[(n-1)/2] + values[n/2]) / 2
}

const (
	// longRun is the shortest run in which the slope is judged. In a shorter one noise is more than the slope that is allowed.
	longRun = 40 * time.Minute
	// maxSlope is the allowed rise per simulated day, as a part of the mean.
	maxSlope = 0.01
	// minRising is the least part of rising pairs in a series that grows. A slope with fewer is noise.
	minRising = 2.0 / 3
	// maxFactor is the bound of a short run: by how much the last third of the samples may be higher than the first.
	maxFactor = 2
)

// growth returns an error if the series grows. In a long run it is judged by its trend. In a short one only a doubling is found: the
// medians of the first and the last third of the samples after the first tenth are compared.
func (s *series) growth(c calendar) error {
	switch {
	case s.judged == never, s.judged == inLongRuns && c.length < longRun:
		return nil
	case c.length >= longRun:
		if t := s.trend(c); t.slope > maxSlope && t.rising >= minRising {
			return fmt.Errorf("%s grows by %.1f%% a day", s.name, 100*t.slope)
		}
		return nil
	}
	var values []float64
	for _, p := range s.samples {
		if p.at >= c.warmUp() {
			values = append(values, p.value)
		}
	}
	third := len(values) / 3
	first, last := median(slices.Clone(values[:third])), median(slices.Clone(values[len(values)-third:]))
	if last > maxFactor*first {
		return fmt.Errorf("%s grows from %.4g to %.4g", s.name, first, last)
	}
	return nil
}

// judgeSeries returns an error for each series that grows, and for each that has too few samples to be judged.
func judgeSeries(all []*series, c calendar) error {
	var errs []error
	for _, s := range all {
		if want := int(c.length / c.interval / 2); mark(s, c) == "*" && len(s.samples) < want {
			errs = append(errs, fmt.Errorf("%s has only %d samples, want %d", s.name, len(s.samples), want))
		}
		errs = append(errs, s.growth(c))
	}
	return errors.Join(errs...)
}
