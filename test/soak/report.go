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
		return "Judged: no card over its size, nothing left at the end, and the rise of each series with a *: at most 10% from the second simulated day to the last."
	}
	return fmt.Sprintf("Judged: no card over its size, nothing left at the end, and no series with a * doubled. "+
		"Noise hides a rise of 10%% in so short a run; it is judged from %v on.", longRun)
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
		var values []float64
		for _, p := range s.samples {
			values = append(values, p.value)
		}
		fmt.Fprintf(&text, "%s %-33s median %8.2f %-14s %+6.1f%% from the second day to the last\n", mark(s, r.calendar), s.name, median(values), s.unit, 100*s.rise(r.calendar))
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
