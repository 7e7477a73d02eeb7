package ledger

import "github.com/gpushare/gpushare/pkg/gpu"

// OwnPlaces returns the nodes on which one of the pods has something of its own: an allocation, a nomination, a held place, or a part of the
// starvation reservation. On other nodes each of them sees the same memory as any pod of its priority.
func (l *Ledger) OwnPlaces(pods []gpu.Pod) map[string]bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	nodes, units, starving := map[string]bool{}, map[int]bool{}, false
	for i := range pods {
		uid := pods[i].UID
		if home, allocated := l.nodeOf[uid]; allocated {
			nodes[home] = true
		}
		if node, nominated := l.nominations[uid]; nominated {
			nodes[node] = true
		}
		if unit, held := l.held.unitOf[uid]; held {
			units[unit] = true
		}
		if l.starvation != nil && !starving {
			_, starving = l.starvation.pods[uid]
		}
	}
	for node, places := range l.held.nodes {
		for _, place := range places { // A pod uses the places of its whole unit.
			if units[place.Unit] {
				nodes[node] = true
			}
		}
	}
	if starving {
		for _, node := range l.starvation.nodes() {
			nodes[node] = true
		}
	}
	return nodes
}
