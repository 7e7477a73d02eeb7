package requeue

import (
	"maps"
	"math"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// least stands for many pods in a check that is much cheaper than one for each of them: where it doesn't fit, none of the pods fits,
// because each of them sees at least as much memory as used on all nodes but own. It can fit where none of them does.
type least struct {
	ledger Ledger
	// pod is invented. It has the smallest demand of the pods on one card, their highest priority, and the namespace of one that needs no turn of fair
	// sharing, if there is one: such a pod sees less memory as used.
	pod gpu.Pod
	// own are the nodes on which a pod may fit although no other pod like it does, because the memory is its own.
	own map[string]bool
}

// leastOf returns the least of the pods. There must be one at least.
func leastOf(ledger Ledger, pods []gpu.Pod) least {
	first := pods[0].Demand()
	pod := gpu.Pod{Request: first.Memory, Cores: first.Cores, Containers: first.Containers, Priority: math.MinInt32}
	for i := range pods {
		demand := pods[i].Demand()
		pod.Request, pod.Cores = min(pod.Request, demand.Memory), min(pod.Cores, demand.Cores)
		pod.Containers = min(pod.Containers, demand.Containers)
		pod.Priority = max(pod.Priority, pods[i].Priority)
		if pod.Namespace == "" && !ledger.NeedsTurn(pods[i]) {
			pod.Namespace = pods[i].Namespace
		}
	}
	return least{ledger, pod, ledger.OwnPlaces(pods)}
}

// fits reports whether one of the pods may fit the node.
func (l least) fits(node string) bool { return l.own[node] || fits(l.ledger, l.pod, node) }

// anyFit returns some node that one of the pods may fit.
func (l least) anyFit() (node string, ok bool) {
	if len(l.own) > 0 {
		return slices.Min(slices.Collect(maps.Keys(l.own))), true
	}
	return l.ledger.AnyFit(l.pod)
}

func fits(ledger Ledger, pod gpu.Pod, node string) bool {
	_, ok := ledger.FirstFit(pod, []string{node})
	return ok
}
