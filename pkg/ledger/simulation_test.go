package ledger_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
)

// model is the ledger again in the plainest way there is: no lock, no index, no sums kept. Whatever is asked of it, it
// goes through all pods. It shares no code with the ledger, nor with package placement.
type model struct {
	offers map[string]ledger.NodeSpec
	held   map[gpu.PodUID]*hold
}

type hold struct {
	Node string
	ledger.Holder
}

func newModel() *model {
	return &model{offers: map[string]ledger.NodeSpec{}, held: map[gpu.PodUID]*hold{}}
}

// uids lists the holders of a node in order.
func (m *model) uids(node string) []gpu.PodUID {
	var uids []gpu.PodUID
	for _, uid := range slices.Sorted(maps.Keys(m.held)) {
		if m.held[uid].Node == node {
			uids = append(uids, uid)
		}
	}
	return uids
}

// used adds up what is held of a card.
func (m *model) used(node string, index int) (sum gpu.Memory) {
	for _, uid := range m.uids(node) {
		for _, share := range m.held[uid].Placement {
			if share.Card == index {
				sum += share.Memory
			}
		}
	}
	return sum
}

// best returns the index of the healthy card on which the request leaves least (or most), -1 where there is none.
func (m *model) best(node string, request gpu.Memory, most bool) int {
	best, bestLeft := -1, gpu.Memory(0)
	for _, c := range m.offers[node].Cards {
		left := c.Memory - m.used(node, c.Index) - request
		if c.Unhealthy != "" || left < 0 {
			continue
		}
		if best < 0 || !most && left < bestLeft || most && left > bestLeft {
			best, bestLeft = c.Index, left
		}
	}
	return best
}

func (m *model) reason(node string, request gpu.Memory) placement.Reason {
	offer, known := m.offers[node]
	large, healthy, free := false, false, gpu.Memory(0)
	for _, c := range offer.Cards {
		large = large || c.Memory >= request
		healthy = healthy || c.Memory >= request && c.Unhealthy == ""
		if left := c.Memory - m.used(node, c.Index); c.Unhealthy == "" && left > 0 {
			free += left
		}
	}
	switch {
	case !known:
		return placement.NotShared
	case offer.WholeCards:
		return placement.WholeCards
	case len(offer.Cards) == 0:
		return placement.NotShared
	case m.best(node, request, false) >= 0:
		return placement.Fits
	case !large:
		return placement.TooLarge
	case !healthy:
		return placement.Unhealthy
	case free >= request:
		return placement.Fragmented
	}
	return placement.Full
}

func (m *model) check(pod gpu.Pod, node string) placement.Reason {
	if h := m.held[pod.UID]; h != nil && h.Node == node {
		return placement.Fits
	} else if h != nil {
		return placement.Elsewhere
	}
	return m.reason(node, pod.Request)
}

// guess lays the presumed holders of a node anew: who still has room keeps its place, the others get one.
func (m *model) guess(node string) {
	before := map[gpu.PodUID]gpu.Placement{}
	for _, uid := range m.uids(node) {
		if h := m.held[uid]; h.Presumed {
			before[uid], h.Placement = h.Placement, nil
		}
	}
	for _, uid := range slices.Sorted(maps.Keys(before)) {
		fits := len(before[uid]) > 0
		for _, share := range before[uid] {
			i := slices.IndexFunc(m.offers[node].Cards, func(c gpu.Card) bool { return c.Index == share.Card })
			fits = fits && i >= 0 && m.used(node, share.Card)+share.Memory <= m.offers[node].Cards[i].Memory
		}
		if fits {
			m.held[uid].Placement = before[uid]
		}
	}
	for _, uid := range slices.Sorted(maps.Keys(before)) {
		h := m.held[uid]
		if len(h.Placement) > 0 {
			continue
		}
		if card := m.best(node, h.Request, false); card >= 0 {
			h.Placement = gpu.On(card, h.Request)
		}
	}
}

// room is what can be placed on each card of each node.
func (m *model) room() map[string]map[int]gpu.Memory {
	room := map[string]map[int]gpu.Memory{}
	for node, offer := range m.offers {
		room[node] = map[int]gpu.Memory{}
		for _, c := range offer.Cards {
			if c.Unhealthy == "" && !offer.WholeCards {
				room[node][c.Index] = max(c.Memory-m.used(node, c.Index), 0)
			}
		}
	}
	return room
}

// grown lists the nodes on which some card has more room than before.
func (m *model) grown(before map[string]map[int]gpu.Memory) []string {
	var grown []string
	for node, cards := range m.room() {
		for index, room := range cards {
			if room > before[node][index] {
				grown = append(grown, node)
				break
			}
		}
	}
	slices.Sort(grown)
	return grown
}

// nodes is the model as the ledger shows itself.
func (m *model) nodes() []ledger.Node {
	names := slices.Collect(maps.Keys(m.offers))
	for _, h := range m.held {
		names = append(names, h.Node)
	}
	slices.Sort(names)
	var nodes []ledger.Node
	for _, name := range slices.Compact(names) {
		n := ledger.Node{Name: name, NodeSpec: m.offers[name], Holders: []ledger.Holder{}}
		for _, c := range n.Cards {
			n.Used = append(n.Used, m.used(name, c.Index))
		}
		for _, uid := range m.uids(name) { // UIDs sort as names do here.
			n.Holders = append(n.Holders, m.held[uid].Holder)
		}
		nodes = append(nodes, n)
	}
	return nodes
}

// simulation plays the same random operations to the ledger and to the model.
type simulation struct {
	random *rand.Rand
	book   *book
	model  *model
	pods   []gpu.Pod
	nodes  []string
	clock  time.Time
}

// step plays one operation and returns it in words, with what each of the two answered.
func (s *simulation) step() (did string, got, want any) {
	pod, node := s.pods[s.random.IntN(len(s.pods))], s.nodes[s.random.IntN(len(s.nodes))]
	s.clock = s.clock.Add(time.Second)
	held := s.model.held[pod.UID]
	switch n := s.random.IntN(100); {
	case n < 35:
		policy := placement.Policies()[s.random.IntN(2)]
		holder, err := s.book.Reserve(node, pod, policy, s.clock)
		return fmt.Sprintf("Reserve(%s, %s of %d, %s)", node, pod, pod.Request, policy),
			[]any{holder, err}, s.modelReserve(node, pod, policy)
	case n < 45:
		if held != nil {
			held.State = ledger.Bound
		}
		return fmt.Sprintf("Commit(%s)", pod), s.book.Commit(pod.UID), held != nil
	case n < 55:
		may := held != nil && held.State == ledger.Reserved
		if may {
			s.modelDrop(pod.UID)
		}
		return fmt.Sprintf("Release(%s)", pod), s.book.Release(pod.UID), may
	case n < 65:
		s.modelDrop(pod.UID)
		return fmt.Sprintf("Drop(%s)", pod), s.book.Drop(pod.UID), held != nil
	case n < 85:
		where := s.where(pod.Request)
		s.book.Hold(node, pod, where, s.clock)
		s.modelHold(node, pod, where)
		return fmt.Sprintf("Hold(%s, %s of %d, %v)", node, pod, pod.Request, where), nil, nil
	case n < 90:
		s.book.DeleteNode(node)
		delete(s.model.offers, node)
		s.model.guess(node)
		return fmt.Sprintf("DeleteNode(%s)", node), nil, nil
	default:
		offer := s.offer()
		s.book.SetNode(node, offer)
		s.model.offers[node] = offer
		s.model.guess(node)
		return fmt.Sprintf("SetNode(%s, %v)", node, offer), nil, nil
	}
}

func (s *simulation) modelReserve(node string, pod gpu.Pod, policy placement.Policy) []any {
	if h := s.model.held[pod.UID]; h != nil && h.Node == node {
		return []any{h.Holder, error(nil)}
	}
	if reason := s.model.check(pod, node); reason != placement.Fits {
		return []any{ledger.Holder{}, error(&ledger.NoRoomError{Node: node, Reason: reason})}
	}
	card := s.model.best(node, pod.Request, policy.String() == "spread")
	h := ledger.Holder{Pod: pod, Placement: gpu.On(card, pod.Request), AssumeTime: s.clock}
	s.model.held[pod.UID] = &hold{node, h}
	return []any{h, error(nil)}
}

func (s *simulation) modelHold(node string, pod gpu.Pod, where gpu.Placement) {
	h := ledger.Holder{Pod: pod, State: ledger.Bound, Placement: where, Presumed: len(where) == 0, AssumeTime: s.clock}
	switch before := s.model.held[pod.UID]; {
	case before == nil:
	case before.Node != node:
		s.modelDrop(pod.UID)
	case h.Presumed:
		h.Placement = before.Placement
	}
	s.model.held[pod.UID] = &hold{node, h}
	s.model.guess(node)
}

func (s *simulation) modelDrop(uid gpu.PodUID) {
	if h := s.model.held[uid]; h != nil {
		delete(s.model.held, uid)
		s.model.guess(h.Node)
	}
}

// where makes up what annotations may say: mostly one card, sometimes nothing, two cards, or one that isn't there.
func (s *simulation) where(request gpu.Memory) gpu.Placement {
	switch s.random.IntN(6) {
	case 0, 1:
		return nil
	case 2:
		if request < 2 {
			return nil // Nobody writes down a share of nothing; protocol leaves it out.
		}
		return gpu.Placement{{Card: 0, Memory: request / 2}, {Card: 2, Memory: request - request/2}}
	}
	return gpu.On(s.random.IntN(5), request)
}

// offer makes up a node of up to four cards, with gaps between their indices.
func (s *simulation) offer() ledger.NodeSpec {
	offer := ledger.NodeSpec{Unit: []gpu.Unit{gpu.MiB, gpu.GiB}[s.random.IntN(2)], WholeCards: s.random.IntN(10) == 0}
	for index := range 4 {
		if s.random.IntN(4) == 0 {
			continue
		}
		card := gpu.Card{Index: index, Memory: gpu.Memory(8 + 4*s.random.IntN(3))}
		if s.random.IntN(6) == 0 {
			card.Unhealthy = "Xid 79"
		}
		offer.Cards = append(offer.Cards, card)
	}
	return offer
}

func TestTheLedgerDoesWhatTheModelDoes(t *testing.T) {
	seeds, steps := uint64(60), 200
	if testing.Short() {
		seeds = 15
	}
	reached := map[placement.Reason]int{}
	presumed, over, freed := 0, 0, 0
	for seed := range seeds {
		s := &simulation{
			random: rand.New(rand.NewPCG(seed, 1)), book: newBook(t), model: newModel(), nodes: []string{"n0", "n1", "n2"},
			clock: at,
		}
		for i := range 14 {
			s.pods = append(s.pods, pod(fmt.Sprintf("p%02d", i), gpu.Memory(1+s.random.IntN(13))))
		}
		var history []string
		for range steps {
			before := s.model.room()
			did, got, want := s.step()
			history = append(history, did)
			compare := func(what string, want, got any) {
				t.Helper()
				if reflect.DeepEqual(want, got) {
					return // cmp is far slower, and only there to tell what differs.
				}
				if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
					t.Fatalf("seed %d, after %d steps, the last of them\n%s\n%s (-model +ledger):\n%s",
						seed, len(history), history[max(0, len(history)-12):], what, diff)
				}
			}
			compare("the answer", want, got)
			compare("the nodes", s.model.nodes(), s.book.Nodes())
			said := s.book.takeFreed()
			slices.Sort(said)
			compare("what came free", s.model.grown(before), said)
			freed += len(said)

			asking, reasons := s.pods[s.random.IntN(len(s.pods))], map[string]placement.Reason{}
			if s.random.IntN(2) == 0 {
				asking = pod("stranger", asking.Request)
			}
			for _, node := range append(s.nodes, "n9") {
				reasons[node] = s.model.check(asking, node)
				reached[reasons[node]]++
			}
			compare("Check", reasons, s.book.check(asking, append(s.nodes, "n9")...))
			compare("Rank", reasons, s.book.rank(asking, append(s.nodes, "n9")...))
			for _, p := range s.pods {
				node, holder, held := s.book.Lookup(p.UID)
				compare("whether "+p.Name+" is held", s.model.held[p.UID] != nil, held)
				if held {
					compare(p.Name, *s.model.held[p.UID], hold{node, holder})
				}
				if holder.Presumed {
					presumed++
				}
			}
			for _, n := range s.book.Nodes() {
				for i, c := range n.Cards {
					if n.Used[i] > c.Memory {
						over++
					}
				}
			}
		}
	}
	// A simulation that never gets into the corners proves nothing about them.
	for _, reason := range append(placement.Reasons(), placement.Fits) {
		if reached[reason] == 0 {
			t.Errorf("the simulation never came upon %q", reason)
		}
	}
	if presumed == 0 || over == 0 || freed == 0 {
		t.Errorf("the simulation saw %d presumed places, %d overfull cards, %d nodes coming free: want some of each", presumed, over, freed)
	}
	t.Logf("%d steps; answers %v; %d presumed places, %d overfull cards, %d nodes coming free",
		int(seeds)*steps, reached, presumed, over, freed)
}
