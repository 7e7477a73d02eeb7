package ledger

import (
	"cmp"
	"maps"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// nominee is a pod that is nominated to a node, and the pods there that are about to be evicted for it.
type nominee struct {
	gpu.Pod
	victims []gpu.PodUID
}

func (n nominee) equal(o nominee) bool { return n.Pod == o.Pod && slices.Equal(n.victims, o.victims) }

// Nominate records that kube-scheduler means the node for a pod that isn't bound yet, mostly because others were evicted
// there for it (status.nominatedNodeName). The pod holds nothing, but pods of equal or lower priority find its room
// taken. Of the victims, which are about to be evicted for the pod, memory is expected as of pods that are leaving already. A pod is
// nominated to one node at most; the last call counts.
func (l *Ledger) Nominate(name string, pod gpu.Pod, victims ...gpu.PodUID) {
	added := nominee{Pod: pod, victims: slices.Clone(victims)}
	former, moved := "", false
	l.edit(func(alter func(string, func(*node))) {
		former, moved = l.nominations[pod.UID]
		if moved && former == name && slices.ContainsFunc(l.nodes[name].nominees, added.equal) {
			moved = false
			return
		}
		if moved {
			alter(former, func(n *node) { n.withdraw(pod.UID) })
		}
		alter(name, func(n *node) {
			n.nominees = append(n.nominees, added)
			// Large requests first, since they find a card less easily.
			slices.SortFunc(n.nominees, func(a, b nominee) int {
				return cmp.Or(cmp.Compare(b.Priority, a.Priority), cmp.Compare(b.Request, a.Request), cmp.Compare(a.UID, b.UID))
			})
		})
		l.nominations[pod.UID] = name
	})
	if moved {
		l.freed(former) // For others there is more room than before, though none was given back.
	}
}

// Withdraw takes a nomination back, where there is one.
func (l *Ledger) Withdraw(uid gpu.PodUID) {
	l.mu.RLock()
	_, nominated := l.nominations[uid]
	l.mu.RUnlock()
	if !nominated {
		return // Nearly every pod, at every change of it.
	}
	name := ""
	l.edit(func(alter func(string, func(*node))) {
		if name, nominated = l.nominations[uid]; nominated {
			alter(name, func(n *node) { n.withdraw(uid) })
			delete(l.nominations, uid)
		}
	})
	if nominated {
		l.freed(name)
	}
}

func (n *node) withdraw(uid gpu.PodUID) {
	n.nominees = slices.DeleteFunc(n.nominees, func(p nominee) bool { return p.UID == uid })
}

// Standing is a node as one pod finds it that looks for room there. It is a copy.
type Standing struct {
	// Cards in the order of their index. What nominated pods of equal or higher priority are to get counts as used,
	// which can pass the card's memory where they wait for others to leave.
	Cards []placement.Card
	// Holders are the pods that hold memory, in no order.
	Holders []Holder
}

// Standing returns a node as the pod finds it, and what Check says of it.
func (l *Ledger) Standing(name string, pod gpu.Pod) (Standing, placement.Reason) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	n := l.nodes[name]
	reason := l.fit(n, pod)
	if home, held := l.homes[pod.UID]; held {
		reason = placement.Elsewhere
		if home == name {
			reason = placement.Fits
		}
	}
	if n.open() != placement.Fits {
		return Standing{}, reason
	}
	s := Standing{Cards: slices.Clone(l.cardsFor(n, pod)), Holders: make([]Holder, 0, len(n.holders))}
	for h := range maps.Values(n.holders) {
		s.Holders = append(s.Holders, h.copy())
	}
	return s, reason
}

// Outranked returns those of the named nodes, in their order, on which a pod of lower priority is bound: where there is none, no
// card can be freed for the pod. It costs much less than their Standings.
func (l *Ledger) Outranked(pod gpu.Pod, names []string) (out []string) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for _, name := range names {
		if n := l.nodes[name]; n != nil && n.outranked(pod.Priority) {
			out = append(out, name)
		}
	}
	return out
}

func (n *node) outranked(priority int32) bool {
	for _, h := range n.holders {
		if h.State == Bound && h.Priority < priority {
			return true
		}
	}
	return false
}

// fit says whether the pod, which holds nothing, finds a card on the node. It needs the lock. A node that isn't known may
// be nil.
func (l *Ledger) fit(n *node, pod gpu.Pod) placement.Reason {
	if reason := n.open(); reason != placement.Fits {
		return reason
	}
	return placement.Fit(l.cardsFor(n, pod), pod.Request)
}

// suit is fit with how well the node suits the pod besides.
func (l *Ledger) suit(n *node, view View, pod gpu.Pod) (placement.Suitability, placement.Reason) {
	if reason := n.open(); reason != placement.Fits {
		return 0, reason
	}
	if len(n.claimed) == 0 && len(n.nominees) == 0 && len(n.promised) == 0 {
		return placement.Suit(view.Card, view.Node, n.cards, &n.totals, pod.Request)
	}
	cards := l.cardsFor(n, pod)
	if !view.Promised.IsZero() {
		cards = n.withPromised(cards, view, pod)
	}
	totals := placement.Sum(cards)
	return placement.Suit(view.Card, view.Node, cards, &totals, pod.Request)
}

// cardsFor returns the node's cards as the pod finds them: as they are, or a copy where nominated pods, or a claim, go before it. It
// needs the lock. The node must be open.
func (l *Ledger) cardsFor(n *node, pod gpu.Pod) []placement.Card {
	cards, copied := n.cards, false
	if l.claimedBefore(n, pod) {
		cards, copied = slices.Clone(cards), true
		add(cards, n.claimed)
	}
	for _, nominee := range n.nominees {
		if nominee.Priority < pod.Priority {
			break
		}
		if _, held := l.homes[nominee.UID]; held || nominee.UID == pod.UID {
			continue
		}
		if !copied {
			cards, copied = slices.Clone(cards), true
		}
		add(cards, n.placeNominee(cards, nominee))
	}
	return cards
}

// placeNominee returns the card that a nominated pod is likely to get: one with room, else one that will have room when the
// pods have gone that are leaving or about to be evicted for it. It may be none: kube-scheduler's victims aren't known before
// they are leaving.
func (n *node) placeNominee(cards []placement.Card, nominee nominee) gpu.Placement {
	where, reason := placement.Place(placement.Binpack, cards, nominee.Request)
	if !reason.Resolvable() {
		return where
	}
	cards = slices.Clone(cards)
	for h := range maps.Values(n.holders) {
		if !h.Leaving && !slices.Contains(nominee.victims, h.UID) {
			continue
		}
		for _, share := range h.Placement {
			if i, ok := position(cards, share.Card); ok {
				cards[i].Used = cards[i].Used.Sub(share.Memory)
			}
		}
	}
	where, _ = placement.Place(placement.Binpack, cards, nominee.Request)
	return where
}
