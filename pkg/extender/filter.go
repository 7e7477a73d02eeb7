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

// filter passes the nodes that have a card with room for the pod, or the best of them (see Options.FilterBest). It holds
// nothing. Pods that ask for no GPU memory pass untouched.
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
	// Where few nodes are on offer, nothing is spared by naming fewer, and a full answer serves people and other extenders.
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
		// kube-scheduler asks why a node was left out only where none fits (pkg/scheduler/schedule_one.go, schedulePod):
		// for the pod's Event, and to see where preemption could help.
		answer.reasons = nil
		s.promise(pod, answer.passed(), at)
		if len(answer.fit) < fitting {
			s.Cluster.NamedFew(pod.UID)
		}
	} else if len(answer.fit) == 1 {
		s.promise(pod, answer.passed(), at) // kube-scheduler doesn't ask for the score of an only one.
	}
	return args.answer(answer), nil
}

// few is up to how many nodes on offer filter's answer is about each of them.
func (s *Server) few() int { return max(s.FilterBest, s.FilterBestAbove) }

// promise notes to which nodes the pod may be bound in a moment: few, or that would say nothing.
func (s *Server) promise(pod gpu.Pod, names []string, at time.Time) {
	if s.FilterBest > 0 && len(names) > 0 && len(names) <= s.few() {
		s.Cluster.Ledger().AddTentative(pod, names, at)
	}
}

// look says of every node whether it suits the pod, and shows those that do to fits. What was promised to others counts,
// see promise.
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
		// Not all that was promised is taken in the end: whoever finds a place there still may try it.
		view.TentativeAt = time.Time{}
		s.Cluster.Ledger().Rank(view, pod, names, note)
	}
	return reasons
}

// count tells the observer what was said of how many nodes, and returns how many fit.
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

// maxName is more than Kubernetes allows for any name. They are remembered, see cluster.Refused: no request may have a
// megabyte of each be.
const maxName = 253

// checkPod refuses arguments without a pod that can be told from others.
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
