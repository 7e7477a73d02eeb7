package main

import (
	"fmt"
	"html/template"
	"math"
	"os"
	"strings"
	"time"
)

// summary returns the result as text.
func summary(w *week) string {
	var text strings.Builder
	c := w.load.totals()
	fmt.Fprintf(&text, "%d pods created, %d ended, %d rejected by the kubelet, %d replaced; %d faults and updates\n",
		c.created, c.ended, c.failed, c.lost, len(w.trouble.events))
	for _, s := range w.record.all {
		fmt.Fprintf(&text, "  %-28s mean %8.2f %-14s growth per day %+6.2f%%\n", s.name, s.mean(), s.unit, 100*s.growth(w.day()))
	}
	return text.String()
}

const (
	plotWidth, plotHeight = 800, 120
)

// line returns the points of a series for an SVG polyline.
func (w *week) line(s *series) string {
	var top float64
	for _, p := range s.samples {
		top = max(top, p.value)
	}
	var points strings.Builder
	for _, p := range s.samples {
		fmt.Fprintf(&points, "%.1f,%.1f ", w.x(p.at), plotHeight*(1-p.value/max(top, 1e-9)))
	}
	return points.String()
}

// x returns the place of a time in a plot.
func (w *week) x(at time.Duration) float64 {
	return math.Min(1, at.Seconds()/w.length.Seconds()) * plotWidth
}

var page = template.Must(template.New("report").Parse(`<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>gpushare: a simulated week</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
svg { width: 100%; height: auto; border: 1px solid #ccc; overflow: visible }
polyline { fill: none; stroke: #0b57d0; stroke-width: 1.2 }
.day { stroke: #ddd } .event { stroke: #d33; stroke-opacity: .4 }
.bad { color: #b00020; font-weight: 600 } h2 { font-size: 1rem; margin: 1.5rem 0 .2rem }
</style>
<h1>gpushare: a simulated week</h1>
<p {{if .Failure}}class="bad"{{end}}>{{if .Failure}}Failed: {{.Failure}}{{else}}Passed.{{end}}</p>
<pre>{{.Summary}}</pre>
<p>{{.Nodes}} nodes of {{.Cards}} cards; the week took {{.Length}}. Grey lines are midnights, red ones faults. Each plot begins at 0.
Memory, goroutines and open files are those of programs that were never restarted.</p>
{{range .Plots}}<h2>{{.Name}}: up to {{printf "%.1f" .Top}} {{.Unit}}</h2>
<svg viewBox="0 0 800 120" role="img" aria-label="{{.Name}}">
{{range $.Midnights}}<line class="day" x1="{{.}}" x2="{{.}}" y1="0" y2="120"/>{{end}}
{{range $.Events}}<line class="event" x1="{{.X}}" x2="{{.X}}" y1="110" y2="120"><title>{{.What}}</title></line>{{end}}
<polyline points="{{.Line}}"/></svg>
{{end}}</html>
`))

type plot struct {
	Name, Unit, Line string
	Top              float64
}

type mark struct {
	X    float64
	What string
}

// writeReport writes the page.
func writeReport(path string, w *week, failure error) error {
	var plots []plot
	for _, s := range w.record.all {
		top := 0.0
		for _, p := range s.samples {
			top = max(top, p.value)
		}
		plots = append(plots, plot{s.name, s.unit, w.line(s), top})
	}
	var midnights []float64
	for d := range 6 {
		midnights = append(midnights, w.x(time.Duration(d+1)*w.day()))
	}
	var marks []mark
	for _, e := range w.trouble.events {
		marks = append(marks, mark{w.x(e.at.Sub(w.record.started)), e.what})
	}
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	err = page.Execute(file, map[string]any{
		"Failure": failure, "Summary": summary(w), "Nodes": w.nodes, "Cards": w.cards, "Length": w.length,
		"Plots": plots, "Midnights": midnights, "Events": marks,
	})
	if closing := file.Close(); err == nil {
		err = closing
	}
	return err
}
