package ledger_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
)

// at is the assume time of all allocations, and the present time.
var at = time.Unix(1700000000, 0)

var (
	binpack = ledger.View{Card: placement.Binpack, Node: placement.Binpack}
	// tentative counts tentative placements.
	tentative = ledger.View{Card: placement.Binpack, Node: placement.Binpack, TentativeAt: at}
)

// spec returns a node with cards of these sizes.
func spec(sizes ...gpu.Memory) ledger.NodeSpec {
	s := ledger.NodeSpec{Unit: gpu.MiB}
	for i, size := range sizes {
		s.Cards = append(s.Cards, gpu.Card{Index: i, UUID: fmt.Sprintf("GPU-%d", i), Memory: size, NUMANode: gpu.NoNUMANode})
	}
	return s
}

// unhealthy returns the node with one unhealthy card.
func unhealthy(card int, s ledger.NodeSpec) ledger.NodeSpec {
	s.Cards = slices.Clone(s.Cards)
	s.Cards[card].Unhealthy = "Xid 79"
	return s
}

// limited returns the node with this limit of containers for each card.
func limited(s ledger.NodeSpec, containers int) ledger.NodeSpec {
	s.Cards = slices.Clone(s.Cards)
	for i := range s.Cards {
		s.Cards[i].MaxContainers = containers
	}
	return s
}

// wholeCards returns the node as one that also allocates whole cards.
func wholeCards(s ledger.NodeSpec) ledger.NodeSpec {
	s.WholeCards = true
	return s
}

// pod returns a pod whose UID is its name.
func pod(name string, request gpu.Memory, priority ...int32) gpu.Pod {
	p := gpu.Pod{UID: gpu.PodUID(name), Namespace: "default", Name: name, Request: request}
	if len(priority) > 0 {
		p.Priority = priority[0]
	}
	return p
}

// terminating returns the pod while it is being deleted.
func terminating(p gpu.Pod) gpu.Pod {
	p.Leaving = true
	return p
}

// fixture is a ledger that records its calls of freed.
type fixture struct {
	*ledger.Ledger
	t     testing.TB
	freed []string
	// held are the reservations of reclaim.
	held map[string]ledger.Reservation
}

// newFixture returns a ledger with the nodes n1, n2 and so on.
func newFixture(t testing.TB, specs ...ledger.NodeSpec) *fixture {
	return newFixtureWith(t, nil, specs...)
}

// newFixtureWith returns a ledger that knows what nodes have besides GPU memory.
func newFixtureWith(t testing.TB, resources ledger.Resources, specs ...ledger.NodeSpec) *fixture {
	f := &fixture{t: t}
	f.Ledger = ledger.NewWithResources(resources, nil)
	f.AddFreedListener(func(node string) { f.freed = append(f.freed, node) })
	for i, s := range specs {
		f.SetNode(fmt.Sprintf("n%d", i+1), s)
	}
	f.freed = nil
	return f
}

// takeFreed returns the nodes of the freed calls since the last takeFreed, sorted.
func (f *fixture) takeFreed() []string {
	freed := f.freed
	f.freed = nil
	slices.Sort(freed)
	return freed
}

// reserve reserves memory for each pod on the node, by binpack.
func (f *fixture) reserve(node string, pods ...gpu.Pod) {
	f.t.Helper()
	for _, p := range pods {
		if _, err := f.Reserve(node, p, placement.Binpack, at); err != nil {
			f.t.Fatalf("Reserve(%s, %s): %v", node, p, err)
		}
	}
}

// bind sets the bound allocation of each pod on one card.
func (f *fixture) bind(node string, card int, pods ...gpu.Pod) {
	for _, p := range pods {
		f.SetBound(node, p, gpu.On(card, p.Request), at)
	}
}

// heldPlace is a share of the reservation of an item.
type heldPlace struct {
	UID  gpu.PodUID
	Node string
	On   gpu.Placement
	Item int
}

// hold replaces the reservations of reclaim that differ.
func (f *fixture) hold(places []heldPlace, priority int32) {
	former, next := f.held, held(places, priority)
	f.held = map[string]ledger.Reservation{}
	for i, r := range next {
		f.held[fmt.Sprint(i, r)] = r
	}
	for _, id := range slices.Sorted(maps.Keys(former)) {
		if _, stays := f.held[id]; !stays {
			f.End(ledger.Reclaimed, id)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(f.held)) {
		if _, known := former[id]; !known {
			f.AddReservation(id, f.held[id])
		}
	}
}

// held returns a reservation for each item of the places, which must be in the order of items.
func held(places []heldPlace, priority int32) (out []ledger.Reservation) {
	for i, p := range places {
		if i == 0 || places[i-1].Item != p.Item {
			out = append(out, ledger.Reservation{Source: ledger.Reclaimed, Priority: priority})
		}
		last := &out[len(out)-1]
		last.Places = append(last.Places, ledger.Place{Pod: gpu.Pod{UID: p.UID}, Node: p.Node, On: p.On})
	}
	return out
}

// check returns the reason of each node for the pod.
func (f *fixture) check(pod gpu.Pod, names ...string) (results []reasons.Reason) {
	f.ForEachFit(pod, names, func(_ string, reason reasons.Reason) { results = append(results, reason) })
	return results
}

// rank returns the reason of each node for the pod, from Rank, which uses per-node sums.
func (f *fixture) rank(view ledger.View, pod gpu.Pod, names ...string) []reasons.Reason {
	_, results, _ := f.Rank(view, pod, names)
	return results
}

// scores returns the score of each node for the pod; 0 if the pod doesn't fit.
func (f *fixture) scores(policy placement.Policy, pod gpu.Pod, names ...string) []int {
	scores := make([]int, len(names))
	fitting, _, _ := f.Rank(ledger.View{Card: policy, Node: policy}, pod, names)
	for _, c := range fitting {
		scores[c.Node] = c.Suits.Score()
	}
	return scores
}

// best returns the node that suits the pod best. There must be one.
func (f *fixture) best(view ledger.View, pod gpu.Pod, names []string) string {
	fitting, _, _ := f.Rank(view, pod, names)
	return names[placement.Best(fitting, 1)[0].Node]
}

// nodeOf returns the node on which the pod has an allocation; empty if it has none.
func (f *fixture) nodeOf(uid gpu.PodUID) string {
	node, _, _ := f.Lookup(uid)
	return node
}

func expect(t testing.TB, what string, want, got any) {
	t.Helper()
	check.Equal(t, what, want, got, cmpopts.EquateEmpty())
}
