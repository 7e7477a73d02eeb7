package extender

import (
	"context"
	"errors"
	"time"

	corev1 "k8s.io/api/core/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// filter passes the nodes that have a card with room for the pod, and says of the others why not. It reads only. Pods
// that ask for no GPU memory pass untouched.
func (s *Server) filter(_ context.Context, args *extenderv1.ExtenderArgs) (any, error) {
	if err := checkPod(args.Pod); err != nil {
		return nil, err
	}
	pod := protocol.Pod(args.Pod)
	names := nodeNames(args)
	if pod.Request == 0 {
		return answerWith(args, names, nil, nil), nil
	}
	if err := s.Cluster.Ready(); err != nil {
		return nil, err
	}

	at := time.Now()
	fit := make([]string, 0, len(names))
	failed, unresolvable := extenderv1.FailedNodesMap{}, extenderv1.FailedNodesMap{}
	var counts placement.Counts
	s.Cluster.Ledger().Check(pod, names, func(name string, reason placement.Reason) {
		counts[reason]++
		switch {
		case reason == placement.Fits:
			fit = append(fit, name)
		case reason.Unresolvable():
			unresolvable[name] = reason.String()
		default:
			failed[name] = reason.String()
		}
	})
	for reason, n := range counts {
		if n > 0 {
			s.Observer.Filtered(placement.Reason(reason), n)
		}
	}
	if len(fit) > 0 {
		s.Cluster.Passed(pod.UID)
	} else {
		s.Cluster.Refused(pod, at)
	}
	return answerWith(args, fit, failed, unresolvable), nil
}

func filterError(err error) any { return &extenderv1.ExtenderFilterResult{Error: err.Error()} }

// checkPod refuses arguments without a pod that can be told from others.
func checkPod(pod *corev1.Pod) error {
	switch {
	case pod == nil:
		return errors.New("the request names no pod")
	case pod.UID == "" || pod.Name == "" || pod.Namespace == "":
		return errors.New("the request's pod lacks its name, namespace or UID")
	}
	return nil
}

// nodeNames returns the nodes in question: by name where the scheduler was told that we know the nodes
// (nodeCacheCapable), else as whole objects.
func nodeNames(args *extenderv1.ExtenderArgs) []string {
	if args.NodeNames != nil {
		return *args.NodeNames
	}
	if args.Nodes == nil {
		return nil
	}
	names := make([]string, len(args.Nodes.Items))
	for i := range args.Nodes.Items {
		names[i] = args.Nodes.Items[i].Name
	}
	return names
}

// answerWith answers in the form in which was asked.
func answerWith(args *extenderv1.ExtenderArgs, fit []string, failed, unresolvable extenderv1.FailedNodesMap) *extenderv1.ExtenderFilterResult {
	result := &extenderv1.ExtenderFilterResult{FailedNodes: failed, FailedAndUnresolvableNodes: unresolvable}
	if args.NodeNames != nil || args.Nodes == nil {
		result.NodeNames = &fit
		return result
	}
	passed := make(map[string]bool, len(fit))
	for _, name := range fit {
		passed[name] = true
	}
	result.Nodes = &corev1.NodeList{Items: make([]corev1.Node, 0, len(fit))}
	for _, node := range args.Nodes.Items {
		if passed[node.Name] {
			result.Nodes.Items = append(result.Nodes.Items, node)
		}
	}
	return result
}
