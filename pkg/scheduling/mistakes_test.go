package scheduling

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
	"github.com/gpushare/gpushare/test/mistakes"
)

func objectsOf(nodes []*corev1.Node, pods []*corev1.Pod) (objects []runtime.Object) {
	for _, node := range nodes {
		objects = append(objects, node)
	}
	for _, pod := range pods {
		objects = append(objects, pod)
	}
	return objects
}

// The extender names each mistake: what its cache keeps of pods and nodes is enough, and its groups report the reasons.
func TestMistakes(t *testing.T) {
	for _, m := range mistakes.All() {
		t.Run(m.Name, bubble(func(t *testing.T) {
			f := start(t, Options{Gangs: GangOptions{Hold: 10 * time.Second, Patience: 30 * time.Second, Observer: &fake.Observer{}}}, objectsOf(m.Nodes, m.Pods)...)
			f.clock.SetTime(mistakes.Now)
			find := func() (got diagnosis.Diagnosis) {
				explanation := f.Explain()
				for _, pod := range explanation.RequestProblems {
					if pod.Name == m.Pod {
						got.Message = pod.RequestProblem
					}
				}
				for i, pod := range explanation.Pending {
					if pod.Name == m.Pod {
						got = explanation.Diagnoses[i]
						got.Position = diagnosis.Position{} // It isn't a part of what the user did wrong.
						got.Message = mistakes.Comparable(got.Message)
					}
				}
				return got
			}
			if want := m.Want(); m.Wait == nil {
				check.Equal(t, "the result", want, find())
			} else {
				f.pass(m.Words, func() bool { return find() == want }) // The groups lead after a tick.
			}
		}))
	}
}

// What the extender keeps of nodes and pods is enough for the problems of nodes that kubectl inspect lists.
func TestNodeMistakes(t *testing.T) {
	for _, m := range mistakes.OfNodes() {
		t.Run(m.Name, bubble(func(t *testing.T) {
			f := start(t, Options{}, objectsOf(m.Nodes, m.Pods)...)
			var got []string
			for _, node := range f.ChangesSince(0).Nodes {
				for _, problem := range diagnosis.NodeProblems(&node) {
					if node.Name == "n1" {
						got = append(got, problem.Text)
					}
				}
			}
			check.Equal(t, "the result", m.Problems, got)
		}))
	}
}
