package extender

import (
	"context"
	"time"

	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// prioritize scores the nodes by the policies, from 0 to placement.MaxScore. If the pod asks for no GPU memory, all nodes
// get the same score. The answer has no field for an error, so an error becomes an HTTP status.
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
		// If filter passed every node that fits, these scores decide.
		s.promise(pod, filterAnswer{names: names, fit: best.Candidates()}.passed(), at)
	}
	return answer, nil
}
