package ledger

import (
	"maps"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// FitsEmpty reports whether all pods together would fit their nodes if no other pod had GPU memory. It tries the pods in their order, each on
// the first node that has room.
func (l *Ledger) FitsEmpty(requests []Request) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	trial := emptyTrial{ledger: l, cards: map[string][]placement.Card{}, pods: map[string][]gpu.PodUID{}}
	from := 0
	for i, request := range requests {
		if i > 0 && keyOf(request.Nodes) != keyOf(requests[i-1].Nodes) {
			from = 0
		}
		place, ok := trial.place(request, from) // Most pods are equal to the one before, for which the earlier nodes had no room.
		if !ok && from > 0 {
			place, ok = trial.place(request, 0)
		}
		if !ok {
			return false
		}
		from = place
	}
	return true
}

// emptyTrial places pods on empty nodes. cards are those of the nodes that have some of the pods.
type emptyTrial struct {
	ledger *Ledger
	cards  map[string][]placement.Card
	pods   map[string][]gpu.PodUID
}

// place places the pod on the first of its nodes, from that position on, that has room, and returns the node's position.
func (t *emptyTrial) place(request Request, from int) (position int, ok bool) {
	demand := request.Pod.Demand()
	for i, name := range request.Nodes[from:] {
		n := t.ledger.nodes[name]
		if n.accepts(&demand) != reasons.Fits {
			continue
		}
		cards, used := t.cards[name]
		if !used {
			cards = n.spec.empty()
		}
		where, reason := placement.Place(placement.Binpack, cards, demand)
		pods := append(t.pods[name], request.Pod.UID)
		if reason != reasons.Fits || !t.ledger.resources.Fits(ResourceQuery{Node: name, Pods: pods, Ending: slices.Collect(maps.Keys(n.allocations)), Listed: true}) {
			continue
		}
		placement.Use(cards, where)
		t.cards[name], t.pods[name] = cards, pods
		return from + i, true
	}
	return 0, false
}
