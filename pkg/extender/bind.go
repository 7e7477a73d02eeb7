package extender

import (
	"context"

	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/cluster"
)

// bind chooses the card and binds the pod to the node of the request.
func (s *Server) bind(ctx context.Context, args *extenderv1.ExtenderBindingArgs) (any, error) {
	err := s.Cluster.Bind(ctx, cluster.BindRequest{
		Namespace: args.PodNamespace, Name: args.PodName, UID: args.PodUID, Node: args.Node,
	})
	if err != nil {
		return nil, err
	}
	return &extenderv1.ExtenderBindingResult{}, nil
}

func bindError(err error) any { return &extenderv1.ExtenderBindingResult{Error: err.Error()} }
