package extender

import (
	"context"

	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// prioritize scores the nodes by the policy, 0 to placement.MaxScore, and all alike for a pod that asks for no GPU
// memory. Its answer has no field for an error, so that is an HTTP status.
func (s *Server) prioritize(_ context.Context, args *extenderv1.ExtenderArgs) (any, error) {
	if err := checkPod(args.Pod); err != nil {
		return nil, err
	}
	pod := protocol.Pod(args.Pod)
	names := nodeNames(args)
	scores := make([]int, len(names))
	if pod.Request > 0 {
		if err := s.Cluster.Ready(); err != nil {
			return nil, err
		}
		scores = s.Cluster.Ledger().Score(s.CardPolicy, s.NodePolicy, pod, names)
	}
	answer := make(extenderv1.HostPriorityList, len(names))
	for i, name := range names {
		answer[i] = extenderv1.HostPriority{Host: name, Score: int64(scores[i])}
	}
	return answer, nil
}
