package inspect

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/mistakes"
)

// TestMistakes checks that each form of output has the cause and the words of the mistake, as page and metrics have.
func TestMistakes(t *testing.T) {
	rows := mistakes.All()
	if len(rows) < 30 {
		t.Errorf("%d mistakes, want 30", len(rows))
	}
	forms := map[string]func(*bytes.Buffer, Report){
		"table":     func(out *bytes.Buffer, r Report) { writeTable(out, r, format{}) },
		"-o wide":   func(out *bytes.Buffer, r Report) { writeTable(out, r, format{wide: true}) },
		"-d":        func(out *bytes.Buffer, r Report) { writeDetails(out, r, format{}) },
		"--pending": func(out *bytes.Buffer, r Report) { writePending(out, r, format{}) },
	}
	for _, m := range rows {
		t.Run(m.Name, func(t *testing.T) {
			report := Build(Objects{Nodes: m.Nodes, Pods: m.Pods, Now: mistakes.Now})
			words, cells := "", []string{"default", m.Pod}
			if i := slices.IndexFunc(report.RequestProblems, func(p RequestProblem) bool { return p.Name == m.Pod }); m.NotPending && i >= 0 {
				words = report.RequestProblems[i].Problem
			}
			if i := slices.IndexFunc(report.PendingPods, func(p PendingPod) bool { return p.Name == m.Pod }); !m.NotPending && i >= 0 {
				pod := &report.PendingPods[i]
				if words = pod.Explanation; pod.Cause != m.Cause {
					t.Errorf("cause %s, want %s", pod.Cause, m.Cause)
				}
				cells = append(cells, pod.requestText(), m.Cause.String())
			}
			if words = mistakes.Comparable(words); words != m.Words {
				t.Errorf("words %q, want %q", words, m.Words)
			}
			groups := BuildGroups(m.Pods, nil, mistakes.Now).Groups
			says := func(g Group) bool {
				return g.State == GroupInvalid && strings.HasSuffix(m.Words, strings.TrimPrefix(g.Reason, m.Pod+": "))
			}
			if m.Cause == reasons.InvalidGroup && !slices.ContainsFunc(groups, says) {
				t.Errorf("--groups gives another reason than %q: %+v", m.Words, groups)
			}
			for form, write := range forms {
				var out bytes.Buffer
				write(&out, report)
				shown := slices.ContainsFunc(strings.Split(mistakes.Comparable(out.String()), "\n"), func(line string) bool {
					return strings.HasPrefix(strings.Join(strings.Fields(line), " "), strings.Join(append(cells, strings.Fields(oneLine(m.Words))...), " "))
				})
				if !shown {
					t.Errorf("%s lacks a line of %q with %q:\n%s", form, cells, m.Words, out.String())
				}
			}
		})
	}
}

// TestNodeMistakes checks that the report has the problems of the node that page and metrics have too.
func TestNodeMistakes(t *testing.T) {
	for _, m := range mistakes.OfNodes() {
		t.Run(m.Name, func(t *testing.T) {
			report := Build(Objects{Nodes: m.Nodes, Pods: m.Pods, Now: mistakes.Now})
			var got []string
			for _, n := range report.Nodes {
				if n.Name == "n1" {
					got = append(got, n.Problems...)
				}
			}
			for _, n := range report.NodesWithoutCards {
				got = append(got, n.Problems...)
			}
			check.Equal(t, "the result", m.Problems, got)
		})
	}
}
