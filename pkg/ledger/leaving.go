package ledger

import "github.com/gpushare/gpushare/pkg/gpu"

// SeenEnd returns those of the named nodes, in order, that have pods that are being deleted and no room for the pod by the sum of their cards.
// kube-scheduler counts by this sum. If it offers such a node to the pod, it has seen the end of some of its pods before the ledger has.
func (l *Ledger) SeenEnd(pod gpu.Pod, names []string) (out []string) {
	for _, name := range names {
		if l.overfull(name, pod) {
			out = append(out, name)
		}
	}
	return out
}

func (l *Ledger) overfull(name string, pod gpu.Pod) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	n := l.nodes[name]
	if n == nil || n.leaving == 0 {
		return false
	}
	var memory gpu.Memory
	for _, card := range n.inventory {
		memory = memory.Add(card.Memory)
	}
	return n.requested.Add(pod.Request) > memory
}
