package webui

import (
	"encoding/json"
	"testing"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/scheduling"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/mistakes"
)

// mistaken is a Source with the objects of a mistake.
type mistaken struct {
	source
	mistake mistakes.Mistake
}

func (s *mistaken) Explain() *scheduling.Explanation {
	e := &scheduling.Explanation{}
	diagnoser := diagnosis.FromObjects(s.mistake.Nodes, s.mistake.Pods, mistakes.Now)
	for _, object := range s.mistake.Pods {
		pod := clustercache.NewPodInfo(object)
		if pod.Pending != nil {
			e.Pending = append(e.Pending, pod)
			e.Diagnoses = append(e.Diagnoses, diagnoser.Diagnose(pod.Pending, s.mistake.Wait))
		}
		if pod.RequestProblem != "" {
			e.RequestProblems = append(e.RequestProblems, pod)
		}
	}
	return e
}

// The page receives each mistake with its cause, the cause in words, and the explanation.
func TestMistakes(t *testing.T) {
	type outcome struct{ Cause, InWords, Words string }
	for _, m := range mistakes.All() {
		t.Run(m.Name, func(t *testing.T) {
			text, err := NewBoard(Options{Source: &mistaken{source{ledger: ledger.New()}, m}, Clock: clocktesting.NewFakeClock(mistakes.Now)}).Whole()
			check.Must(t, err)
			var shown page
			check.Must(t, json.Unmarshal(text, &shown))
			var got outcome
			for _, pod := range shown.Pending {
				if pod.Name == m.Pod {
					got = outcome{pod.Reason.String(), shown.Words[pod.Reason.String()], mistakes.Comparable(pod.Message)}
				}
			}
			for _, pod := range shown.Problems {
				if pod.Name == m.Pod {
					got = outcome{Words: pod.Problem}
				}
			}
			want := outcome{Words: m.Words}
			if !m.NotPending {
				want.Cause, want.InWords = m.Cause.String(), m.Cause.Words()
			}
			check.Equal(t, "the result", want, got)
		})
	}
}

// The page receives the problems of nodes that kubectl inspect lists.
func TestNodeMistakes(t *testing.T) {
	for _, m := range mistakes.OfNodes() {
		t.Run(m.Name, func(t *testing.T) {
			l := diagnosis.NewLedger(m.Nodes, m.Pods)
			node, _ := l.Node("n1")
			node.Gone = node.Gone && len(m.Nodes) == 0 // As the scheduler sets it.
			check.Equal(t, "the result", m.Problems, viewNode(node, noOwner).Problems)
		})
	}
}
