package ledger_test

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// model is the simplest possible ledger: no lock, no index, no stored sums. Every question goes through all pods. It
// shares no code with the ledger or with package placement.
type model struct {
	specs       map[string]ledger.NodeSpec
	allocations map[gpu.PodUID]*allocation
	// kept are the shares of the awaited reservation; nil if there is none.
	kept         map[gpu.PodUID]keptShare
	keptPriority int32
	keptRequests []ledger.Request
	// places returns the places of a node that the item of an awaited reservation has to leave to others; nil if there are none.
	places func(node string) []keptShare
}

type allocation struct {
	Node string
	ledger.Allocation
}

func newModel() *model {
	return &model{specs: map[string]ledger.NodeSpec{}, allocations: map[gpu.PodUID]*allocation{}}
}

// uids returns the pods with an allocation on the node, sorted.
func (m *model) uids(node string) []gpu.PodUID {
	var uids []gpu.PodUID
	for _, uid := range slices.Sorted(maps.Keys(m.allocations)) {
		if m.allocations[uid].Node == node {
			uids = append(uids, uid)
		}
	}
	return uids
}

// amount is memory, cores and containers of a card or of a demand. It can be negative. near is 1 for a card near an adapter, and for a demand that
// needs such a card.
type amount struct{ memory, cores, containers, near int64 }

func (a amount) plus(o amount) amount {
	return amount{a.memory + o.memory, a.cores + o.cores, a.containers + o.containers, a.near + o.near}
}
func (a amount) minus(o amount) amount {
	return amount{a.memory - o.memory, a.cores - o.cores, a.containers - o.containers, a.near - o.near}
}
func (a amount) atLeast(o amount) bool {
	return a.memory >= o.memory && a.cores >= o.cores && a.containers >= o.containers && a.near >= o.near
}

// some returns the amount with zero in place of what is negative.
func (a amount) some() amount {
	return amount{max(a.memory, 0), max(a.cores, 0), max(a.containers, 0), a.near}
}

// times returns the memory and the cores of n cards.
func (a amount) times(n int) amount {
	return amount{memory: a.memory * int64(n), cores: a.cores * int64(n)}
}

// each returns what the pod asks for of each of its cards, and of how many.
func each(pod gpu.Pod) (amount, int) {
	n, near := int64(max(pod.Cards, 1)), int64(0)
	if pod.RDMA == gpu.RDMARequired {
		near = 1
	}
	return amount{(int64(pod.Request) + n - 1) / n, (int64(pod.Cores) + n - 1) / n, int64(max(pod.Containers, 1)), near}, int(n)
}

func on(cards []int, of amount) (where gpu.Placement) {
	for _, card := range cards {
		where = append(where, gpu.Share{Card: card, Memory: gpu.Memory(of.memory), Cores: gpu.Cores(of.cores), Containers: int32(of.containers)})
	}
	return where
}

func amountOf(share gpu.Share) amount {
	return amount{int64(share.Memory), int64(share.Cores), int64(share.Containers), 0}
}

func sum(where gpu.Placement, index int) (sum amount) {
	for _, share := range where {
		if share.Card == index {
			sum = sum.plus(amountOf(share))
		}
	}
	return sum
}

// used returns the sum of the allocations of a card.
func (m *model) used(node string, index int) (used amount) {
	for _, uid := range m.uids(node) {
		used = used.plus(sum(m.allocations[uid].Placement, index))
	}
	return used
}

// unlimited is more containers than there are.
const unlimited = 1 << 20

func size(c gpu.Card) amount {
	return amount{int64(c.Memory), 100, int64(cmp.Or(c.MaxContainers, unlimited)), int64(min(len(c.RDMAPorts), 1))}
}

// keptShare is a share of the awaited reservation.
type keptShare struct {
	pod  gpu.Pod
	node string
	on   gpu.Placement
}

// keptOn returns what the awaited reservation has on a node. If counting is true, the shares of pods with an allocation don't count.
func (m *model) keptOn(node string, counting bool) (all gpu.Placement) {
	for uid, share := range m.kept {
		if share.node == node && (!counting || m.allocations[uid] == nil) {
			all = append(all, share.on...)
		}
	}
	return all
}

// counting returns the nodes of the shares that count, by pod.
func (m *model) counting() map[gpu.PodUID]string {
	out := map[gpu.PodUID]string{}
	for uid, share := range m.kept {
		if m.allocations[uid] == nil {
			out[uid] = share.node
		}
	}
	return out
}

// left returns what a card has free, negative if it is over-full. If kept is true, the awaited reservation counts.
func (m *model) left(node string, c gpu.Card, kept bool) amount {
	left := size(c).minus(m.used(node, c.Index))
	if kept {
		left = left.minus(sum(m.keptOn(node, true), c.Index))
	}
	if c.MaxContainers == 0 {
		left.containers = unlimited
	}
	return left
}

// room is what a card has free in the scarcer dimension.
func room(c gpu.Card, left amount) int64 {
	left = left.some()
	return min(left.memory, int64(c.Memory)*left.cores/100)
}

// sorted returns the indexes of the n cards with the least (or most) room, or none if there are fewer cards.
func sorted(rooms map[int]int64, n int, most bool, first func(int) bool) []int {
	cards := slices.SortedFunc(maps.Keys(rooms), func(a, b int) int {
		order := cmp.Compare(rooms[a], rooms[b])
		if most {
			order = -order
		}
		preference := 0
		if first(a) != first(b) {
			preference = map[bool]int{true: -1, false: 1}[first(a)]
		}
		return cmp.Or(order, preference, a-b)
	})
	if len(cards) < n {
		return nil
	}
	return cards[:n]
}

// seesKept reports whether the awaited reservation counts for the pod.
func (m *model) seesKept(pod gpu.Pod) bool {
	_, mine := m.kept[pod.UID]
	return !mine && pod.Priority <= m.keptPriority
}

// accepts returns the reason why no pod like this can be placed on the node, Fits if there is none.
func (m *model) accepts(node string, pod gpu.Pod) reasons.Reason {
	nodeSpec := m.specs[node]
	switch {
	case len(nodeSpec.Cards) == 0 && !nodeSpec.WholeCards:
		return reasons.NotShared
	case nodeSpec.WholeCards:
		return reasons.WholeCards
	case pod.Cards > 1 && nodeSpec.SeveralCards != reasons.Fits:
		return nodeSpec.SeveralCards
	case pod.Cores > 0 && nodeSpec.Cores != reasons.Fits:
		return nodeSpec.Cores
	case pod.SharedMemory && nodeSpec.SharedMemory != reasons.Fits:
		return nodeSpec.SharedMemory
	case pod.RDMA == gpu.RDMARequired && nodeSpec.RDMA != reasons.Fits:
		return nodeSpec.RDMA
	case pod.Limits == gpu.Limits{}:
		return reasons.Fits
	case nodeSpec.Limits.Refused != reasons.Fits:
		return nodeSpec.Limits.Refused
	case gpu.Unit(pod.Limits.MaxUnit) < nodeSpec.Limits.Unit/gpu.MiB:
		return reasons.LimitBelowRequest
	case uint64(pod.Limits.Largest) > nodeSpec.Limits.Card>>20:
		return reasons.LimitTooLarge
	}
	return reasons.Fits
}

// await reserves shares of the cards on which the requests fit if the fewest of the pods that were placed after oldest have ended, or nothing.
func (m *model) await(requests []ledger.Request, priority int32, oldest time.Time) bool {
	m.kept, m.keptPriority, m.keptRequests = map[gpu.PodUID]keptShare{}, priority, requests
	for _, request := range requests {
		if m.allocations[request.Pod.UID] != nil {
			continue
		}
		share, n := each(request.Pod)
		best, cards, latest := "", []int(nil), oldest
		for _, node := range request.Nodes {
			if m.accepts(node, request.Pod) != reasons.Fits {
				continue
			}
			since := map[int]time.Time{}
			for _, c := range m.specs[node].Cards {
				if at := m.freeable(node, c, share); c.Unhealthy == "" && at.After(oldest) {
					since[c.Index] = at
				}
			}
			chosen := slices.SortedFunc(maps.Keys(since), func(a, b int) int { return cmp.Or(since[b].Compare(since[a]), a-b) })
			if len(chosen) >= n && since[chosen[n-1]].After(latest) {
				best, cards, latest = node, chosen[:n], since[chosen[n-1]]
			}
		}
		if best == "" {
			m.kept = nil
			return false
		}
		m.kept[request.Pod.UID] = keptShare{pod: request.Pod, node: best, on: on(cards, share)}
	}
	return true
}

func (m *model) placesOn(node string) []keptShare {
	if m.places == nil {
		return nil
	}
	return m.places(node)
}

// freeable returns the latest time for which the card would have room for the share, beside the reservation, if all pods that were placed then or
// later had ended; zero if there is none. A pod that isn't bound was placed last.
func (m *model) freeable(node string, c gpu.Card, share amount) time.Time {
	begun := func(a *allocation) time.Time {
		if a.State == ledger.Assumed {
			return lastOfAll.Add(-time.Second)
		}
		return a.AssumeTime
	}
	times := []time.Time{lastOfAll}
	for _, uid := range m.uids(node) {
		times = append(times, begun(m.allocations[uid]))
	}
	slices.SortFunc(times, func(a, b time.Time) int { return b.Compare(a) })
	for _, at := range times {
		left := size(c).minus(sum(m.keptOn(node, false), c.Index))
		for _, uid := range m.uids(node) {
			if a := m.allocations[uid]; begun(a).Before(at) {
				left = left.minus(sum(a.Placement, c.Index))
			}
		}
		for _, place := range m.placesOn(node) {
			left = left.minus(sum(place.on, c.Index))
		}
		if left.some().atLeast(share) {
			return at
		}
	}
	return time.Time{}
}

// lastOfAll is later than all times of a test.
var lastOfAll = time.Unix(1<<33, 0)

// idle returns the part of all memory that the awaited reservation keeps, and that is free.
func (m *model) idle() float64 {
	var idle, all float64
	for node, nodeSpec := range m.specs {
		bytes := func(memory gpu.Memory) float64 {
			return float64(gpu.UnitOf(nodeSpec.Unit, nodeSpec.Cards).Bytes(memory))
		}
		for _, c := range nodeSpec.Cards {
			if !nodeSpec.WholeCards {
				idle += bytes(gpu.Memory(min(sum(m.keptOn(node, true), c.Index).memory, m.left(node, c, false).some().memory)))
				all += bytes(c.Memory)
			}
		}
	}
	return idle / max(all, 1)
}

func (m *model) keptItem() ledger.Item {
	item := testItem
	item.Priority = m.keptPriority
	return item
}

// usable reports whether each pod of the awaited reservation could be placed on its cards if these were empty.
func (m *model) usable() bool {
	for uid, kept := range m.kept {
		if m.allocations[uid] != nil {
			continue
		}
		if m.accepts(kept.node, kept.pod) != reasons.Fits || len(kept.on) == 0 {
			return false
		}
		needs, _ := each(kept.pod)
		for _, share := range kept.on {
			i := slices.IndexFunc(m.specs[kept.node].Cards, func(c gpu.Card) bool { return c.Index == share.Card && c.Unhealthy == "" })
			if i < 0 || size(m.specs[kept.node].Cards[i]).near < needs.near || m.specs[kept.node].Cards[i].Memory < share.Memory {
				return false
			}
		}
	}
	for _, request := range m.keptRequests {
		if _, kept := m.kept[request.Pod.UID]; !kept && m.allocations[request.Pod.UID] == nil {
			return false // It was allocated when the reservation was made.
		}
	}
	return m.kept != nil
}

// freeNow returns the nodes of the awaited reservation if all that it has is free.
func (m *model) freeNow() (nodes []string) {
	for uid, kept := range m.kept {
		if m.allocations[uid] != nil {
			continue
		}
		for _, share := range kept.on {
			i := slices.IndexFunc(m.specs[kept.node].Cards, func(c gpu.Card) bool { return c.Index == share.Card })
			if !m.left(kept.node, m.specs[kept.node].Cards[i], false).atLeast(sum(m.keptOn(kept.node, true), share.Card)) {
				return nil
			}
		}
		nodes = append(nodes, kept.node)
	}
	return nodes
}

// endAwaited ends the awaited reservation and returns the nodes on which it counted.
func (m *model) endAwaited() (nodes []string) {
	for uid, kept := range m.kept {
		if m.allocations[uid] == nil {
			nodes = append(nodes, kept.node)
		}
	}
	m.kept = nil
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// best returns the healthy cards on which the pod fits that have the least (or most) room, by index; none if there are too few.
func (m *model) best(node string, pod gpu.Pod, most, kept bool) []int {
	share, n := each(pod)
	rooms := map[int]int64{}
	for _, c := range m.specs[node].Cards {
		if left := m.left(node, c, kept); c.Unhealthy == "" && left.some().atLeast(share) {
			rooms[c.Index] = room(c, left)
		}
	}
	cards := sorted(rooms, n, most, func(index int) bool {
		i := slices.IndexFunc(m.specs[node].Cards, func(c gpu.Card) bool { return c.Index == index })
		return pod.RDMA == gpu.RDMAPreferred && m.specs[node].Cards[i].RDMAPorts != ""
	})
	slices.Sort(cards)
	return cards
}

func (m *model) reason(node string, pod gpu.Pod, kept bool) reasons.Reason {
	nodeSpec := m.specs[node]
	share, n := each(pod)
	large, healthy, roomy, free := 0, 0, 0, amount{}
	for _, c := range nodeSpec.Cards {
		if size(c).atLeast(share) {
			large++
			if c.Unhealthy == "" {
				healthy++
			}
		}
		if c.Unhealthy == "" {
			left := m.left(node, c, kept).some()
			free = free.plus(left)
			if size(c).atLeast(share) && left.atLeast(share.times(1)) {
				roomy++
			}
		}
	}
	reason := m.accepts(node, pod)
	switch {
	case reason != reasons.Fits:
		return reason
	case len(nodeSpec.Cards) == 0:
		return reasons.NotShared
	case m.best(node, pod, false, kept) != nil:
		return reasons.Fits
	case roomy >= n:
		return reasons.Crowded
	case large < n:
		return reasons.TooLarge
	case healthy < n:
		return reasons.Unhealthy
	case free.atLeast(share.times(n)):
		return reasons.Fragmented
	}
	return reasons.Full
}

func (m *model) check(pod gpu.Pod, node string) reasons.Reason {
	if h := m.allocations[pod.UID]; h != nil && h.Node == node {
		return reasons.Fits
	} else if h != nil {
		return reasons.Elsewhere
	}
	reason := m.reason(node, pod, m.seesKept(pod))
	if (reason == reasons.Full || reason == reasons.Fragmented || reason == reasons.Crowded) && m.reason(node, pod, false) == reasons.Fits {
		return reasons.Reserved
	}
	return reason
}

// presume computes the presumed allocations of a node again: those that still fit keep their cards, the others get a
// card.
func (m *model) presume(node string) {
	before := map[gpu.PodUID]gpu.Placement{}
	for _, uid := range m.uids(node) {
		if h := m.allocations[uid]; h.Presumed {
			before[uid], h.Placement = h.Placement, nil
		}
	}
	for _, uid := range slices.Sorted(maps.Keys(before)) {
		fits := len(before[uid]) > 0
		for _, share := range before[uid] {
			i := slices.IndexFunc(m.specs[node].Cards, func(c gpu.Card) bool { return c.Index == share.Card })
			fits = fits && i >= 0 && m.left(node, m.specs[node].Cards[i], false).some().atLeast(amountOf(share))
		}
		if fits {
			m.allocations[uid].Placement = before[uid]
		}
	}
	for _, uid := range slices.Sorted(maps.Keys(before)) {
		h := m.allocations[uid]
		if len(h.Placement) > 0 {
			continue
		}
		pod := h.Pod
		if m.specs[node].SeveralCards != reasons.Fits {
			pod.Cards = 1 // The node gives it one card.
		}
		if m.specs[node].Cores != reasons.Fits {
			pod.Cores = 0
		}
		if m.specs[node].RDMA != reasons.Fits {
			pod.RDMA = gpu.RDMANone
		}
		share, _ := each(pod)
		h.Placement = on(m.best(node, pod, false, false), share)
	}
}

// free returns what each card has free by node.
func (m *model) free() map[string]map[int]amount {
	free := map[string]map[int]amount{}
	for node, nodeSpec := range m.specs {
		free[node] = map[int]amount{}
		for _, c := range nodeSpec.Cards {
			if c.Unhealthy == "" && !nodeSpec.WholeCards {
				free[node][c.Index] = m.left(node, c, false).some()
			}
		}
	}
	return free
}

// grown returns the nodes on which a card with free memory has more free than before.
func (m *model) grown(before map[string]map[int]amount) []string {
	var grown []string
	for node, cards := range m.free() {
		for index, free := range cards {
			if free.memory > 0 && !before[node][index].atLeast(free) {
				grown = append(grown, node)
				break
			}
		}
	}
	slices.Sort(grown)
	return grown
}

// nodes returns the model's state in the form of Ledger.Nodes.
func (m *model) nodes() []ledger.Node {
	names := slices.Collect(maps.Keys(m.specs))
	for _, h := range m.allocations {
		names = append(names, h.Node)
	}
	slices.Sort(names)
	var nodes []ledger.Node
	for _, name := range slices.Compact(names) {
		nodeSpec, known := m.specs[name]
		n := ledger.Node{Name: name, Gone: !known, NodeSpec: nodeSpec, Allocations: []ledger.Allocation{}}
		for _, c := range n.Cards {
			used := m.used(name, c.Index)
			n.Used, n.UsedCores = append(n.Used, gpu.Memory(used.memory)), append(n.UsedCores, gpu.Cores(used.cores))
			n.Containers = append(n.Containers, int32(used.containers))
		}
		for _, uid := range m.uids(name) { // UIDs have the same order as names here.
			n.Allocations = append(n.Allocations, m.allocations[uid].Allocation)
		}
		nodes = append(nodes, n)
	}
	return nodes
}

// simulation runs the same random operations on the ledger and on the model.
type simulation struct {
	random  *rand.Rand
	fixture *fixture
	model   *model
	pods    []gpu.Pod
	nodes   []string
	clock   time.Time
	// ended are the nodes of an awaited reservation that the last operation ended, or the node that it made accept more pods.
	ended []string
}

// step runs one operation. It returns a description and the results of the ledger and of the model.
func (s *simulation) step() (operation string, got, want any) {
	pod, node := s.pods[s.random.IntN(len(s.pods))], s.nodes[s.random.IntN(len(s.nodes))]
	s.clock = s.clock.Add(time.Second)
	before := s.model.allocations[pod.UID]
	s.ended = nil
	switch n := s.random.IntN(106); {
	case n < 35:
		policy := []placement.Policy{placement.Binpack, placement.Spread}[s.random.IntN(2)]
		got, err := s.fixture.Reserve(node, pod, policy, s.clock)
		return fmt.Sprintf("Reserve(%s, %s of %d, %s)", node, pod, pod.Request, policy),
			[]any{got, err}, s.modelReserve(node, pod, policy)
	case n < 45:
		if before == nil {
			return "nothing", nil, nil
		}
		node, where := before.Node, before.Placement
		s.fixture.SetBound(node, pod, where, s.clock)
		s.modelSetBound(node, pod, where)
		return fmt.Sprintf("SetBound(%s, %s of %d, its allocation %v)", node, pod, pod.Request, where), nil, nil
	case n < 55:
		may := before != nil && before.State == ledger.Assumed
		if may {
			s.modelRemove(pod.UID)
		}
		return fmt.Sprintf("Release(%s)", pod), s.fixture.Release(pod.UID), may
	case n < 65:
		s.modelRemove(pod.UID)
		return fmt.Sprintf("Remove(%s)", pod), s.fixture.Remove(pod.UID), before != nil
	case n < 85:
		where := s.where(pod)
		s.fixture.SetBound(node, pod, where, s.clock)
		s.modelSetBound(node, pod, where)
		return fmt.Sprintf("SetBound(%s, %s of %d, %v)", node, pod, pod.Request, where), nil, nil
	case n < 90:
		s.fixture.DeleteNode(node)
		delete(s.model.specs, node)
		s.model.presume(node)
		return fmt.Sprintf("DeleteNode(%s)", node), nil, nil
	case n < 93:
		members, priority := s.pods[:1+s.random.IntN(4)], int32(s.random.IntN(2)-1)
		var requests []ledger.Request
		for _, member := range members {
			requests = append(requests, ledger.Request{Pod: member, Nodes: s.nodes})
		}
		s.ended = s.model.endAwaited()
		oldest := s.clock.Add(-time.Duration(s.random.IntN(100)) * time.Second)
		got, want := s.fixture.await(requests, priority, oldest), s.model.await(requests, priority, oldest)
		s.ended = append(s.ended, s.model.freeNow()...)
		return fmt.Sprintf("Await(%v, %d, %v)", members, priority, oldest), got, want
	case n < 96:
		s.fixture.End(ledger.Queued, testItem.ID)
		s.ended = s.model.endAwaited()
		return "End(Queued)", nil, nil
	default:
		nodeSpec := s.nodeSpec()
		shuffled := nodeSpec
		shuffled.Cards = slices.Clone(nodeSpec.Cards)
		s.random.Shuffle(len(shuffled.Cards), func(i, j int) {
			shuffled.Cards[i], shuffled.Cards[j] = shuffled.Cards[j], shuffled.Cards[i]
		})
		former := s.model.specs[node]
		s.fixture.SetNode(node, shuffled)
		s.model.specs[node] = nodeSpec
		s.model.presume(node)
		more := func(now, before reasons.Reason) bool { return now == reasons.Fits && before != reasons.Fits }
		if more(nodeSpec.SeveralCards, former.SeveralCards) || more(nodeSpec.Cores, former.Cores) || more(nodeSpec.SharedMemory, former.SharedMemory) || more(nodeSpec.RDMA, former.RDMA) ||
			more(nodeSpec.Limits.Refused, former.Limits.Refused) || nodeSpec.Limits.Card > former.Limits.Card || nodeSpec.Limits.Unit != former.Limits.Unit {
			for _, free := range s.model.free()[node] {
				if free.memory > 0 {
					s.ended = []string{node}
				}
			}
		}
		return fmt.Sprintf("SetNode(%s, %v)", node, nodeSpec), nil, nil
	}
}

func (s *simulation) modelReserve(node string, pod gpu.Pod, policy placement.Policy) []any {
	if h := s.model.allocations[pod.UID]; h != nil && h.Node == node {
		return []any{h.Allocation, error(nil)}
	}
	if reason := s.model.check(pod, node); reason != reasons.Fits {
		return []any{ledger.Allocation{}, error(&ledger.NoRoomError{Node: node, Reason: reason})}
	}
	share, _ := each(pod)
	cards := s.model.best(node, pod, policy.String() == "spread", s.model.seesKept(pod))
	h := ledger.Allocation{Pod: pod, Placement: on(cards, share), AssumeTime: s.clock}
	s.model.allocations[pod.UID] = &allocation{node, h}
	return []any{h, error(nil)}
}

func (s *simulation) modelSetBound(node string, pod gpu.Pod, where gpu.Placement) {
	h := ledger.Allocation{Pod: pod, State: ledger.Bound, Placement: where, Presumed: len(where) == 0, AssumeTime: s.clock}
	switch before := s.model.allocations[pod.UID]; {
	case before == nil:
	case before.Node != node:
		s.modelRemove(pod.UID)
	case h.Presumed:
		h.Placement = before.Placement
	}
	s.model.allocations[pod.UID] = &allocation{node, h}
	s.model.presume(node)
}

func (s *simulation) modelRemove(uid gpu.PodUID) {
	if h := s.model.allocations[uid]; h != nil {
		delete(s.model.allocations, uid)
		s.model.presume(h.Node)
	}
}

// where returns a random content of annotations: mostly as many cards as the pod asks for, sometimes none, two cards with different
// shares, or an unknown one.
func (s *simulation) where(pod gpu.Pod) gpu.Placement {
	switch s.random.IntN(6) {
	case 0, 1:
		return nil
	case 2:
		if pod.Request < 2 {
			return nil // A share of zero doesn't occur: package protocol drops it.
		}
		half := gpu.Share{Memory: pod.Request / 2, Cores: (pod.Cores + 1) / 2, Containers: max(pod.Containers, 1)}
		other := half
		other.Card, other.Memory = 2, pod.Request-half.Memory
		return gpu.Placement{half, other}
	}
	share, n := each(pod)
	return on(s.random.Perm(5)[:n], share)
}

// nodeSpec returns a random node with up to four cards, with gaps between their indexes.
func (s *simulation) nodeSpec() ledger.NodeSpec {
	nodeSpec := ledger.NodeSpec{Unit: []gpu.Unit{gpu.MiB, gpu.GiB}[s.random.IntN(2)], WholeCards: s.random.IntN(10) == 0}
	nodeSpec.SeveralCards = []reasons.Reason{reasons.Fits, reasons.Fits, reasons.Fits, reasons.OldForCards, reasons.OneCardOnly}[s.random.IntN(5)]
	nodeSpec.Cores = []reasons.Reason{reasons.Fits, reasons.Fits, reasons.Fits, reasons.OldForCores}[s.random.IntN(4)]
	nodeSpec.RDMA = []reasons.Reason{reasons.Fits, reasons.Fits, reasons.Fits, reasons.OldForRDMA, reasons.NoAdapter}[s.random.IntN(5)]
	if s.random.IntN(4) == 0 {
		nodeSpec.SharedMemory = reasons.NoOwnSharedMemory
	}
	if s.random.IntN(4) > 0 {
		nodeSpec.Limits = placement.Limits{Unit: nodeSpec.Unit, Card: 16 << 30}
		nodeSpec.Limits.Refused = []reasons.Reason{reasons.Fits, reasons.Fits, reasons.OldForLimits, reasons.NoLimitAboveRequest}[s.random.IntN(4)]
	}
	for index := range 4 {
		if s.random.IntN(4) == 0 {
			continue
		}
		card := gpu.Card{Index: index, Memory: gpu.Memory(8 + 4*s.random.IntN(3))}
		if s.random.IntN(6) == 0 {
			card.Unhealthy = "Xid 79"
		}
		if s.random.IntN(3) == 0 {
			card.MaxContainers = 1 + s.random.IntN(5)
		}
		if s.random.IntN(2) == 0 {
			card.RDMAPorts = "mlx5_0:1"
		}
		nodeSpec.Cards = append(nodeSpec.Cards, card)
	}
	return nodeSpec
}

// pod returns a random pod: a third asks for several cards, a third for cores, a third has several containers, a quarter has its own shared
// memory, a quarter prefers cards near an adapter, and a quarter needs them. Some can't be divided evenly, as those that were bound without the
// extender.
func (s *simulation) pod(name string) gpu.Pod {
	p := pod(name, gpu.Memory(1+s.random.IntN(13)))
	if s.random.IntN(6) == 0 {
		p.Limits = gpu.Limits{Largest: uint32(1+s.random.IntN(17)) << 10, MaxUnit: []uint32{512, 1024}[s.random.IntN(2)]}
	}
	if s.random.IntN(3) == 0 {
		p.Cards = 2 + s.random.IntN(2)
		p.Request *= gpu.Memory(s.random.IntN(p.Cards) + 1)
	}
	if s.random.IntN(3) == 0 {
		p.Cores = gpu.Cores((1 + s.random.IntN(95)) * p.NumCards())
	}
	if s.random.IntN(3) == 0 {
		p.Containers = int32(2 + s.random.IntN(2))
	}
	p.SharedMemory = s.random.IntN(4) == 0
	p.RDMA = []gpu.RDMA{gpu.RDMANone, gpu.RDMANone, gpu.RDMAPreferred, gpu.RDMARequired}[s.random.IntN(4)]
	return p
}

// TestSimulation compares the ledger with the model after each of many random operations: results, nodes, calls of freed,
// the reasons of ForEachFit and Rank, Lookup, and the copy of a reader that follows the changes. It has no cluster: the simulation of one, in package
// scheduling, trusts the ledger in what fits.
func TestSimulation(t *testing.T) {
	seeds, steps := uint64(60), 200
	if testing.Short() {
		seeds = 15
	}
	reached := map[reasons.Reason]int{}
	presumed, over, overCores, overContainers, freed := 0, 0, 0, 0, 0
	for seed := range seeds {
		s := &simulation{
			random: rand.New(rand.NewPCG(seed, 1)), fixture: newFixture(t), model: newModel(), nodes: []string{"n0", "n1", "n2"}, clock: at,
		}
		for i := range 14 {
			s.pods = append(s.pods, s.pod(fmt.Sprintf("p%02d", i)))
		}
		reader, asked := &follower{}, append(s.nodes, "n9")
		var history []string
		for range steps {
			before, counting := s.model.free(), s.model.counting()
			operation, got, want := s.step()
			history = append(history, operation)
			compare := func(what string, want, got any) {
				t.Helper()
				if reflect.DeepEqual(want, got) {
					return // cmp is much slower and is only needed for the message.
				}
				if diff := gocmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
					t.Fatalf("seed %d, after %d steps, the last of them\n%s\n%s (-model +ledger):\n%s",
						seed, len(history), history[max(0, len(history)-12):], what, diff)
				}
			}
			compare("result", want, got)
			nodes := s.model.nodes()
			compare("nodes", nodes, s.fixture.Nodes())
			if s.random.IntN(3) > 0 { // Otherwise there are several changes at once.
				copied, _ := reader.follow(s.fixture.Ledger)
				compare("the reader's copy", nodes, copied)
			}
			for uid, node := range counting {
				if s.model.allocations[uid] != nil {
					s.ended = append(s.ended, node) // The share doesn't count any more.
				}
			}
			freedNodes := slices.Compact(s.fixture.takeFreed()) // A node can be reported twice.
			compare("AwaitedIdle", s.model.idle(), s.fixture.AwaitedIdle()[testItem.ID])
			compare("AwaitedUsable", s.model.usable(), s.fixture.AwaitedUsable(s.model.keptItem(), s.model.keptRequests))
			for _, node := range append(s.model.grown(before), s.ended...) {
				compare(node+" is freed", true, slices.Contains(freedNodes, node))
			}
			freed += len(freedNodes)

			asking := s.pods[s.random.IntN(len(s.pods))]
			if s.random.IntN(2) == 0 {
				asking.UID, asking.Name = "unknown", "unknown"
			}
			var results []reasons.Reason
			for _, node := range asked {
				results = append(results, s.model.check(asking, node))
				reached[results[len(results)-1]]++
			}
			compare("Check", results, s.fixture.check(asking, asked...))
			compare("Rank", results, s.fixture.rank(binpack, asking, asked...))
			first, fits := s.fixture.FirstFit(asking, asked)
			wantFirst, wantFits := "", slices.Contains(results, reasons.Fits)
			if wantFits {
				wantFirst = asked[slices.Index(results, reasons.Fits)]
			}
			compare("FirstFit", []any{wantFirst, wantFits}, []any{first, fits})
			for _, p := range s.pods {
				node, got, found := s.fixture.Lookup(p.UID)
				compare(p.Name+" has an allocation", s.model.allocations[p.UID] != nil, found)
				if found {
					compare(p.Name, *s.model.allocations[p.UID], allocation{node, got})
				}
				if got.Presumed {
					presumed++
				}
			}
			for _, n := range nodes {
				for i, c := range n.Cards {
					if n.Used[i] > c.Memory {
						over++
					}
					if n.UsedCores[i] > 100 {
						overCores++
					}
					if most := c.MaxContainers; most > 0 && int(n.Containers[i]) > most {
						overContainers++
					}
				}
			}
		}
	}
	// The simulation must reach all reasons and special cases.
	for _, reason := range append(reasons.OfNodes(), reasons.Fits) {
		if reached[reason] == 0 && reason != reasons.ResourcesReserved { // It counts GPU memory only.
			t.Errorf("the simulation never reached %q", reason)
		}
	}
	if presumed == 0 || over == 0 || overCores == 0 || overContainers == 0 || freed == 0 {
		t.Errorf("too few special cases: %d presumed allocations, %d, %d and %d overcommitted cards, %d freed nodes", presumed, over, overCores, overContainers, freed)
	}
}
