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
// Otherwise the cheapest set of pods that frees a card goes, by kube-scheduler's own order between nodes
// (k8s.io/kubernetes pkg/scheduler/framework/preemption, pickOneNodeForPreemption): fewest violated budgets, then the
// lowest highest priority, then the smallest sum of priorities, which mostly means fewest victims; then the least GPU
// memory, then the fewest pods that are leaving already, then the lower card index.
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
		best = n.clear(card, request, best)
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

// candidate is a pod with what it holds of the card in question.
type candidate struct {
	*Pod
	holds    gpu.Memory
	violates bool
}

// clear returns the cheapest plan that frees the card, or best where none is cheaper.
func (n Node) clear(card *placement.Card, request Request, best *plan) *plan {
	pool := n.pool(card)
	s := search{
		node: &n, request: request, pool: pool, best: best, steps: maxSteps,
		card: *card, free: slices.Clone(n.Free), allowed: slices.Clone(n.Budgets),
		plan: plan{card: card.Index, highest: math.MinInt64},
	}
	for _, c := range pool {
		s.card.Used = s.card.Used.Sub(c.holds)
		s.free.add(c.Takes)
	}
	if s.card.Free() < request.Memory {
		return best
	}
	s.known = s.free.cover(request.Others, nil)
	s.decide(0)
	return s.best
}

// pool returns the pods whose going could help to free the card, and the proposed ones, in the order in which they are
// tried to stay: those whose eviction breaks a budget first, pods that are leaving already last, and in between the
// highest priority first, of equal ones the small ones, so that few have to go. It is kube-scheduler's order
// (plugins/defaultpreemption, SelectVictimsOnNode).
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
	slices.SortFunc(pool, func(a, b *candidate) int {
		return cmp.Or(cmp.Compare(b.Priority, a.Priority), cmp.Compare(a.holds, b.holds), cmp.Compare(a.UID, b.UID))
	})
	n.markViolations(pool)
	slices.SortStableFunc(pool, func(a, b *candidate) int {
		return cmp.Or(compareBool(a.Leaving, b.Leaving), compareBool(b.violates, a.violates))
	})
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

func refund(allowed, budgets []int) {
	for _, i := range budgets {
		allowed[i]++
	}
}

// maxSteps bounds the search on one card. It is enough to try all sets of a dozen pods, most of which are ruled out
// early; among many more pods the search ends with the best set that it has come upon.
const maxSteps = 5000

// search looks for the cheapest plan on one card. It begins with all candidates going and decides about one after the
// other: it stays, where there is enough room without its going, or it goes. Both are tried, and a branch ends where it
// costs as much as the best plan known: each further victim only adds costs.
type search struct {
	node    *Node
	request Request
	pool    []*candidate
	// known is false where our books say that not even all going would be enough for the other resources: kube-scheduler
	// knows something that we don't, and what it proposed goes.
	known bool
	best  *plan
	steps int

	// The state of the branch: what is taken and free if all that aren't decided about go, and the victims up to here.
	card    placement.Card
	free    Amounts
	allowed []int
	plan    plan
}

// decide tries both for the candidate at the position and all after it.
func (s *search) decide(i int) {
	switch {
	case s.best != nil && (s.steps <= 0 || s.plan.cost(s.best) >= 0):
		return
	case i == len(s.pool):
		found := s.plan
		found.pods = slices.Clone(found.pods)
		s.best = &found
		return
	}
	s.steps--
	c := s.pool[i]
	if s.mayStay(c) {
		s.card.Used = s.card.Used.Add(c.holds)
		s.free.sub(c.Takes)
		s.decide(i + 1)
		s.free.add(c.Takes)
		s.card.Used = s.card.Used.Sub(c.holds)
	}
	before := s.plan
	s.evict(c)
	s.decide(i + 1)
	s.plan = before
	if !c.Leaving {
		refund(s.allowed, c.Budgets)
	}
}

// mayStay reports whether there is enough room without the candidate's going.
func (s *search) mayStay(c *candidate) bool {
	if c.Fixed || c.Proposed && !s.known {
		return false
	}
	return s.card.Free().Sub(c.holds) >= s.request.Memory && (!s.known || s.free.cover(s.request.Others, c.Takes))
}

// evict adds a victim to the plan, with what it costs. Pods that are leaving already cost nothing.
func (s *search) evict(c *candidate) {
	p := &s.plan
	p.pods = append(p.pods, c)
	if c.Leaving {
		return
	}
	if spend(s.allowed, c.Budgets) {
		p.violations++
	}
	if c.Uncounted && p.uncounted < s.node.Violations {
		p.uncounted++
		p.violations++
	}
	p.highest = max(p.highest, int64(c.Priority))
	p.priorities += int64(c.Priority) - math.MinInt32 + 1
	for _, share := range c.Where {
		p.memory = p.memory.Add(share.Memory)
	}
}

// plan is one way to free a card, and what it costs.
type plan struct {
	card int
	pods []*candidate

	violations int
	// uncounted are the violations among pods whose budgets aren't known, see Node.Violations.
	uncounted int
	// highest is the highest priority among the victims.
	highest int64
	// priorities is the sum of the victims' priorities, each lifted above zero.
	priorities int64
	memory     gpu.Memory
}

// cost is negative where p costs less.
func (p *plan) cost(o *plan) int {
	return cmp.Or(cmp.Compare(p.violations, o.violations), cmp.Compare(p.highest, o.highest),
		cmp.Compare(p.priorities, o.priorities), cmp.Compare(p.memory, o.memory), cmp.Compare(len(p.pods), len(o.pods)))
}

// victims returns the plan's pods, the highest priority first.
func (p *plan) victims() Victims {
	slices.SortFunc(p.pods, func(a, b *candidate) int {
		return cmp.Or(cmp.Compare(b.Priority, a.Priority), cmp.Compare(a.UID, b.UID))
	})
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
