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
	var best placement.Best
	if s.FilterBest > 0 {
		best.K = s.few()
	}
	s.rank(pod, nodes, now, nil, func(c placement.Candidate) {
		scores[c.Node] = int64(c.Suits.Score())
		best.Add(c)
	})
	// If filter passed every node that fits, these scores decide.
	s.addTentative(pod, names(nodes, best.Candidates()), now)
	return scores, nil
}
