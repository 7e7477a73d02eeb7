package extender

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// filter passes the nodes that have a card with room for the pod, or the best of them (see Options.FilterBest). It creates
// no allocation. A pod that asks for no GPU memory passes on every node.
func (s *Server) filter(_ context.Context, args *nodesArgs) (any, error) {
	if err := checkPod(args.Pod); err != nil {
		return nil, err
	}
	pod := protocol.Pod(args.Pod)
	names := args.names()
	if answer, decided := s.Cluster.FilterGang(args.Pod, names); decided {
		return args.answerMember(answer), nil
	}
	if pod.Request == 0 {
		return args.answer(filterAnswer{names: names, fit: everyNode(names)}), nil
	}
	if err := s.Cluster.Ready(); err != nil {
		return nil, err
	}

	at := time.Now()
	// With few candidate nodes, an answer with fewer names saves nothing, and the full answer is useful to users and to
	// other extenders.
	every := s.FilterBest == 0 || len(names) <= s.few() || s.Cluster.NameAll(pod.UID)
	answer, best := filterAnswer{names: names}, placement.Best{K: s.FilterBest}
	if every {
		answer.fit = make([]placement.Candidate, 0, len(names))
		answer.reasons = s.look(pod, names, at, func(c placement.Candidate) { answer.fit = append(answer.fit, c) })
	} else {
		answer.reasons = s.look(pod, names, at, best.Add)
		answer.fit = best.Candidates()
	}
	fitting := s.count(answer.reasons)
	if len(answer.fit) > 0 {
		s.Cluster.Passed(pod.UID)
	} else {
		s.Cluster.Refused(pod, at)
		s.Cluster.Sampled(pod.UID, len(names))
		s.Cluster.Blocked(args.Pod, answer.full(), at)
	}
	if !every && len(answer.fit) > 0 {
		// kube-scheduler uses the reasons only if no node fits (pkg/scheduler/schedule_one.go, schedulePod): for the pod's
		// Event, and to find the nodes on which preemption could help.
		answer.reasons = nil
		s.promise(pod, answer.passed(), at)
		if len(answer.fit) < fitting {
			s.Cluster.NamedFew(pod.UID)
		}
	} else if len(answer.fit) == 1 {
		s.promise(pod, answer.passed(), at) // kube-scheduler doesn't call prioritize for a single node.
	}
	return args.answer(answer), nil
}

// few returns the maximum number of candidate nodes for which filter's answer covers every node.
func (s *Server) few() int { return max(s.FilterBest, s.FilterBestAbove) }

// promise records a tentative placement of the pod on the named nodes. It records none if there are more nodes than few:
// each of them is then too unlikely to get the pod.
func (s *Server) promise(pod gpu.Pod, names []string, at time.Time) {
	if s.FilterBest > 0 && len(names) > 0 && len(names) <= s.few() {
		s.Cluster.Ledger().AddTentative(pod, names, at)
	}
}

// look checks whether the pod fits each node. It calls fits for each node that it fits, and returns the reason of every
// node. Tentative placements of other pods count as allocated, see promise.
func (s *Server) look(pod gpu.Pod, names []string, at time.Time, fits func(placement.Candidate)) []placement.Reason {
	reasons, none := make([]placement.Reason, len(names)), true
	note := func(i int, suits placement.Suitability, reason placement.Reason) {
		reasons[i] = reason
		if reason == placement.Fits {
			none = false
			fits(placement.Candidate{Node: i, Suits: suits})
		}
	}
	view := ledger.View{Card: s.CardPolicy, Node: s.NodePolicy}
	if s.FilterBest > 0 {
		view.TentativeAt = at
	}
	if promised := s.Cluster.Ledger().Rank(view, pod, names, note); promised && none {
		// Not every tentative placement becomes an allocation. A pod that fits nowhere else may try such a node.
		view.TentativeAt = time.Time{}
		s.Cluster.Ledger().Rank(view, pod, names, note)
	}
	return reasons
}

// count reports to the observer the number of nodes with each reason, and returns how many nodes fit.
func (s *Server) count(reasons []placement.Reason) (fitting int) {
	var counts placement.Counts
	for _, reason := range reasons {
		counts[reason]++
	}
	for reason, n := range counts {
		if n > 0 {
			s.Observer.Filtered(placement.Reason(reason), n)
		}
	}
	return counts[placement.Fits]
}

func filterError(err error) any { return &extenderv1.ExtenderFilterResult{Error: err.Error()} }

// maxName is the longest name, in bytes, that Kubernetes allows for any object. The extender keeps these names (see
// cluster.Cluster.Refused), so a request must not make it keep a megabyte of each.
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
