package diagnosis_test

import (
	"cmp"
	"testing"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/mistakes"
)

// Each mistake has its cause and words, from the objects of the API server and from what the group waits for.
func TestMistakes(t *testing.T) {
	for _, m := range mistakes.All() {
		t.Run(m.Name, func(t *testing.T) {
			problem := cmp.Or(diagnosis.RequestProblem(m.Subject()), diagnosis.UnservedRequest(m.Subject()))
			got := diagnosis.Diagnosis{Message: problem}
			if problem == "" {
				got = m.Diagnose()
			}
			check.Equal(t, "the result", m.Want(), got)
		})
	}
}

// The table has a row for every reason.
func TestMistakesOfEachReason(t *testing.T) {
	shown := map[reasons.Reason]bool{reasons.WaitsForTurn: true} // It follows from no mistake.
	for _, m := range mistakes.All() {
		shown[m.Cause] = shown[m.Cause] || !m.NotPending
	}
	for _, reason := range reasons.OfPods() {
		if !shown[reason] {
			t.Errorf("no mistake shows %s", reason)
		}
	}
}
