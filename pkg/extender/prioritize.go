package extender

import (
	"context"
	"time"

	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// prioritize scores the nodes by the policy, 0 to placement.MaxScore, and all alike for a pod that asks for no GPU
// memory. Its answer has no field for an error, so that is an HTTP status.
func (s *Server) prioritize(_ context.Context, args *nodesArgs) (any, error) {
	if err := checkPod(args.Pod); err != nil {
		return nil, err
	}
	pod := protocol.Pod(args.Pod)
	names := args.names()
	answer := make(extenderv1.HostPriorityList, len(names))
	for i, name := range names {
		answer[i].Host = name
	}
	if pod.Request == 0 {
		return answer, nil
	}
	if err := s.Cluster.Ready(); err != nil {
		return nil, err
	}
	at := time.Now()
	var best placement.Best
	if s.FilterBest > 0 {
		best.K = s.few()
	}
	s.look(pod, names, at, func(c placement.Candidate) {
		answer[c.Node].Score = int64(c.Suits.Score())
		best.Add(c)
	})
	if s.FilterBest > 0 {
		// Where filter left nothing out, this is what decides.
		s.promise(pod, filterAnswer{names: names, fit: best.Candidates()}.passed(), at)
	}
	return answer, nil
}
