package diagnosis_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/test/mistakes"
)

// Each mistake has its cause and words, from the objects of the API server and from what the group waits for.
func TestMistakes(t *testing.T) {
	type outcome struct {
		Cause diagnosis.Reason
		Words string
	}
	for _, m := range mistakes.All() {
		t.Run(m.Name, func(t *testing.T) {
			var pod *corev1.Pod
			for _, p := range m.Pods {
				if p.Name == m.Pod {
					pod = p
				}
			}
			var got outcome
			if m.Cause == "" {
				got.Words, _ = diagnosis.RequestProblem(pod)
			} else {
				if problem, found := diagnosis.RequestProblem(pod); found {
					t.Errorf("the pod has the request problem %q", problem)
				}
				d := diagnosis.FromObjects(m.Nodes, m.Pods, mistakes.Now).Diagnose(diagnosis.NewPod(pod), m.Wait)
				got = outcome{d.Reason, mistakes.Comparable(d.Message)}
			}
			if diff := cmp.Diff(outcome{m.Cause, m.Words}, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// The table has a row for every reason.
func TestMistakesOfEachReason(t *testing.T) {
	shown := map[diagnosis.Reason]bool{diagnosis.WaitsForTurn: true} // It follows from no mistake.
	for _, m := range mistakes.All() {
		shown[m.Cause] = true
	}
	for _, reason := range diagnosis.Reasons() {
		if !shown[reason] {
			t.Errorf("no mistake shows %s", reason)
		}
		if reason.Words() == string(reason) {
			t.Errorf("%s has no words", reason)
		}
	}
}
