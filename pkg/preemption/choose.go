package preemption

import (
	"cmp"
	"math"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Choose returns the victims to evict so that the request fits the node. It returns false if the node is not a
// candidate: not enough cards can be freed, or no victim is needed.
//
// If enough cards already have room, Choose returns kube-scheduler's proposal, whose victims free another resource. This
// guarantees that attempts end: once the cards are free, kube-scheduler alone decides.
//
// Otherwise Choose returns the cheapest set of pods whose end frees as many cards as the request needs, all at once. The order is the one of
// kube-scheduler between nodes (k8s.io/kubernetes pkg/scheduler/framework/preemption, pickOneNodeForPreemption): fewest violated disruption
// budgets, lowest highest priority, smallest sum of priorities (in general the fewest victims). Then follow: least GPU
// memory, fewest terminating pods, lowest card index. Once the node's share of the budget is spent, Choose returns the cheapest set that it
// has found; it always finds one if there is any.
func Choose(node Node, request Request, budget *Budget) (Victims, bool) {
	if placement.Fit(node.Cards, request.Demand) == reasons.Fits {
		return node.proposal()
	}
	best := node.cheapest(request, budget)
	if best == nil {
		return Victims{}, false
	}
	return best.victims(), true
}

// maxSets limits the sets of cards that are tried: all sets of 4 cards out of 11. On a node with more, only the first sets are tried,
// which have the card that is cheapest to free.
const maxSets = 330

// cheapest returns the cheapest plan that frees as many cards as the request needs, or nil.
func (n Node) cheapest(request Request, budget *Budget) (best *plan) {
	cards, tried := n.freeable(request, budget), 0
	var extend func(set []placement.Card, from int)
	extend = func(set []placement.Card, from int) {
		if len(set) == request.Demand.Cards {
			tried++
			best = n.cheapestOn(set, request, best, maxSteps, budget)
			return
		}
		// The cards from i on must complete the set. Otherwise the sets that are too small for the request would all be visited, which
		// maxSets doesn't limit.
		for i := from; i <= len(cards)-request.Demand.Cards+len(set) && tried < maxSets && (best == nil || !budget.spent()); i++ {
			extend(append(slices.Clip(set), cards[i]), i+1)
		}
	}
	extend(nil, 0)
	return best
}

// freeable returns the cards that can be freed for their share of the demand. If several are needed, those that are cheapest to free
// come first.
func (n Node) freeable(request Request, budget *Budget) []placement.Card {
	var cards []placement.Card
	plans := map[int]*plan{} // By index of the card.
	one := request
	one.Demand.Cards = 1
	steps := min(maxSteps, budget.share/2/max(len(n.Cards), 1)) // Half of the share is for the sets.
	for _, c := range n.Cards {
		if c.Unhealthy || c.Lacks(&request.Demand) || c.Memory < request.Demand.Memory {
			continue
		}
		if request.Demand.Cards > 1 {
			plans[c.Index] = n.cheapestOn([]placement.Card{c}, one, nil, steps, budget)
			if plans[c.Index] == nil {
				continue
			}
		}
		cards = append(cards, c)
	}
	if request.Demand.Cards > 1 {
		slices.SortStableFunc(cards, func(a, b placement.Card) int { return plans[a.Index].compareCost(plans[b.Index]) })
	}
	return cards
}

// proposal returns kube-scheduler's victims unchanged.
func (n Node) proposal() (Victims, bool) {
	out := Victims{Violations: n.Violations}
	for _, p := range n.Pods {
		if p.Proposed {
			out.Pods = append(out.Pods, p.UID)
		}
	}
	return out, len(out.Pods) > 0
}

// potentialVictim is a pod with its part of the cards that are to be freed.
type potentialVictim struct {
	*Pod
	// onCards are its shares of these cards, with their positions in place of their indexes, and memory is their sum.
	onCards  gpu.Placement
	memory   gpu.Memory
	violates bool
}

// cheapestOn returns the cheapest plan that frees all of the cards, or best if none is cheaper. Once it has a plan it stops after that number
// of steps.
func (n Node) cheapestOn(cards []placement.Card, request Request, best *plan, steps int, budget *Budget) *plan {
	budget.Spend(len(n.Pods))
	pool := n.potentialVictims(cards)
	s := search{
		node: &n, request: request, pool: pool, best: best, steps: steps, budget: budget,
		cards: slices.Clone(cards), free: slices.Clone(n.Free), allowed: slices.Clone(n.Budgets),
		plan: plan{highest: math.MinInt64},
	}
	for _, c := range cards {
		s.plan.cards = append(s.plan.cards, c.Index)
	}
	for _, c := range pool {
		s.leave(c)
	}
	if !s.room() {
		return best
	}
	s.feasible = s.free.cover(request.Resources)
	s.decide(0)
	return s.best
}

// potentialVictims returns the pods on the cards and the proposed ones, in the order in which the search tries to keep
// them: first pods whose eviction violates a budget, last terminating pods. In between, higher priority comes first, then
// less memory, to need few victims. It is kube-scheduler's order (k8s.io/kubernetes
// pkg/scheduler/framework/plugins/defaultpreemption, SelectVictimsOnNode).
func (n Node) potentialVictims(cards []placement.Card) []*potentialVictim {
	var pool []*potentialVictim
	for i := range n.Pods {
		c := &potentialVictim{Pod: &n.Pods[i]}
		for _, share := range c.Placement {
			share.Card = slices.IndexFunc(cards, func(c placement.Card) bool { return c.Index == share.Card })
			if share.Card >= 0 {
				c.onCards, c.memory = append(c.onCards, share), c.memory.Add(share.Memory)
			}
		}
		if len(c.onCards) > 0 || c.Proposed {
			pool = append(pool, c)
		}
	}
	slices.SortFunc(pool, func(a, b *potentialVictim) int {
		return cmp.Or(cmp.Compare(b.Priority, a.Priority), cmp.Compare(a.memory, b.memory), cmp.Compare(a.UID, b.UID))
	})
	n.markViolations(pool)
	slices.SortStableFunc(pool, func(a, b *potentialVictim) int {
		return cmp.Or(gpu.TrueFirst(b.Terminating, a.Terminating), gpu.TrueFirst(a.violates, b.violates))
	})
	return pool
}

// markViolations marks the pods whose eviction would violate a budget if the whole pool were evicted. It counts the pods
// that must be evicted first, then the others in the order in which they are likely to be evicted: the pool backwards.
func (n Node) markViolations(pool []*potentialVictim) {
	if len(n.Budgets) == 0 {
		return
	}
	allowed := slices.Clone(n.Budgets)
	for _, fixed := range []bool{true, false} {
		for _, c := range slices.Backward(pool) {
			if c.MustEvict == fixed && !c.Terminating {
				c.violates = spend(allowed, c.Budgets)
			}
		}
	}
}

// spend subtracts one eviction from each budget. It reports whether this violates one.
func spend(allowed, budgets []int) (violates bool) {
	for _, i := range budgets {
		allowed[i]--
		violates = violates || allowed[i] < 0
	}
	return violates
}

func refund(allowed, budgets []int) {
	for _, i := range budgets {
		allowed[i]++
	}
}

// maxSteps limits the search on one set of cards. It is enough to try all sets of a dozen pods, most of which are pruned. With many
// more pods, the search returns the best set that it has found.
const maxSteps = 5000

// search finds the cheapest plan for one set of cards by branch and bound. It starts with the whole pool evicted and decides on one
// pod after the other: the pod is kept, if there is enough room without its eviction, or evicted. Both branches are tried.
// A branch ends once it costs as much as the best plan so far, because each further victim only adds cost.
type search struct {
	node    *Node
	request Request
	pool    []*potentialVictim
	// feasible is false if by our sums not even the eviction of the whole pool frees enough of the resources. Then
	// kube-scheduler knows more than this package, and all proposed pods become victims.
	feasible bool
	best     *plan
	steps    int
	budget   *Budget

	// The state of the branch: the cards and the resources with all undecided pods evicted, and the victims so far.
	cards   []placement.Card
	free    Amounts
	allowed []int
	plan    plan
}

// decide tries to keep and to evict the pod at position i, and decides on all pods after it.
func (s *search) decide(i int) {
	switch {
	case s.best != nil && (s.steps <= 0 || s.budget.spent() || s.plan.compareCost(s.best) >= 0):
		return
	case i == len(s.pool):
		found := s.plan
		found.pods = slices.Clone(found.pods)
		s.best = &found
		return
	}
	s.steps--
	s.budget.Spend(len(s.cards))
	c := s.pool[i]
	if !c.MustEvict && (s.feasible || !c.Proposed) {
		s.stay(c)
		if s.room() && (!s.feasible || s.free.cover(s.request.Resources)) {
			s.decide(i + 1)
		}
		s.leave(c)
	}
	before := s.plan
	s.evict(c)
	s.decide(i + 1)
	s.plan = before
	if !c.Terminating {
		refund(s.allowed, c.Budgets)
	}
}

// room reports whether each card has room for its share of the demand.
func (s *search) room() bool {
	return !slices.ContainsFunc(s.cards, func(card placement.Card) bool { return !card.Fits(&s.request.Demand) })
}

// stay counts the pod on the cards and in the node's resources, and leave undoes that.
func (s *search) stay(c *potentialVictim) {
	for _, share := range c.onCards {
		s.cards[share.Card].Add(share)
	}
	for i, amount := range c.Requests {
		s.free[i] -= amount
	}
}

func (s *search) leave(c *potentialVictim) {
	for _, share := range c.onCards {
		s.cards[share.Card].Subtract(share)
	}
	for i, amount := range c.Requests {
		s.free[i] += amount
	}
}

// evict adds a victim and its cost to the plan. Terminating pods cost nothing.
func (s *search) evict(c *potentialVictim) {
	p := &s.plan
	p.pods = append(p.pods, c)
	if c.Terminating {
		return
	}
	if spend(s.allowed, c.Budgets) {
		p.violations++
	}
	if c.BudgetsUnknown && p.uncounted < s.node.Violations {
		p.uncounted++
		p.violations++
	}
	p.highest = max(p.highest, int64(c.Priority))
	p.priorities += int64(c.Priority) - math.MinInt32 + 1
	p.memory = p.memory.Add(c.Placement.Total())
}

// plan is a set of victims that frees cards, with its cost.
type plan struct {
	// cards are the indexes of the cards.
	cards []int
	pods  []*potentialVictim

	violations int
	// uncounted is the number of violations attributed to pods with unknown budgets, see Node.Violations.
	uncounted int
	// highest is the highest priority among the victims.
	highest int64
	// priorities is the sum of the victims' priorities, each shifted to be positive.
	priorities int64
	memory     gpu.Memory
}

// compareCost returns a negative number if p costs less than o, and a positive one if it costs more.
func (p *plan) compareCost(o *plan) int {
	return cmp.Or(cmp.Compare(p.violations, o.violations), cmp.Compare(p.highest, o.highest),
		cmp.Compare(p.priorities, o.priorities), cmp.Compare(p.memory, o.memory), cmp.Compare(len(p.pods), len(o.pods)))
}

// victims returns the plan's pods by descending priority.
func (p *plan) victims() Victims {
	slices.SortFunc(p.pods, func(a, b *potentialVictim) int {
		return cmp.Or(cmp.Compare(b.Priority, a.Priority), cmp.Compare(a.UID, b.UID))
	})
	out := Victims{Violations: p.violations}
	for _, c := range p.pods {
		out.Pods = append(out.Pods, c.UID)
	}
	return out
}

// cover reports whether the amounts cover what is wanted. A resource of which nothing is wanted is always covered.
func (a Amounts) cover(wanted Amounts) bool {
	for i, w := range wanted {
		if w > 0 && w > a[i] {
			return false
		}
	}
	return true
}
