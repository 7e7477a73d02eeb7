package preemption

import (
	"context"
	"errors"
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// TestOneVictimEach covers the time in which kube-scheduler has seen the end of a victim and the extender hasn't. kube-scheduler
// tries the preemptor again in that time, and there are always other pods that it could evict.
func TestOneVictimEach(t *testing.T) {
	const nodes = 3
	c := start(t)
	s := &stage{Namespace: c.NewNamespace(t)}
	for i := range nodes {
		s.AddNodes(framework.MakeNode(fmt.Sprint("n", i)).Unit(gpu.GiB).Cards(1, 16))
		s.create(fmt.Sprint("low", i), 12, 1)
		s.WaitBound(fmt.Sprint("low", i))
	}
	for i := range controlplane.Times(30, 300) {
		high := fmt.Sprint("high", i)
		s.create(high, 12, 9)
		var evicted []string
		s.Eventually("the preemptor is bound", func(ctx context.Context) error {
			pods, err := s.List(ctx)
			if err != nil {
				return err
			}
			for j := range pods {
				if pods[j].DeletionTimestamp != nil {
					evicted = append(evicted, pods[j].Name)
					s.end(pods[j].Name)
				}
			}
			pod, err := s.Pods().Get(ctx, high, metav1.GetOptions{})
			if err == nil && pod.Spec.NodeName == "" {
				err = errors.New("it is pending")
			}
			return err
		})
		if len(evicted) != 1 {
			s.Errorf("preemption %d: %v were evicted, want one pod", i, evicted)
		}
		s.Delete(high) // The next one finds a pod of lower priority on each node.
		s.WaitGone(high)
		for _, name := range evicted {
			s.create(name, 12, 1)
			s.WaitBound(name)
		}
	}
	s.CheckLedger()
}
