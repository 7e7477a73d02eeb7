package scheduling

import (
	"time"

	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
)

// displace takes reserved places, whose binds have not begun, from groups of lower priority, if the pod then fits one
// of the nodes. The pod gets an assumed allocation there for the patience. Otherwise the groups could take the place again before the pod's
// bind: before it binds the pod, kube-scheduler makes the filter call for its next pod, which is often a member of these groups. displace reports whether
// it did so.
func (s *Scheduler) displace(pod gpu.Pod, nodes []string, now time.Time) bool {
	if s.groups == nil || len(nodes) == 0 {
		return false
	}
	for range 2 { // Another pod, or the group again, can be faster.
		if !s.groups.manager.Displace(pod, nodes, now) {
			return false
		}
		if s.takeDisplaced(pod, nodes, now) {
			return true
		}
	}
	return false
}

// takeDisplaced reserves the best of the nodes that the pod fits for a while.
func (s *Scheduler) takeDisplaced(pod gpu.Pod, nodes []string, now time.Time) bool {
	defer s.groups.act()
	best := placement.Best{K: 1}
	s.rank(pod, nodes, now, &best, best.Add)
	for _, node := range names(nodes, best.Candidates()) {
		if _, err := s.ledger.Reserve(node, pod, s.CardPolicy, now); err == nil {
			s.ledger.Own(ledger.Displaced, pod.UID, now.Add(s.Gangs.Patience))
			klog.Background().Info("Memory that was reserved for groups is given to another pod",
				"pod", klog.KRef(pod.Namespace, pod.Name), "priority", pod.Priority, "node", node)
			return true
		}
	}
	return false
}
