package requeue

import (
	"math"
	"slices"

	corev1 "k8s.io/api/core/v1"

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

// fit reports whether one of the pods may fit one of the nodes.
func (l least) fit(nodes ...string) bool {
	fits := func(pod gpu.Pod) bool { return fits(l.ledger, pod, nodes...) }
	return fits(l.pod) || slices.ContainsFunc(l.own, fits)
}

// fitAny reports whether one of the pods may fit one of all nodes.
func (l least) fitAny(nodes []*corev1.Node) bool {
	names := make([]string, len(nodes))
	for i := range nodes {
		names[i] = nodes[i].Name
	}
	return l.fit(names...)
}

func fits(ledger Ledger, pod gpu.Pod, nodes ...string) bool {
	_, ok := ledger.FirstFit(pod, nodes)
	return ok
}
