package scheduling

import (
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// Prioritize returns the score of each node by the policies, from 0 to placement.MaxScore. If the pod asks for no GPU memory,
// all nodes get the same score.
func (s *Scheduler) Prioritize(object *corev1.Pod, nodes []string) ([]int64, error) {
	pod, scores := protocol.Pod(object), make([]int64, len(nodes))
	if pod.Request == 0 {
		return scores, nil
	}
	if err := s.cache.Ready(); err != nil {
		return nil, err
	}
	now := s.Clock.Now()
	fitting, _ := s.rank(pod, nodes, now)
	s.NodePolicy.Scale(fitting)
	for _, c := range fitting {
		scores[c.Node] = int64(c.Suits.Score())
	}
	if s.FilterBest > 0 { // If filter passed every node that fits, these scores decide.
		s.addTentative(pod, names(nodes, placement.Best(fitting, s.few())), now)
	}
	return scores, nil
}
