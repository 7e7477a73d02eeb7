package main

import (
	"fmt"
	"html/template"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// report is the result of a run.
type report struct {
	options
	all    []*series
	counts counts
	events []event
	start  time.Time
	// failure is nil for a run that passed.
	failure error
}

func (w *week) report(failure error) *report {
	return &report{
		options: w.options, all: w.record.all, counts: w.load.totals(), events: w.trouble.events, start: w.record.started, failure: failure,
	}
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

const (
	plotWidth, plotHeight = 800, 120
)

// x returns the place of a time in a plot.
func (r *report) x(at time.Duration) float64 {
	return math.Min(1, at.Seconds()/r.length.Seconds()) * plotWidth
}

// plot is a series as it is drawn. Line has the points of an SVG polyline, and Slope those of the fitted line.
type plot struct {
	Name, Unit, Line, Slope string
	Top, Median             string
}

func (r *report) plot(s *series) plot {
	top := 1e-9
	for _, p := range s.samples {
		top = max(top, p.value)
	}
	y := func(value float64) float64 { return plotHeight * (1 - max(value, 0)/top) }
	var points strings.Builder
	for _, p := range s.samples {
		fmt.Fprintf(&points, "%.1f,%.1f ", r.x(p.at), y(p.value))
	}
	t := s.trend(r.calendar)
	out := plot{Name: s.name, Unit: s.unit, Line: points.String(), Top: fmt.Sprintf("%.4g", top), Median: fmt.Sprintf("%.4g", t.middle)}
	if mark(s, r.calendar) != " " {
		// The line goes through the median in the middle of the time that it is fitted to.
		from, to := r.warmUp(), r.length
		rise := t.slope * t.mean * float64(to-from) / float64(r.day())
		out.Slope = fmt.Sprintf("%.1f,%.1f %.1f,%.1f", r.x(from), y(t.middle-rise/2), r.x(to), y(t.middle+rise/2))
	}
	return out
}

var page = template.Must(template.New("report").Parse(`<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>gpushare: a simulated week</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
pre { white-space: pre-wrap; font-size: 12px }
svg { width: 100%; height: auto; border: 1px solid #ccc; overflow: visible }
polyline { fill: none; stroke: #0b57d0; stroke-width: 1.2 }
.slope { stroke: #c60; stroke-dasharray: 6 4 }
.day { stroke: #ddd } .event { stroke: #d33 } .update { stroke: #2a2 }
.bad { color: #b00020; font-weight: 600; white-space: pre-line } h2 { font-size: 1rem; margin: 1.5rem 0 .2rem }
</style>
<h1>gpushare: a simulated week</h1>
<p {{if .Failure}}class="bad"{{end}}>{{if .Failure}}Failed: {{.Failure}}{{else}}Passed.{{end}}</p>
<p>{{.Nodes}} nodes of {{.Cards}} cards; the week took {{.Length}}, with {{.Pods}} pods. Grey lines are midnights, red marks faults, green
ones updates. Each plot begins at 0; a dashed line is the slope of a series that is judged. Memory, goroutines and open files are those of
programs that were never restarted. {{.Judged}}</p>
<pre>{{.Text}}</pre>
{{range .Plots}}<h2>{{.Name}}: median {{.Median}}, highest {{.Top}} {{.Unit}}</h2>
<svg viewBox="0 0 800 120" role="img" aria-label="{{.Name}}">
{{range $.Midnights}}<line class="day" x1="{{.}}" x2="{{.}}" y1="0" y2="120"/>{{end}}
{{range $.Events}}<line class="event{{if .Update}} update{{end}}" x1="{{.X}}" x2="{{.X}}" y1="112" y2="120"><title>{{.What}}</title></line>{{end}}
<polyline points="{{.Line}}"/>{{with .Slope}}<polyline class="slope" points="{{.}}"/>{{end}}</svg>
{{end}}</html>
`))

// tick is an event in a plot.
type tick struct {
	X      float64
	What   string
	Update bool
}

// write writes the page: one file, which loads nothing.
func (r *report) write(path string) (err error) {
	var plots []plot
	for _, s := range r.all {
		plots = append(plots, r.plot(s))
	}
	var midnights []float64
	for d := range 6 {
		midnights = append(midnights, r.x(time.Duration(d+1)*r.day()))
	}
	var ticks []tick
	for _, e := range r.events {
		ticks = append(ticks, tick{r.x(e.at.Sub(r.start)), e.what, e.update})
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	err = page.Execute(file, map[string]any{
		"Failure": r.failure, "Text": r.text(), "Judged": r.judged(), "Nodes": r.nodes, "Cards": r.cards, "Length": r.length, "Pods": r.counts.created,
		"Plots": plots, "Midnights": midnights, "Events": ticks,
	})
	if closing := file.Close(); err == nil {
		err = closing
	}
	return err
}
