package ledger

import (
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// TentativeLifetime is how long a tentative placement counts. It is much longer than the time between filter and bind, and so short
// that a pod that isn't bound blocks other pods only briefly.
const TentativeLifetime = 2 * time.Second

// tentativePlacements are the tentative placements. Between a pod's filter and its bind, other pods are filtered. They
// should see the memory that the first pod is about to get as used. A tentative placement is not an allocation: it counts only in
// Rank, if the view says so, and it ends when the pod gets an allocation. It names every node to which the pod
// may be bound. So for some milliseconds it also counts on nodes that the pod doesn't get.
type tentativePlacements struct {
	// open is ordered by age.
	open []tentativePlacement
}

type tentativePlacement struct {
	pod   gpu.Pod
	nodes []*node
	at    time.Time
}

// tentativePod is a tentative placement, kept with each node that it names.
type tentativePod struct {
	gpu.Pod
	at time.Time
}

// AddTentative records the named nodes as the pod's tentative placement. It replaces an earlier one of the same pod.
func (l *Ledger) AddTentative(pod gpu.Pod, names []string, at time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tentative.endIf(func(p tentativePlacement) bool { return p.pod.UID == pod.UID || at.Sub(p.at) > TentativeLifetime })
	if _, allocated := l.nodeOf[pod.UID]; allocated {
		return
	}
	made := tentativePlacement{pod: pod, at: at}
	for _, name := range names {
		if n := l.nodes[name]; n != nil {
			n.tentative = append(n.tentative, tentativePod{pod, at})
			made.nodes = append(made.nodes, n)
		}
	}
	l.tentative.open = append(l.tentative.open, made)
}

// endFor ends the tentative placement of a pod that has an allocation or needs none any more. The caller holds the lock.
func (p *tentativePlacements) endFor(uid gpu.PodUID) {
	p.endIf(func(made tentativePlacement) bool { return made.pod.UID == uid })
}

func (p *tentativePlacements) endIf(which func(tentativePlacement) bool) {
	p.open = slices.DeleteFunc(p.open, func(made tentativePlacement) bool {
		if !which(made) {
			return false
		}
		for _, n := range made.nodes {
			n.tentative = slices.DeleteFunc(n.tentative, func(p tentativePod) bool { return p.UID == made.pod.UID })
		}
		return true
	})
}

// anyCounts reports whether there is a tentative placement that counts in the view.
func (p *tentativePlacements) anyCounts(view View) bool {
	return !view.TentativeAt.IsZero() && slices.ContainsFunc(p.open, func(made tentativePlacement) bool { return view.counts(made.at) })
}

// counts reports whether a tentative placement made at that time counts in the view.
func (v View) counts(at time.Time) bool { return v.TentativeAt.Sub(at) <= TentativeLifetime }

// withTentative returns the cards with the tentative placements of other pods counted as used. The caller holds the lock.
func (n *node) withTentative(cards []placement.Card, view *View, pod *gpu.Pod) []placement.Card {
	copied := false
	for _, other := range n.tentative {
		if other.UID == pod.UID || !view.counts(other.at) {
			continue
		}
		if !copied {
			cards, copied = slices.Clone(cards), true
		}
		where, _ := placement.Place(view.Card, cards, other.Demand())
		placement.Use(cards, where)
	}
	return cards
}
