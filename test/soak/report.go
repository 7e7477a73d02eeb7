package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// report is the result of a run.
type report struct {
	options
	all    []*series
	counts counts
	events []event
}

func (w *week) report() *report {
	return &report{options: w.options, all: w.record.all, counts: w.load.totals(), events: w.trouble.events}
}

// judged says by what the run was judged.
func (r *report) judged() string {
	if r.length >= longRun {
		return "Judged: no card over its size, nothing left at the end, and the slope of each series with a *: at most 1% of the mean per simulated day."
	}
	return fmt.Sprintf("Judged: no card over its size, nothing left at the end, and no series with a * doubled. "+
		"Noise hides a slope of 1%% in so short a run; it is judged from %v on.", longRun)
}

// text returns the result as text.
func (r *report) text() string {
	var text strings.Builder
	fmt.Fprintf(&text, "%d pods created, %d ended, %d rejected by the kubelet, %d replaced\n",
		r.counts.created, r.counts.ended, r.counts.failed, r.counts.lost)
	if r.counts.heldBack > 0 {
		fmt.Fprintf(&text, "%d arrivals were held back, because %d pods waited: this machine binds fewer pods than arrive, so use a lower -rate or a longer -for\n",
			r.counts.heldBack, maxWaiting)
	}
	fmt.Fprintf(&text, "%d faults and updates: %s\n", len(r.events), r.happened())
	for _, s := range r.all {
		t := s.trend(r.calendar)
		fmt.Fprintf(&text, "%s %-33s mean %8.2f  median %8.2f %-14s slope %+6.2f%% a day, %3.0f%% of pairs rise\n",
			mark(s, r.calendar), s.name, t.mean, t.middle, s.unit, 100*t.slope, 100*t.rising)
	}
	return text.String()
}

// happened counts the events by kind.
func (r *report) happened() string {
	counts := map[string]int{}
	for _, e := range r.events {
		counts[e.what]++
	}
	var parts []string
	for _, what := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%s %d", what, counts[what]))
	}
	return strings.Join(parts, ", ")
}

// mark returns a star for a series that a run with this calendar judges.
func mark(s *series, c calendar) string {
	if s.judged == always || s.judged == inLongRuns && c.length >= longRun {
		return "*"
	}
	return " "
}
