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
// Otherwise Choose returns pods whose end frees as many cards as the request needs, none of which could stay. The choice between cards is the one of
// kube-scheduler between nodes (k8s.io/kubernetes pkg/scheduler/framework/preemption, pickOneNodeForPreemption): fewest violated disruption
// budgets, lowest highest priority, smallest sum of priorities (in general the fewest victims). Then follow: least GPU
// memory, fewest terminating pods, lowest card index.
func Choose(node Node, request Request) (Victims, bool) {
	if placement.Fit(node.Cards, request.Demand) == reasons.Fits {
		return node.proposal()
	}
	best := node.cheapest(request)
	if best == nil {
		return Victims{}, false
	}
	return best.victims(), true
}

// cheapest returns the plan that frees the cards that cost least, or nil if too few can be freed. It adds one card after the other, each time the one
// with which the plan for all of them costs least. So it prefers further cards of pods that are victims anyway.
func (n Node) cheapest(request Request) (best *plan) {
	smallestStay, largestStay := n.inOrder(1), n.inOrder(-1) // Few pods end, or small ones.
	var set []placement.Card
	for len(set) < request.Demand.Cards {
		part := request
		if len(set)+1 < request.Demand.Cards {
			part.Resources = nil // The whole set frees them.
		}
		best = nil
		var next placement.Card
		for _, c := range n.Cards {
			added := slices.ContainsFunc(set, func(other placement.Card) bool { return other.Index == c.Index })
			if added || c.Unhealthy || c.Lacks(&request.Demand) || c.Memory < request.Demand.Memory {
				continue
			}
			for _, ordered := range []Node{smallestStay, largestStay} {
				if p := ordered.planOn(append(slices.Clip(set), c), part); p != nil && (best == nil || p.compareCost(best) < 0) {
					best, next = p, c
				}
			}
		}
		if best == nil {
			return nil
		}
		set = append(set, next)
	}
	return best
}

// inOrder returns the node with its pods by descending priority, and by ascending memory if sign is 1, descending if it is -1.
func (n Node) inOrder(sign int) Node {
	n.Pods = slices.Clone(n.Pods)
	slices.SortFunc(n.Pods, func(a, b Pod) int {
		return cmp.Or(cmp.Compare(b.Priority, a.Priority), sign*cmp.Compare(a.Placement.Total(), b.Placement.Total()), cmp.Compare(a.UID, b.UID))
	})
	return n
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
	// onCards are its shares of these cards, with their positions in place of their indexes.
	onCards  gpu.Placement
	violates bool
}

// planOn returns a plan that frees all of the cards, or nil if that is impossible. As kube-scheduler does, it evicts the whole pool and then lets each
// pod stay for which there is enough room, one after the other.
func (n Node) planOn(cards []placement.Card, request Request) *plan {
	pool := n.potentialVictims(cards, len(request.Resources) > 0)
	s := state{cards: slices.Clone(cards), free: slices.Clone(n.Free)}
	for _, c := range pool {
		s.leave(c)
	}
	if !s.room(&request.Demand) {
		return nil
	}
	p := &plan{highest: math.MinInt64}
	for _, c := range cards {
		p.cards = append(p.cards, c.Index)
	}
	// If by our sums not even the end of the whole pool frees enough of the resources, kube-scheduler knows more than this package, and all proposed
	// pods become victims.
	feasible := s.free.cover(request.Resources)
	allowed := slices.Clone(n.Budgets)
	for _, c := range pool {
		if !c.MustEvict && (feasible || !c.Proposed) {
			s.stay(c)
			if s.room(&request.Demand) && (!feasible || s.free.cover(request.Resources)) {
				continue
			}
			s.leave(c)
		}
		p.evict(c, allowed, n.Violations)
	}
	return p
}

// potentialVictims returns the pods on the cards, and the proposed ones if they count, in the order in which planOn lets them
// stay: first pods whose eviction violates a budget, last terminating pods, in between by descending priority. It is kube-scheduler's order
// (k8s.io/kubernetes pkg/scheduler/framework/plugins/defaultpreemption, SelectVictimsOnNode).
func (n Node) potentialVictims(cards []placement.Card, proposed bool) []*potentialVictim {
	var pool []*potentialVictim
	for i := range n.Pods {
		c := potentialVictim{Pod: &n.Pods[i]}
		for _, share := range c.Placement {
			share.Card = slices.IndexFunc(cards, func(c placement.Card) bool { return c.Index == share.Card })
			if share.Card >= 0 {
				c.onCards = append(c.onCards, share)
			}
		}
		if len(c.onCards) > 0 || proposed && c.Proposed {
			pool = append(pool, &c)
		}
	}
	n.markViolations(pool)
	slices.SortStableFunc(pool, func(a, b *potentialVictim) int {
		return cmp.Or(gpu.TrueFirst(b.Terminating, a.Terminating), gpu.TrueFirst(a.violates, b.violates))
	})
	return pool
}

// markViolations marks the pods whose eviction would violate a budget if the whole pool were evicted. It counts the pods
// that must be evicted first, then the others in the order in which they are likely to be evicted: the pool backwards.
func (n Node) markViolations(pool []*potentialVictim) {
	allowed := slices.Clone(n.Budgets)
	for _, must := range []bool{true, false} {
		for _, c := range slices.Backward(pool) {
			if c.MustEvict == must && !c.Terminating {
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

// state is that of some cards, and of the node's resources, without some of the pods.
type state struct {
	cards []placement.Card
	free  Amounts
}

// room reports whether each card has room for its share of the demand.
func (s *state) room(demand *gpu.Demand) bool {
	return !slices.ContainsFunc(s.cards, func(card placement.Card) bool { return !card.Fits(demand) })
}

// stay counts the pod on the cards and in the node's resources, and leave undoes that.
func (s *state) stay(c *potentialVictim) {
	for _, share := range c.onCards {
		s.cards[share.Card].Add(share)
	}
	for i, amount := range c.Requests {
		s.free[i] -= amount
	}
}

func (s *state) leave(c *potentialVictim) {
	for _, share := range c.onCards {
		s.cards[share.Card].Subtract(share)
	}
	for i, amount := range c.Requests {
		s.free[i] += amount
	}
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

// evict adds a victim and its cost to the plan. Terminating pods cost nothing. allowed is what the budgets still allow, and most limits the violations
// that are attributed to pods with unknown budgets.
func (p *plan) evict(c *potentialVictim, allowed []int, most int) {
	p.pods = append(p.pods, c)
	if c.Terminating {
		return
	}
	if spend(allowed, c.Budgets) {
		p.violations++
	}
	if c.BudgetsUnknown && p.uncounted < most {
		p.uncounted++
		p.violations++
	}
	p.highest = max(p.highest, int64(c.Priority))
	p.priorities += int64(c.Priority) - math.MinInt32 + 1
	p.memory = p.memory.Add(c.Placement.Total())
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
