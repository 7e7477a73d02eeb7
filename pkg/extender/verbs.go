package extender

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/scheduling"
)

// filter answers with the nodes that pass. The answer has the form of the request: node names or whole nodes.
func (s *Server) filter(_ context.Context, args *nodesArgs) (any, error) {
	if err := checkPod(args.Pod); err != nil {
		return nil, err
	}
	result, err := s.Scheduler.Filter(args.Pod, args.names())
	if err != nil {
		return nil, err
	}
	answer := filterAnswer{FilterResult: result}
	if args.NodeNames == nil {
		answer.whole = args.Nodes
	}
	return answer, nil
}

func filterError(err error) any { return &extenderv1.ExtenderFilterResult{Error: err.Error()} }

// prioritize answers with the scores of the nodes. The answer has no field for an error, so an error becomes an HTTP status.
func (s *Server) prioritize(_ context.Context, args *nodesArgs) (any, error) {
	if err := checkPod(args.Pod); err != nil {
		return nil, err
	}
	names := args.names()
	scores, err := s.Scheduler.Prioritize(args.Pod, names)
	if err != nil {
		return nil, err
	}
	answer := make(extenderv1.HostPriorityList, len(names))
	for i, name := range names {
		answer[i] = extenderv1.HostPriority{Host: name, Score: scores[i]}
	}
	return answer, nil
}

// bind binds the pod to the node of the request.
func (s *Server) bind(ctx context.Context, args *extenderv1.ExtenderBindingArgs) (any, error) {
	s.pacer.begin(ctx)
	err := s.Scheduler.Bind(ctx, scheduling.BindRequest{
		Namespace: args.PodNamespace, Name: args.PodName, UID: args.PodUID, Node: args.Node,
	})
	if err != nil {
		return nil, err
	}
	// The pod is bound, so a leader that hands over doesn't wait for the answer.
	s.inFlight.Add(-1)
	defer s.inFlight.Add(1)
	s.pacer.hold(ctx)
	return &extenderv1.ExtenderBindingResult{}, nil
}

func bindError(err error) any { return &extenderv1.ExtenderBindingResult{Error: err.Error()} }

// preempt answers kube-scheduler's proposal with victims whose eviction frees a card. The answer replaces the proposal
// (k8s.io/kubernetes pkg/scheduler/extender.go, ProcessPreemption). It always names pods by their UIDs, and contains no node
// without victims. It has no field for an error, so an error becomes an HTTP status.
func (s *Server) preempt(ctx context.Context, args *extenderv1.ExtenderPreemptionArgs) (any, error) {
	if err := checkPod(args.Pod); err != nil {
		return nil, err
	}
	chosen, err := s.Scheduler.Preempt(ctx, args.Pod, proposedVictims(args))
	if err != nil {
		return nil, err
	}
	answer := &extenderv1.ExtenderPreemptionResult{
		NodeNameToMetaVictims: make(map[string]*extenderv1.MetaVictims, len(chosen)),
	}
	for name, victims := range chosen {
		if len(victims.Pods) == 0 {
			continue
		}
		meta := &extenderv1.MetaVictims{NumPDBViolations: int64(victims.Violations)}
		for _, uid := range victims.Pods {
			meta.Pods = append(meta.Pods, &extenderv1.MetaPod{UID: string(uid)})
		}
		answer.NodeNameToMetaVictims[name] = meta
	}
	return answer, nil
}

// proposedVictims reads kube-scheduler's proposal: UIDs if kube-scheduler's configuration has nodeCacheCapable: true, else
// whole pods. The proposal for a node can be empty.
func proposedVictims(args *extenderv1.ExtenderPreemptionArgs) map[string]preemption.Victims {
	proposed := make(map[string]preemption.Victims, len(args.NodeNameToVictims)+len(args.NodeNameToMetaVictims))
	for name, victims := range args.NodeNameToVictims {
		if victims == nil {
			victims = &extenderv1.Victims{}
		}
		proposed[name] = proposal(victims.Pods, victims.NumPDBViolations, func(p *corev1.Pod) gpu.PodUID { return gpu.PodUID(p.UID) })
	}
	for name, victims := range args.NodeNameToMetaVictims {
		if victims == nil {
			victims = &extenderv1.MetaVictims{}
		}
		proposed[name] = proposal(victims.Pods, victims.NumPDBViolations, func(p *extenderv1.MetaPod) gpu.PodUID { return gpu.PodUID(p.UID) })
	}
	return proposed
}

func proposal[P any](pods []*P, violations int64, uid func(*P) gpu.PodUID) preemption.Victims {
	out := preemption.Victims{Violations: int(max(violations, 0))}
	for _, pod := range pods {
		if pod != nil && uid(pod) != "" {
			out.Pods = append(out.Pods, uid(pod))
		}
	}
	return out
}

// maxName is the longest name, in bytes, that Kubernetes allows for any object. The extender keeps these names (see
// requeue.Requeuer.Rejected), so a request must not make it keep a megabyte of each.
const maxName = 253

// checkPod refuses arguments without a pod, and a pod that can't be identified.
func checkPod(pod *corev1.Pod) error {
	switch {
	case pod == nil:
		return errors.New("the request names no pod")
	case pod.UID == "" || pod.Name == "" || pod.Namespace == "":
		return errors.New("the request's pod lacks its name, namespace or UID")
	case len(pod.UID) > maxName || len(pod.Name) > maxName || len(pod.Namespace) > maxName:
		return fmt.Errorf("the request's pod has a name, namespace or UID of more than %d bytes", maxName)
	}
	return nil
}
