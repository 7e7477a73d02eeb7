package preemption_test

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// TestChooseNearlyCheapest compares the result on small random nodes with an exhaustive search: there are victims if there can be any, and on most nodes
// no others would cost less.
func TestChooseNearlyCheapest(t *testing.T) {
	freed, near, cheapest := map[int]int{}, 0, map[int]int{} // By the number of cards; those for pods that require an adapter.
	for seed := range uint64(10_000) {
		demand, best := checkChoice(t, seed, 0)
		freed[demand.Cards]++
		if best {
			cheapest[demand.Cards]++
		}
		if demand.RDMA == gpu.RDMARequired {
			near++
		}
	}
	for cards, least := range map[int]float64{1: 0.98, 2: 0.94, 3: 0.94} {
		if part := float64(cheapest[cards]) / float64(freed[cards]); part < least {
			t.Errorf("for %d cards, %.3f of the choices are the cheapest, want %.2f", cards, part, least)
		}
	}
	if freed[1] < 2000 || freed[2] < 100 || freed[3] < 30 {
		t.Errorf("nodes whose cards could be freed, by their number: %v; the random nodes are not useful", freed)
	}
	if near < 1000 {
		t.Errorf("%d nodes whose cards near an adapter could be freed; the random nodes are not useful", near)
	}
}

// TestChooseOfMany checks nodes with too many pods for an exhaustive search: no victim may be superfluous.
func TestChooseOfMany(t *testing.T) {
	for seed := range uint64(300) {
		n, request := randomNode(rand.New(rand.NewPCG(seed, 2)), 60, 20)
		if got, ok := preemption.Choose(n, request); ok && placement.Fit(n.Cards, request.Demand) != reasons.Fits {
			checkEnough(t, n, request, got)
		}
	}
}

func FuzzChoose(f *testing.F) {
	f.Add(uint64(1), uint64(1))
	f.Fuzz(func(t *testing.T, seed, stream uint64) { checkChoice(t, seed, stream) })
}

// checkChoice returns the demand for which cards of the random node were to be freed and could be, the zero value otherwise, and whether the victims are
// the cheapest.
func checkChoice(t *testing.T, seed, stream uint64) (demand gpu.Demand, best bool) {
	n, request := randomNode(rand.New(rand.NewPCG(seed, stream)), 9, 8)
	if placement.Fit(n.Cards, request.Demand) == reasons.Fits {
		return gpu.Demand{}, false
	}
	got, ok := preemption.Choose(n, request)
	want, found := cheapest(n, request)
	if ok != found {
		t.Fatalf("found: %v, want %v\nof %+v\nfor %+v", ok, found, n, request)
	}
	if !ok {
		return gpu.Demand{}, false
	}
	checkEnough(t, n, request, got)
	return request.Demand, costOf(n, maskOf(n, got.Pods)) == want
}

// checkEnough fails the test unless the victims free a card, none of them is superfluous, and their order and number of
// violations are right.
func checkEnough(t *testing.T, n preemption.Node, request preemption.Request, got preemption.Victims) {
	t.Helper()
	victims := maskOf(n, got.Pods)
	if !slices.ContainsFunc(sets(n, request), func(set []int) bool {
		return enough(n, request, victims, set) && !tooMany(n, request, victims, set)
	}) {
		t.Fatalf("%v isn't enough, or more than enough\nof %+v\nfor %+v", got.Pods, n, request)
	}
	if want := costOf(n, victims).violations; got.Violations != want {
		t.Fatalf("%v breaks %d, says %d\nof %+v\nfor %+v", got.Pods, want, got.Violations, n, request)
	}
	if !slices.IsSortedFunc(got.Pods, func(a, b gpu.PodUID) int { return int(priorityOf(n, b) - priorityOf(n, a)) }) {
		t.Fatalf("%v: the highest priority must come first\nof %+v", got.Pods, n)
	}
}

// randomNode returns a node with fewer than pods pods, each with at most largest units of memory.
func randomNode(random *rand.Rand, pods, largest int) (preemption.Node, preemption.Request) {
	size := gpu.Memory(2 * largest)
	cards := 1 + random.IntN(4)
	n := preemption.Node{Free: preemption.Amounts{int64(random.IntN(3))}}
	for i := range cards {
		n.Cards = append(n.Cards, placement.Card{Index: i, Memory: size, Used: gpu.Memory(random.IntN(3)), UsedCores: gpu.Cores(random.IntN(2) * 30), MaxContainers: 3 * random.Int32N(2), NearAdapter: random.IntN(2) == 0})
	}
	if random.IntN(2) == 0 {
		n.Budgets = []int{random.IntN(3), random.IntN(2)}
	}
	for i := range random.IntN(pods) {
		p := preemption.Pod{UID: gpu.PodUID(fmt.Sprint("p", i)), Priority: int32(random.IntN(3)), Requests: preemption.Amounts{int64(random.IntN(3))}}
		if len(n.Budgets) > 0 && random.IntN(3) > 0 {
			p.Budgets = []int{random.IntN(2)}
		}
		containers := 1 + random.Int32N(2)
		memory, cores := gpu.Memory(1+random.IntN(largest)), gpu.Cores(max(0, random.IntN(60)-30))
		for _, card := range random.Perm(cards)[:1+random.IntN(cards)*random.IntN(3)/2%cards] {
			if c := &n.Cards[card]; c.Used+memory <= size && c.UsedCores+cores <= 100 {
				c.Used, c.UsedCores, c.Containers = c.Used+memory, c.UsedCores+cores, c.Containers+containers
				p.Placement = append(p.Placement, gpu.Share{Card: card, Memory: memory, Cores: cores, Containers: containers})
			}
		}
		if p.Placement == nil || random.IntN(4) == 0 {
			p.Proposed = true
			p.MustEvict = random.IntN(8) == 0
		}
		p.Terminating = random.IntN(8) == 0
		n.Pods = append(n.Pods, p)
	}
	// The proposal must free enough of the other resources, as kube-scheduler's does.
	wanted := n.Free[0]
	for _, p := range n.Pods {
		if p.Proposed {
			wanted += p.Requests[0]
		}
	}
	demand := gpu.Demand{
		Cards: 1 + random.IntN(2)*random.IntN(3), Memory: gpu.Memory(1 + random.IntN(int(size))), Cores: gpu.Cores(max(0, random.IntN(120)-60)),
		Containers: 1 + random.Int32N(3), RDMA: []gpu.RDMA{gpu.RDMANone, gpu.RDMARequired}[random.IntN(2)],
	}
	return n, preemption.Request{Demand: demand, Resources: preemption.Amounts{int64(random.IntN(int(wanted) + 1))}}
}

// cost is the cost of a set of victims. The fields are compared in order.
type cost struct {
	violations, highest, priorities, memory, leaving int
}

func (c cost) compare(o cost) int {
	return cmp.Or(cmp.Compare(c.violations, o.violations), cmp.Compare(c.highest, o.highest), cmp.Compare(c.priorities, o.priorities),
		cmp.Compare(c.memory, o.memory), cmp.Compare(c.leaving, o.leaving))
}

// cheapest tries every set of proposed pods and of pods on the cards of a set that frees these cards.
func cheapest(n preemption.Node, request preemption.Request) (best cost, found bool) {
	for mask := range 1 << len(n.Pods) {
		for _, set := range sets(n, request) {
			if !within(n, mask, set) || !enough(n, request, mask, set) {
				continue
			}
			if c := costOf(n, mask); !found || c.compare(best) < 0 {
				best, found = c, true
			}
		}
	}
	return best, found
}

// sets returns all sets of as many cards as the request needs, near an adapter if it requires one.
func sets(n preemption.Node, request preemption.Request) (out [][]int) {
	far := func(i int) bool { return request.Demand.RDMA == gpu.RDMARequired && !n.Cards[i].NearAdapter }
	for mask := range 1 << len(n.Cards) {
		var set []int
		for i := range n.Cards {
			if mask&(1<<i) != 0 {
				set = append(set, i)
			}
		}
		if len(set) == request.Demand.Cards && !slices.ContainsFunc(set, far) {
			out = append(out, set)
		}
	}
	return out
}

// within reports whether all pods of the mask that weren't proposed are on one of the cards.
func within(n preemption.Node, mask int, cards []int) bool {
	for i, p := range n.Pods {
		onOne := slices.ContainsFunc(p.Placement, func(s gpu.Share) bool { return slices.Contains(cards, s.Card) })
		if mask&(1<<i) != 0 && !p.Proposed && !onOne {
			return false
		}
	}
	return true
}

// enough reports whether the request fits the cards without the pods of the mask, which must include all MustEvict pods.
func enough(n preemption.Node, request preemption.Request, mask int, cards []int) bool {
	free := n.Free[0]
	for i, p := range n.Pods {
		switch {
		case mask&(1<<i) != 0:
			free += p.Requests[0]
		case p.MustEvict:
			return false
		}
	}
	for _, card := range cards {
		used, usedCores, containers, most := n.Cards[card].Used, n.Cards[card].UsedCores, n.Cards[card].Containers, n.Cards[card].MaxContainers
		for i, p := range n.Pods {
			for _, share := range p.Placement {
				if share.Card == card && mask&(1<<i) != 0 {
					used, usedCores, containers = used-share.Memory, usedCores-share.Cores, containers-share.Containers
				}
			}
		}
		if n.Cards[card].Memory-used < request.Demand.Memory || 100-usedCores < request.Demand.Cores || most > 0 && most-containers < request.Demand.Containers {
			return false
		}
	}
	return free >= request.Resources[0]
}

// tooMany reports whether one pod of the mask is superfluous.
func tooMany(n preemption.Node, request preemption.Request, mask int, cards []int) bool {
	for i := range n.Pods {
		if mask&(1<<i) != 0 && enough(n, request, mask&^(1<<i), cards) {
			return true
		}
	}
	return false
}

func costOf(n preemption.Node, mask int) cost {
	c, allowed := cost{highest: -1}, slices.Clone(n.Budgets)
	for i, p := range n.Pods {
		switch {
		case mask&(1<<i) == 0:
			continue
		case p.Terminating:
			c.leaving++
			continue
		}
		c.highest = max(c.highest, int(p.Priority))
		c.priorities += int(p.Priority) - math.MinInt32 + 1
		c.memory += int(p.Placement.Total())
		for _, b := range p.Budgets {
			if allowed[b]--; allowed[b] < 0 {
				c.violations++
			}
		}
	}
	return c
}

func maskOf(n preemption.Node, uids []gpu.PodUID) (mask int) {
	for i, p := range n.Pods {
		if slices.Contains(uids, p.UID) {
			mask |= 1 << i
		}
	}
	return mask
}

func priorityOf(n preemption.Node, uid gpu.PodUID) int32 {
	i := slices.IndexFunc(n.Pods, func(p preemption.Pod) bool { return p.UID == uid })
	return n.Pods[i].Priority
}
