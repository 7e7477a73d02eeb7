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

// tentativePlacement names every node to which a pod may be bound. Between a pod's filter and its bind, other pods are filtered. They
// should see the memory that the first pod is about to get as used. A tentative placement is not an allocation: it counts only in views
// that say so (View.TentativeAt), and it ends when the pod gets an allocation. So for some milliseconds it also counts on nodes that the pod
// doesn't get.
type tentativePlacement struct {
	pod   gpu.Pod
	nodes []*node
	at    time.Time
}

// AddTentative records the named nodes as the pod's tentative placement. It replaces an earlier one of the same pod.
func (l *Ledger) AddTentative(pod gpu.Pod, names []string, at time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.endTentativeIf(func(p *tentativePlacement) bool { return p.pod.UID == pod.UID || at.Sub(p.at) > TentativeLifetime })
	if l.allocated(pod.UID) {
		return
	}
	made := &tentativePlacement{pod: pod, at: at}
	for _, name := range names {
		if n := l.nodes[name]; n != nil {
			n.tentative = append(n.tentative, made)
			made.nodes = append(made.nodes, n)
		}
	}
	l.tentative = append(l.tentative, made)
}

// endTentative ends the tentative placement of a pod that has an allocation or needs none any more. The caller holds the lock.
func (l *Ledger) endTentative(uid gpu.PodUID) {
	l.endTentativeIf(func(p *tentativePlacement) bool { return p.pod.UID == uid })
}

func (l *Ledger) endTentativeIf(ends func(*tentativePlacement) bool) {
	l.tentative = slices.DeleteFunc(l.tentative, func(p *tentativePlacement) bool {
		if !ends(p) {
			return false
		}
		for _, n := range p.nodes {
			n.tentative = slices.DeleteFunc(n.tentative, func(o *tentativePlacement) bool { return o == p })
		}
		return true
	})
}

// counts reports whether the tentative placement counts in the view.
func (p *tentativePlacement) counts(view *View) bool {
	return !view.TentativeAt.IsZero() && view.TentativeAt.Sub(p.at) <= TentativeLifetime
}

// cardsInView is cardsFor in a view: tentative placements of other pods can count too.
func (l *Ledger) cardsInView(n *node, view *View, a *asker) []placement.Card {
	cards, copied := l.cardsFor(n, a), false
	for _, other := range n.tentative {
		if other.pod.UID == a.pod.UID || !other.counts(view) {
			continue
		}
		if !copied {
			cards, copied = slices.Clone(cards), true
		}
		where, _ := placement.Place(view.Card, cards, other.pod.Demand())
		placement.Use(cards, where)
	}
	return cards
}
