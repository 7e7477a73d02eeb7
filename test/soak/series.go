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

// rise returns by what part the median of the last day is higher than that of the second day. The first day isn't judged: the programs warm up. All
// days have the same load, and a fault changes too few samples to change a median.
func (s *series) rise(c calendar) float64 {
	var second, last []float64
	for _, p := range s.samples {
		switch {
		case p.at > c.day() && p.at <= 2*c.day():
			second = append(second, p.value)
		case p.at > 6*c.day():
			last = append(last, p.value)
		}
	}
	return median(last)/max(median(second), math.SmallestNonzeroFloat64) - 1
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
	// longRun is the shortest run in which a small rise is found. In a shorter one noise is more than that.
	longRun = 40 * time.Minute
	// maxRise is the allowed rise from the second to the last day, and maxShortRise that of a short run: the double.
	maxRise, maxShortRise = 0.1, 1
)

// growth returns an error if the series grows.
func (s *series) growth(c calendar) error {
	allowed := maxRise
	if c.length < longRun {
		allowed = maxShortRise
	}
	if rise := s.rise(c); mark(s, c) == "*" && rise > allowed {
		return fmt.Errorf("%s grows by %.1f%%", s.name, 100*rise)
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
