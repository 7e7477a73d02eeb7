package ledger

import "github.com/gpushare/gpushare/pkg/gpu"

// SeenEnd returns those of the named nodes, in order, that have pods that are being deleted and no room for the pod by the sum of their cards.
// kube-scheduler counts by this sum. If it offers such a node to the pod, it has seen the end of some of its pods before the ledger has.
func (l *Ledger) SeenEnd(pod gpu.Pod, names []string) (out []string) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	full := map[string]bool{} // Mostly empty: then no name is looked up.
	for name := range l.leaving {
		if l.nodes[name].isFullFor(&pod) {
			full[name] = true
		}
	}
	for i := 0; i < len(names) && len(out) < len(full); i++ {
		if full[names[i]] {
			out = append(out, names[i])
		}
	}
	return out
}

// isFullFor reports whether the sum of the node's cards has no room for the pod.
func (n *node) isFullFor(pod *gpu.Pod) bool {
	var memory gpu.Memory
	for _, card := range n.spec.Cards {
		memory = memory.Add(card.Memory)
	}
	return n.requested.Add(pod.Request) > memory
}
