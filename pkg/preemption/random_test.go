package preemption_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/preemption"
)

// TestChooseAmongAll compares random nodes with what trying every set of pods finds: whether a card can be freed at all,
// and at what cost. The lowest highest priority is found exactly where there are no budgets. The fewest violations are
// a knapsack, which kube-scheduler doesn't solve either: there it must be right but for a few.
func TestChooseAmongAll(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	found, guarded, missed := 0, 0, 0
	for range 20_000 {
		n, request := randomNode(random)
		if placement.Fit(n.Cards, request.Memory) == placement.Fits {
			continue
		}
		got, ok := preemption.Choose(n, request)
		best, want := cheapest(n, request)
		if ok != want {
			t.Fatalf("found: %v, want %v\nof %+v\nfor %+v", ok, want, n, request)
		}
		if !ok {
			continue
		}
		found++
		mask := maskOf(n, got.Pods)
		if !slices.ContainsFunc(n.Cards, func(c placement.Card) bool {
			return enough(n, request, mask, c.Index) && !tooMany(n, request, mask, c.Index)
		}) {
			t.Fatalf("%v isn't enough, or more than enough\nof %+v\nfor %+v", got.Pods, n, request)
		}
		cost := costOf(n, mask)
		if got.Violations != cost.violations {
			t.Fatalf("%v breaks %d, says %d\nof %+v\nfor %+v", got.Pods, cost.violations, got.Violations, n, request)
		}
		if request.Others[0] == 0 && len(n.Budgets) > 0 {
			guarded++
			if cost.violations != best.violations {
				missed++
			}
		}
		if len(n.Budgets) == 0 && cost.highest != best.highest {
			t.Fatalf("%v costs priority %d, want %d\nof %+v\nfor %+v", got.Pods, cost.highest, best.highest, n, request)
		}
		if !slices.IsSortedFunc(got.Pods, func(a, b gpu.PodUID) int { return int(priorityOf(n, b) - priorityOf(n, a)) }) {
			t.Fatalf("%v: the highest priority must come first\nof %+v", got.Pods, n)
		}
	}
	t.Logf("%d nodes could be helped; of %d with budgets %d could be with fewer violations", found, guarded, missed)
	if found < 5000 || guarded < 500 {
		t.Error("too few: this test shows little")
	}
	if missed*50 > guarded {
		t.Error("too often with more violations than need be")
	}
}

func randomNode(random *rand.Rand) (preemption.Node, preemption.Request) {
	const size = 16
	cards := 1 + random.IntN(3)
	n := preemption.Node{Free: preemption.Amounts{int64(random.IntN(3))}}
	for i := range cards {
		n.Cards = append(n.Cards, placement.Card{Index: i, Memory: size, Used: gpu.Memory(random.IntN(3))})
	}
	if random.IntN(2) == 0 {
		n.Budgets = []int{random.IntN(3), random.IntN(2)}
	}
	for i := range random.IntN(9) {
		p := preemption.Pod{UID: gpu.PodUID(fmt.Sprint("p", i)), Priority: int32(random.IntN(3)), Takes: preemption.Amounts{int64(random.IntN(3))}}
		if len(n.Budgets) > 0 && random.IntN(3) > 0 {
			p.Budgets = []int{random.IntN(2)}
		}
		card, memory := random.IntN(cards), gpu.Memory(1+random.IntN(8))
		if n.Cards[card].Used+memory <= size {
			n.Cards[card].Used += memory
			p.Where = gpu.On(card, memory)
		}
		if p.Where == nil || random.IntN(4) == 0 {
			p.Proposed = true
			p.Fixed = random.IntN(8) == 0
		}
		n.Pods = append(n.Pods, p)
	}
	// The proposal must be enough for the other resources, as kube-scheduler's is.
	wanted := n.Free[0]
	for _, p := range n.Pods {
		if p.Proposed {
			wanted += p.Takes[0]
		}
	}
	return n, preemption.Request{Memory: gpu.Memory(1 + random.IntN(size)), Others: preemption.Amounts{int64(random.IntN(int(wanted) + 1))}}
}

type cost struct {
	violations int
	highest    int32
}

// cheapest tries every set that consists of proposed pods and of pods on one card, which it frees.
func cheapest(n preemption.Node, request preemption.Request) (best cost, found bool) {
	for mask := range 1 << len(n.Pods) {
		for _, card := range n.Cards {
			if !within(n, mask, card.Index) || !enough(n, request, mask, card.Index) {
				continue
			}
			c := costOf(n, mask)
			if !found || c.violations < best.violations || c.violations == best.violations && c.highest < best.highest {
				best, found = c, true
			}
		}
	}
	return best, found
}

// within says whether those of the set that weren't proposed sit on the card.
func within(n preemption.Node, mask, card int) bool {
	for i, p := range n.Pods {
		if mask&(1<<i) != 0 && !p.Proposed && p.Where[0].Card != card {
			return false
		}
	}
	return true
}

// enough says whether the request fits on the card once these pods have gone, all fixed ones among them.
func enough(n preemption.Node, request preemption.Request, mask, card int) bool {
	free, used := n.Free[0], n.Cards[card].Used
	for i, p := range n.Pods {
		switch {
		case mask&(1<<i) != 0:
			free += p.Takes[0]
			for _, share := range p.Where {
				if share.Card == card {
					used -= share.Memory
				}
			}
		case p.Fixed:
			return false
		}
	}
	return free >= request.Others[0] && n.Cards[card].Memory-used >= request.Memory
}

// tooMany says whether one of the set could stay.
func tooMany(n preemption.Node, request preemption.Request, mask, card int) bool {
	for i := range n.Pods {
		if mask&(1<<i) != 0 && enough(n, request, mask&^(1<<i), card) {
			return true
		}
	}
	return false
}

func costOf(n preemption.Node, mask int) cost {
	c, allowed := cost{highest: -1}, slices.Clone(n.Budgets)
	for i, p := range n.Pods {
		if mask&(1<<i) == 0 {
			continue
		}
		c.highest = max(c.highest, p.Priority)
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
