package e2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/test/framework"
)

// TestNominations: while kube-scheduler is frozen, pods queue and are nominated. Then the extender is killed and a nominated node
// becomes unfit. All pods are bound, those that are nominated to another node to that one.
func TestNominations(t *testing.T) {
	c := framework.StartForTest(t, framework.Options{Nominations: true})
	play(t, c, "a queue", func(s *scene) {
		var nodes []*framework.NodeWrapper
		for i := range 8 {
			nodes = append(nodes, node(fmt.Sprint("n", i), cardMiB, cardMiB))
		}
		s.AddNodes(nodes...)
		s.Place(s.Pod("first", 4069)) // kube-scheduler calls the extender.

		must(s, c.Scheduler.Pause())
		const queued = 48 // Of 64, 8 of which are on the node that becomes unfit.
		var pods []*framework.PodWrapper
		for i := range queued {
			pods = append(pods, s.Pod(fmt.Sprint("queued-", i), 4069))
		}
		s.Create(pods...)
		nominated := s.nominations(queued - 24)
		must(s, c.Extender.Kill())
		unfit := slices.Min(slices.Collect(maps.Values(nominated)))
		_, err := c.Client.CoreV1().Nodes().Patch(s.Context(), unfit, types.MergePatchType, []byte(`{"spec":{"unschedulable":true}}`), metav1.PatchOptions{})
		must(s, err)
		must(s, c.Extender.Start(s.Context()))
		must(s, c.Scheduler.Resume())

		for _, pod := range pods {
			bound := s.WaitBound(pod.Name)
			switch node := nominated[pod.Name]; {
			case bound.Spec.NodeName == unfit:
				s.Errorf("pod %s is bound to node %s, which is cordoned", pod.Name, unfit)
			case node != "" && node != unfit && bound.Spec.NodeName != node:
				s.Errorf("pod %s is bound to node %s, want %s, to which it was nominated", pod.Name, bound.Spec.NodeName, node)
			}
		}
	})
}

// nominations waits until so many pods are nominated, and returns their nodes.
func (s *scene) nominations(want int) (nominated map[string]string) {
	s.Helper()
	s.Eventually(fmt.Sprint(want, " pods are nominated"), func(ctx context.Context) error {
		pods, err := s.List(ctx)
		if err != nil {
			return err
		}
		nominated = map[string]string{}
		for i := range pods {
			if node := pods[i].Status.NominatedNodeName; node != "" {
				nominated[pods[i].Name] = node
			}
		}
		if len(nominated) != want {
			return fmt.Errorf("%d are: %v", len(nominated), nominated)
		}
		return nil
	})
	return nominated
}
