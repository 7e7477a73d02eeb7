package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpushare/gpushare/test/check"
)

// TestReport checks that the page has all series, events and the result, and loads nothing.
func TestReport(t *testing.T) {
	start := time.Now()
	r := &report{
		options: options{calendar: long, nodes: 16, cards: 4},
		all: []*series{
			recorded(long, always, func(p, _ float64) float64 { return 50 + p }),
			recorded(long, never, func(_, _ float64) float64 { return 3 }),
		},
		events: []event{{start.Add(time.Minute), "card lost", false}, {start.Add(2 * time.Minute), "update of x", true}}, start: start,
		failure: errors.New("figure grows by 3.0% a day"),
	}
	r.all[1].name = "other <figure>"
	path := filepath.Join(t.TempDir(), "folder", "report.html")
	check.Must(t, r.write(path))
	text, err := os.ReadFile(path)
	check.Must(t, err)
	html := string(text)
	for _, want := range []string{
		"Failed: figure grows by 3.0% a day", "<h2>figure: ", "<h2>other &lt;figure&gt;: ", "card lost 1, update of x 1", "<title>card lost</title>", "<title>update of x</title>",
		`<polyline points="`, `<polyline class="slope" points="80.0,`,
	} {
		if !strings.Contains(html, want) {
			t.Errorf("the page has no %s", want)
		}
	}
	if plots, points := strings.Count(html, "<svg"), strings.Count(html, ","); plots != 2 || points < 2*len(r.all[0].samples) {
		t.Errorf("the page has %d plots and %d points", plots, points)
	}
	for _, loads := range []string{"http://", "https://", "src=", "<link", "<script"} {
		if strings.Contains(html, loads) {
			t.Errorf("the page contains %s", loads)
		}
	}
}
