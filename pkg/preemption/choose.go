package preemption

import (
	"cmp"
	"math"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// Choose returns who must leave the node so that the request finds a card. false says that the node is no candidate:
// no card can be freed, or nobody needs to leave.
//
// A card that has room already needs no victims of its own; then kube-scheduler's stay as they are, chosen for some
// other resource. That also ends every attempt: whatever was misjudged when the card was freed, the next round leaves to
// the scheduler.
//
// Otherwise every card is tried, and the cheapest plan wins by kube-scheduler's own order between nodes
// (k8s.io/kubernetes pkg/scheduler/framework/preemption, pickOneNodeForPreemption): fewest violated budgets, then the
// lowest highest priority, then the smallest sum of priorities, which mostly means fewest victims; then the least GPU
// memory, then the lower card index.
func Choose(node Node, request Request) (Victims, bool) {
	if placement.Fit(node.Cards, request.Memory) == placement.Fits {
		return node.proposal()
	}
	best := node.cheapest(request)
	if best == nil {
		return Victims{}, false
	}
	return best.victims(), true
}

// cheapest returns the cheapest plan that frees a card, or nil.
func (n Node) cheapest(request Request) (best *plan) {
	for i := range n.Cards {
		card := &n.Cards[i]
		if card.Unhealthy || card.Memory < request.Memory {
			continue
		}
		for _, tie := range ties {
			if p := n.clear(card, request, tie); p != nil && (best == nil || p.compare(best) < 0) {
				best = p
			}
		}
	}
	return best
}

// proposal is what kube-scheduler proposed, untouched.
func (n Node) proposal() (Victims, bool) {
	out := Victims{Violations: n.Violations}
	for _, p := range n.Pods {
		if p.Proposed {
			out.Pods = append(out.Pods, p.UID)
		}
	}
	return out, len(out.Pods) > 0
}

// ties are the orders in which pods of one priority are let stay: no single one finds the fewest and the smallest.
var ties = []func(a, b *candidate) int{
	func(a, b *candidate) int { return cmp.Compare(a.holds, b.holds) }, // Small ones first: few victims.
	func(a, b *candidate) int { return cmp.Compare(b.holds, a.holds) }, // Large ones first: little memory.
}

// candidate is a pod with what it holds of the card in question.
type candidate struct {
	*Pod
	holds    gpu.Memory
	violates bool
}

// clear plans how to free a card: at first everybody in question goes, then one after the other is let stay where that
// still leaves room. It is kube-scheduler's own way (plugins/defaultpreemption, SelectVictimsOnNode), with a card for
// the node. nil says that the card can't be freed.
func (n Node) clear(card *placement.Card, request Request, tie func(a, b *candidate) int) *plan {
	pool := n.pool(card)
	slices.SortFunc(pool, func(a, b *candidate) int {
		return cmp.Or(cmp.Compare(b.Priority, a.Priority), tie(a, b), cmp.Compare(a.UID, b.UID))
	})

	used, free := card.Used, slices.Clone(n.Free)
	for _, c := range pool {
		used = used.Sub(c.holds)
		free.add(c.Takes)
	}
	if card.Memory.Sub(used) < request.Memory {
		return nil
	}
	// Where our books say that not even all of them would be enough, kube-scheduler knows something that we don't.
	known := free.cover(request.Others, nil)

	n.markViolations(pool)
	out := &plan{card: card.Index}
	// Those whose eviction breaks a budget are the first to stay, those that leave anyway the last.
	slices.SortStableFunc(pool, func(a, b *candidate) int {
		return cmp.Or(compareBool(a.Leaving, b.Leaving), compareBool(b.violates, a.violates))
	})
	for _, c := range pool {
		bound := c.Fixed || c.Proposed && !known
		if !bound && card.Memory.Sub(used.Add(c.holds)) >= request.Memory && (!known || free.cover(request.Others, c.Takes)) {
			used = used.Add(c.holds)
			free.sub(c.Takes)
			continue
		}
		out.pods = append(out.pods, c)
	}
	out.settle(n)
	return out
}

// pool is everybody whose going could help to free the card or was proposed.
func (n Node) pool(card *placement.Card) []*candidate {
	var pool []*candidate
	for i := range n.Pods {
		c := &candidate{Pod: &n.Pods[i]}
		for _, share := range c.Where {
			if share.Card == card.Index {
				c.holds = c.holds.Add(share.Memory)
			}
		}
		if c.holds > 0 || c.Proposed {
			pool = append(pool, c)
		}
	}
	return pool
}

// markViolations finds those whose eviction would break a budget, were all of them evicted: first those that go in any
// case, then the others in the order in which they are likely to go, which is the pool's from its end.
func (n Node) markViolations(pool []*candidate) {
	if len(n.Budgets) == 0 {
		return
	}
	allowed := slices.Clone(n.Budgets)
	for _, fixed := range []bool{true, false} {
		for _, c := range slices.Backward(pool) {
			if c.Fixed == fixed && !c.Leaving {
				c.violates = spend(allowed, c.Budgets)
			}
		}
	}
}

// spend takes one eviction off each budget, and says whether one didn't allow it.
func spend(allowed, budgets []int) (violates bool) {
	for _, i := range budgets {
		allowed[i]--
		violates = violates || allowed[i] < 0
	}
	return violates
}

// plan is one way to free a card, and what it costs. Pods that leave anyway cost nothing.
type plan struct {
	card int
	pods []*candidate

	violations int
	// highest is the highest priority among the victims.
	highest int64
	// priorities is the sum of the victims' priorities, each lifted above zero.
	priorities int64
	memory     gpu.Memory
}

// settle sorts the victims and adds up the costs.
func (p *plan) settle(n Node) {
	slices.SortFunc(p.pods, func(a, b *candidate) int {
		return cmp.Or(cmp.Compare(b.Priority, a.Priority), cmp.Compare(a.UID, b.UID))
	})
	p.highest = math.MinInt64
	allowed, uncounted := slices.Clone(n.Budgets), 0
	for _, c := range p.pods {
		if c.Leaving {
			continue
		}
		if spend(allowed, c.Budgets) {
			p.violations++
		}
		if c.Uncounted {
			uncounted++
		}
		p.highest = max(p.highest, int64(c.Priority))
		p.priorities += int64(c.Priority) - math.MinInt32 + 1
		for _, share := range c.Where {
			p.memory = p.memory.Add(share.Memory)
		}
	}
	p.violations += min(uncounted, n.Violations)
}

// compare is negative where p is better.
func (p *plan) compare(o *plan) int {
	return cmp.Or(p.cost(o), cmp.Compare(p.card, o.card))
}

// cost is negative where p costs less, whichever card it frees.
func (p *plan) cost(o *plan) int {
	return cmp.Or(cmp.Compare(p.violations, o.violations), cmp.Compare(p.highest, o.highest),
		cmp.Compare(p.priorities, o.priorities), cmp.Compare(p.memory, o.memory))
}

func (p *plan) victims() Victims {
	out := Victims{Violations: p.violations}
	for _, c := range p.pods {
		out.Pods = append(out.Pods, c.UID)
	}
	return out
}

func (a Amounts) add(o Amounts) {
	for i := range o {
		a[i] += o[i]
	}
}

func (a Amounts) sub(o Amounts) {
	for i := range o {
		a[i] -= o[i]
	}
}

// cover says whether a, less what is taken of it, is enough. Nobody who asks for nothing is turned away.
func (a Amounts) cover(wanted, taken Amounts) bool {
	for i, w := range wanted {
		left := a[i]
		if taken != nil {
			left -= taken[i]
		}
		if w > 0 && w > left {
			return false
		}
	}
	return true
}

// compareBool puts false first.
func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}
