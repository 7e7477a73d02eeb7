package ledger

import (
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Nominate records that the pod is nominated to the node (status.nominatedNodeName), usually because pods are evicted there for it. The pod has
// no allocation yet, but pods of equal or lower priority see the memory that it is likely to get as used. victims are about to be evicted for
// the pod. A pod has at most one nomination: a new one replaces an earlier one.
func (l *Ledger) Nominate(name string, pod gpu.Pod, victims ...gpu.PodUID) {
	l.edit(func(e *edit) {
		id := string(pod.UID)
		former := l.reservations.items[Nominated][id]
		if former != nil && former.Places[0].Pod == pod && former.Places[0].Node == name && slices.Equal(former.Victims, victims) {
			return
		}
		e.freed = l.endItem(Nominated, id)
		l.nominate(name, pod, victims...)
	})
}

func (l *Ledger) nominate(name string, pod gpu.Pod, victims ...gpu.PodUID) {
	places := []Place{{Pod: pod, Node: name}}
	l.addReservation(string(pod.UID), Reservation{Source: Nominated, Priority: pod.Priority, Places: places, Victims: victims})
}

// NominateAll nominates each pod to the best of its candidate nodes by the view. It nominates one pod after another, so that each pod sees the
// nominations before it. It returns the nodes in the order of the requests; a node is empty if the pod fits none.
func (l *Ledger) NominateAll(requests []Request, view View) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	ranks := l.rankingsBy(view, func(n *node, pod gpu.Pod) bool {
		if _, fits := l.choosePlace(n, &pod, &view); !fits {
			return false
		}
		l.nominate(n.name, pod)
		return true
	})
	nodes := make([]string, len(requests))
	for i := range requests {
		uid := requests[i].Pod.UID
		if !l.allocated(uid) && l.reservations.awaited[Nominated][uid] == nil {
			nodes[i], _ = ranks.of(&requests[i]).place(requests[i].Pod)
		}
	}
	return nodes
}
