package requeue

import (
	"math"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// least stands for many pods in a check that is much cheaper than one for each of them: where it doesn't fit, none of the pods fits. It can fit where
// none of them does.
type least struct {
	ledger Ledger
	// pod is invented. It has the smallest demand of the pods on one card, their highest priority, and the namespace of one that needs no turn of fair
	// sharing, if there is one: such a pod sees less memory as used.
	pod gpu.Pod
	// own are the pods that may fit although no other pod like them does, because they see what is reserved for them as free.
	own []gpu.Pod
}

// leastOf returns the least of the pods. There must be one at least.
func leastOf(ledger Ledger, pods []gpu.Pod) least {
	first := pods[0].Demand()
	l := least{ledger: ledger, pod: gpu.Pod{Request: first.Memory, Cores: first.Cores, Containers: first.Containers, Priority: math.MinInt32}}
	for i := range pods {
		demand := pods[i].Demand()
		l.pod.Request, l.pod.Cores = min(l.pod.Request, demand.Memory), min(l.pod.Cores, demand.Cores)
		l.pod.Containers = min(l.pod.Containers, demand.Containers)
		l.pod.Priority = max(l.pod.Priority, pods[i].Priority)
		if l.pod.Namespace == "" && !ledger.NeedsTurn(pods[i]) {
			l.pod.Namespace = pods[i].Namespace
		}
		if ledger.HasReservation(pods[i].UID) {
			l.own = append(l.own, pods[i])
		}
	}
	return l
}

// fit reports whether one of the pods may fit the node.
func (l least) fit(node string) bool {
	return fits(l.ledger, l.pod, node) || slices.ContainsFunc(l.own, func(pod gpu.Pod) bool { return fits(l.ledger, pod, node) })
}

func fits(ledger Ledger, pod gpu.Pod, node string) bool {
	_, ok := ledger.FirstFit(pod, []string{node})
	return ok
}
