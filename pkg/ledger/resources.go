package ledger

import (
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Resources knows what nodes have free besides GPU memory (CPU, memory, pods, extended resources), and what pods ask for. It is called with the
// ledger's lock held, so it must not call the ledger.
type Resources interface {
	// Shape returns what the pod asks for of its node; false if the pod isn't known.
	Shape(uid gpu.PodUID) (placement.Shape, bool)
	// Fits reports whether pods fit a node.
	Fits(q ResourceQuery) bool
	// Part returns the part of a node that the pods request, from 0 to 1: of the resource of which it is the largest.
	Part(node string, pods []gpu.PodUID) float64
}

// ResourceQuery asks whether pods fit a node by its resources. Pods that are bound to the node count as using it, whether they are named or not.
type ResourceQuery struct {
	Node string
	// Pods are the pods, and Ahead are others that need a place on the node as well. Those that aren't pending count no more.
	Pods, Ahead []gpu.PodUID
	// Ending are pods that are bound to the node and count as gone.
	Ending []gpu.PodUID
	// Listed is true if the node must list what the pods request. kube-scheduler offers other nodes too, if another extender or a driver
	// provides the resource.
	Listed bool
}

// fits is Resources.Fits; true if only GPU memory counts.
func (l *Ledger) fits(q ResourceQuery) bool { return l.resources == nil || l.resources.Fits(q) }

// keeps reports whether something is reserved on the node.
func (n *node) keeps() bool { return len(n.reserved) > 0 || n.planned }

// Keeps reports whether something is reserved on the node, so that pods may fit once it has more CPU or another resource free.
func (l *Ledger) Keeps(name string) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	n := l.nodes[name]
	return n != nil && n.keeps()
}

// orKept returns reasons.ResourcesReserved instead of Fits if what the node keeps for others leaves too little CPU, or another resource, for the
// pod. The caller holds the lock.
func (l *Ledger) orKept(reason reasons.Reason, name string, n *node, pod *gpu.Pod, unseen map[string]bool) reasons.Reason {
	if reason == reasons.Fits && n.keeps() && !l.fitsBeside(name, n, pod, unseen, nil) {
		return reasons.ResourcesReserved
	}
	return reason
}

// FitsResources reports whether the pod fits the node beside what is kept there for others once the pods in gone have ended, by all resources but
// GPU memory.
func (l *Ledger) FitsResources(name string, pod gpu.Pod, gone []gpu.PodUID) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	n := l.nodes[name]
	return n == nil || l.fitsBeside(name, n, &pod, nil, gone)
}

// fitsBeside is FitsResources. It returns true if nothing is kept: kube-scheduler has checked that the pod fits what is free. unseen are those of
// View. The caller holds the lock.
func (l *Ledger) fitsBeside(name string, n *node, pod *gpu.Pod, unseen map[string]bool, gone []gpu.PodUID) bool {
	ahead, ending := l.ahead(n, pod, unseen)
	return len(ahead) == 0 || l.fits(ResourceQuery{Node: name, Pods: []gpu.PodUID{pod.UID}, Ahead: ahead, Ending: distinct(append(ending, gone...))})
}

// ahead returns the pods that need a place on the node and that come before the pod, with the pods that have to end for them: those of awaited
// reservations from the queue and from reclaim, as far as the pod sees their cards as used, and those with assumed allocations. kube-scheduler counts
// nominated pods itself. unseen are those of View.
func (l *Ledger) ahead(n *node, pod *gpu.Pod, unseen map[string]bool) (ahead, ending []gpu.PodUID) {
	own := l.reservations.byPod[pod.UID]
	for i := range n.reserved {
		r := &n.reserved[i]
		if r.Source == Nominated || unseen[r.Item.ID] || !l.countsFor(r, pod, &own) {
			continue
		}
		ahead = append(ahead, r.Pod.UID)
		ending = append(append(ending, r.Ending...), r.Victims...)
	}
	for uid, a := range n.allocations {
		if a.State == Assumed && uid != pod.UID && (a.Priority >= pod.Priority || l.isBinding(uid)) {
			ahead = append(ahead, uid)
		}
	}
	return distinct(ahead), distinct(ending) // Reclaim and the queue can both keep a place for a pod.
}

func distinct(uids []gpu.PodUID) []gpu.PodUID {
	slices.Sort(uids)
	return slices.Compact(uids)
}
