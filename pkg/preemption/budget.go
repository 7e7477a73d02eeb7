package preemption

import "context"

// Budget limits the work of one call over all of its nodes: kube-scheduler schedules no pod while it waits for the answer. Each node gets
// an equal share of the steps that are left, so one node with many cards and pods takes nothing from the others, and each node gets a valid
// answer, though not always the cheapest.
type Budget struct {
	// steps are left of all, and share of those for the present node.
	steps, share int
	// nodes is the number of nodes that share the steps.
	nodes int
}

// maxWork is the number of steps of a Budget, each of about 0.1 µs. It is enough for all sets of the pods of a card on a hundred nodes of
// eight cards.
const maxWork = 4_000_000

// NewBudget returns a Budget for a call with that number of nodes.
func NewBudget(nodes int) *Budget { return &Budget{steps: maxWork, nodes: nodes} }

// Next begins the work on a node. It returns false if no steps are left or the context has ended: then no other node can be decided.
func (b *Budget) Next(ctx context.Context) bool {
	if b.steps <= 0 || ctx.Err() != nil {
		return false
	}
	b.share = b.steps / max(b.nodes, 1)
	b.nodes--
	return true
}

// Spend counts steps.
func (b *Budget) Spend(steps int) {
	b.steps -= steps
	b.share -= steps
}

// spent reports whether the share of the present node is spent.
func (b *Budget) spent() bool { return b.share <= 0 }
