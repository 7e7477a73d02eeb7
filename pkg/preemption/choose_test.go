package preemption_test

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/test/check"
)

// edit changes a pod of a table row.
type edit func(*preemption.Pod)

func proposed(p *preemption.Pod)       { p.Proposed = true }
func terminating(p *preemption.Pod)    { p.Terminating = true }
func mustEvict(p *preemption.Pod)      { p.Proposed, p.MustEvict = true, true }
func budgetsUnknown(p *preemption.Pod) { p.BudgetsUnknown = true }

func priority(n int32) edit    { return func(p *preemption.Pod) { p.Priority = n } }
func budgeted(ids ...int) edit { return func(p *preemption.Pod) { p.Budgets = ids } }
func requests(cpu, sum int64) edit {
	return func(p *preemption.Pod) { p.Requests = preemption.Amounts{cpu, sum} }
}

// on returns a pod with memory on a card, and the same amount of the node's sum.
func on(card int, memory gpu.Memory, uid gpu.PodUID, edits ...edit) preemption.Pod {
	p := preemption.Pod{UID: uid, Placement: gpu.On(card, memory), Requests: preemption.Amounts{0, int64(memory)}}
	for _, edit := range edits {
		edit(&p)
	}
	return p
}

// cpuOnly returns a pod without GPU memory.
func cpuOnly(uid gpu.PodUID, edits ...edit) preemption.Pod {
	p := preemption.Pod{UID: uid}
	for _, edit := range edits {
		edit(&p)
	}
	return p
}

// node returns a node with cards of one size. others is the memory on each card that is used by pods that can't be victims.
// The node's resources are CPU, of which cpu is free, and the sum of GPU memory.
func node(size gpu.Memory, others []gpu.Memory, cpu int64, pods ...preemption.Pod) preemption.Node {
	n := preemption.Node{Pods: pods}
	free := int64(0)
	for i, held := range others {
		n.Cards = append(n.Cards, placement.Card{Index: i, Memory: size, Used: held})
		free += int64(size - held)
	}
	for _, p := range pods {
		for _, share := range p.Placement {
			n.Cards[share.Card].Used = n.Cards[share.Card].Used.Add(share.Memory)
			free -= int64(share.Memory)
		}
	}
	n.Free = preemption.Amounts{cpu, free}
	return n
}

// units returns the demand of a pod that asks for memory of one card.
func units(memory gpu.Memory) gpu.Demand { return gpu.Demand{Cards: 1, Memory: memory} }

func TestChoose(t *testing.T) {
	none := []gpu.Memory{0, 0, 0}
	type pods = []preemption.Pod
	type uids = []gpu.PodUID
	budgets := func(n preemption.Node, violations int, allowed ...int) preemption.Node {
		n.Budgets, n.Violations = allowed, violations
		return n
	}
	ill := node(16, []gpu.Memory{0, 0}, 0, on(0, 16, "a", proposed), on(1, 16, "b"))
	ill.Cards[0].Unhealthy = true
	small := node(16, []gpu.Memory{0, 0}, 0, on(0, 8, "a"), on(1, 16, "b", proposed))
	small.Cards[0].Memory = 8
	nominated := node(16, []gpu.Memory{0, 0}, 0, on(0, 16, "a", terminating, proposed), on(1, 16, "b"))
	nominated.Cards[0].Used = 32 // A nominated pod waits for the end of a.

	tests := map[string]struct {
		node    preemption.Node
		request gpu.Memory
		cpu     int64
		want    uids
		breaks  int
	}{
		"victims on one card instead of a proposal on two": {
			node: node(16, none, 0,
				on(0, 9, "a9"), on(0, 7, "a7", proposed), on(1, 9, "b9", proposed), on(1, 7, "b7"), on(2, 9, "c9"), on(2, 7, "c7")),
			request: 16, want: uids{"a7", "a9"},
		},
		"no more victims than the card needs": {
			node: node(16, none, 0, on(0, 9, "a9"), on(0, 7, "a7"), on(1, 16, "b", proposed), on(2, 16, "c")), request: 7, want: uids{"a7"},
		},
		"one large pod rather than two small ones": {
			node: node(16, []gpu.Memory{0}, 0, on(0, 4, "x", proposed), on(0, 4, "y", proposed), on(0, 8, "z")), request: 8, want: uids{"z"},
		},
		"the smallest pod that is enough": {
			node: node(21, []gpu.Memory{0}, 0, on(0, 9, "x", proposed), on(0, 7, "y"), on(0, 5, "z")), request: 6, want: uids{"y"},
		},
		"free memory of the card counts": {
			node: node(16, []gpu.Memory{0, 0}, 0, on(0, 16, "a", proposed), on(1, 10, "b")), request: 16, want: uids{"b"},
		},
		"a pod that must be evicted uses the disruption of its budget": {
			node: budgets(node(12, []gpu.Memory{0}, 0,
				on(0, 4, "a", mustEvict, priority(1), budgeted(0)), on(0, 4, "c"), on(0, 4, "z", budgeted(0))), 0, 1),
			request: 8, want: uids{"a", "c"},
		},
		"a card with a pod of higher priority can't be freed": {
			node: node(16, []gpu.Memory{1, 0, 1}, 0, on(0, 15, "a", proposed), on(1, 16, "b"), on(2, 15, "c")), request: 16, want: uids{"b"},
		},
		"no card can be freed": {
			node: node(16, []gpu.Memory{9, 9}, 0, on(0, 7, "a", proposed), on(1, 7, "b", proposed)), request: 8,
		},
		"the lowest priority, though it is more pods": {
			node: node(16, none, 0, on(0, 16, "a", priority(5), proposed), on(1, 9, "b", priority(4)), on(1, 7, "c", priority(1)),
				on(2, 16, "d", priority(6))),
			request: 16, want: uids{"b", "c"},
		},
		"the lowest priority also on a single card": {
			node:    node(16, []gpu.Memory{0}, 0, on(0, 8, "a", priority(5), proposed), on(0, 4, "b", priority(3)), on(0, 4, "c", priority(2))),
			request: 8, want: uids{"b", "c"},
		},
		"victims are ordered by descending priority": {
			node:    node(16, []gpu.Memory{0}, 0, on(0, 4, "a", priority(1)), on(0, 8, "b", priority(3), proposed), on(0, 4, "c", priority(2))),
			request: 16, want: uids{"b", "c", "a"},
		},
		"equal priorities: fewer victims": {
			node: node(16, []gpu.Memory{0, 0}, 0, on(0, 8, "a", proposed), on(0, 8, "b"), on(1, 16, "c")), request: 16, want: uids{"c"},
		},
		"equal cost: the lower card index": {
			node: node(16, none, 0, on(2, 16, "a", proposed), on(1, 16, "b"), on(0, 16, "c")), request: 16, want: uids{"c"},
		},
		"a budget counts for more than a priority": {
			node:    budgets(node(16, []gpu.Memory{0, 0}, 0, on(0, 16, "a", budgeted(0), proposed), on(1, 16, "b", priority(9))), 1, 0),
			request: 16, want: uids{"b"},
		},
		"a budget that allows one": {
			node:    budgets(node(16, []gpu.Memory{0}, 0, on(0, 8, "a", budgeted(0)), on(0, 8, "b", budgeted(0), proposed)), 0, 1),
			request: 8, want: uids{"b"},
		},
		"the budget's eviction is used for the lowest priority": {
			node: budgets(node(16, []gpu.Memory{0}, 0, on(0, 8, "a", budgeted(0), priority(5)), on(0, 4, "b", budgeted(0), priority(1)),
				on(0, 4, "c", proposed)), 0, 1),
			request: 8, want: uids{"b", "c"},
		},
		"an unavoidable violation is counted": {
			node:    budgets(node(16, []gpu.Memory{0}, 0, on(0, 8, "a", budgeted(0, 1)), on(0, 8, "b", budgeted(0), proposed)), 0, 1, 5),
			request: 16, want: uids{"a", "b"}, breaks: 1,
		},
		"proposed victims that the other resources need are kept": {
			node: node(16, []gpu.Memory{0, 0}, 1,
				on(0, 16, "a", proposed), on(1, 16, "b", priority(1)), cpuOnly("cpu", proposed, requests(3, 0), priority(-1)), cpuOnly("idle", proposed)),
			request: 16, cpu: 4, want: uids{"a", "cpu"},
		},
		"a victim that frees both is preferred": {
			node:    node(16, []gpu.Memory{0, 0}, 0, on(0, 16, "a"), on(1, 16, "b", proposed, requests(4, 16))),
			request: 16, cpu: 4, want: uids{"b"},
		},
		"a victim that frees both is preferred on a single card": {
			node:    node(16, []gpu.Memory{0}, 0, on(0, 8, "x", proposed, requests(4, 8)), on(0, 8, "y")),
			request: 8, cpu: 4, want: uids{"x"},
		},
		"the node's sum of GPU memory counts as well": {
			// Units of a card that became unhealthy are allocated, but no longer allocatable.
			node: func() preemption.Node {
				n := node(16, []gpu.Memory{0, 0}, 0, on(0, 16, "a", proposed), on(1, 16, "b"))
				n.Cards[0].Unhealthy, n.Free[1] = true, -16
				return n
			}(),
			request: 16, want: uids{"a", "b"},
		},
		"a proposed victim that must be evicted": {
			node:    node(16, []gpu.Memory{0, 0}, 9, on(0, 16, "a"), on(1, 1, "b", mustEvict), cpuOnly("c", mustEvict), on(1, 15, "d")),
			request: 16, want: uids{"b", "c", "d"},
		},
		"the proposal is kept if the sums don't suffice": {
			node:    node(16, []gpu.Memory{0, 0}, 0, on(0, 16, "a"), on(1, 2, "b", proposed), cpuOnly("c", proposed), on(1, 14, "d")),
			request: 16, cpu: 4, want: uids{"b", "c", "d"},
		},
		"violations of pods with unknown budgets are counted": {
			node:    budgets(node(16, []gpu.Memory{0}, 0, on(0, 16, "a", budgeted(0)), cpuOnly("c", mustEvict, budgetsUnknown), cpuOnly("d", mustEvict, budgetsUnknown)), 1, 0),
			request: 16, want: uids{"a", "c", "d"}, breaks: 2,
		},
		"a card with room keeps the proposal": {
			node:    budgets(node(16, []gpu.Memory{0, 0}, 0, on(0, 8, "a"), cpuOnly("c", proposed, requests(1, 0)), on(1, 16, "d", proposed)), 1),
			request: 8, cpu: 1, want: uids{"c", "d"}, breaks: 1,
		},
		"a card with room and no proposal: no victims": {
			node: node(16, []gpu.Memory{0}, 9, on(0, 8, "a")), request: 8,
		},
		"no proposal, as newer kube-schedulers send": {
			node: node(16, []gpu.Memory{0, 0}, 9, on(0, 9, "a"), on(1, 8, "b")), request: 16, want: uids{"b"},
		},
		"a terminating pod costs nothing": {
			node:    budgets(node(16, []gpu.Memory{0, 0}, 0, on(0, 16, "a", proposed, priority(-5)), on(1, 16, "b", terminating, priority(5), budgeted(0))), 0, 0),
			request: 16, want: uids{"b"},
		},
		"a terminating pod that isn't needed is no victim": {
			node: node(16, []gpu.Memory{0}, 0, on(0, 8, "a", proposed), on(0, 4, "b", terminating), on(0, 4, "c", terminating)), request: 4, want: uids{"c"},
		},
		"memory for a nominated pod isn't used again": {node: nominated, request: 16, want: uids{"b"}},
		"an unhealthy card can't be freed":            {node: ill, request: 16, want: uids{"b"}},
		"a card that is too small can't be freed":     {node: small, request: 16, want: uids{"b"}},
		"a pod on two cards frees its part of each": {
			node: func() preemption.Node {
				wide := preemption.Pod{UID: "w", Placement: gpu.Placement{{Card: 0, Memory: 6}, {Card: 1, Memory: 10}}, Requests: preemption.Amounts{0, 16}}
				return node(16, []gpu.Memory{10, 0}, 0, wide, on(1, 6, "b", proposed))
			}(),
			request: 10, want: uids{"w"},
		},
		"no cards": {node: preemption.Node{Pods: pods{cpuOnly("a", proposed)}, Free: preemption.Amounts{0, 0}}, request: 1},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got, ok := preemption.Choose(test.node, preemption.Request{
				Demand: units(test.request), Resources: preemption.Amounts{test.cpu, int64(test.request)},
			})
			if ok != (len(test.want) > 0) {
				t.Errorf("found: %v", ok)
			}
			check.Equal(t, "the result", preemption.Victims{Pods: test.want, Violations: test.breaks}, got)
		})
	}
}

// The sets of cards aren't all tried: of 64 cards there are 2⁶⁴, and the test would not end.
func TestChooseOfManyCards(t *testing.T) {
	var pods []preemption.Pod
	var want []gpu.PodUID
	for card := range gpu.MaxCards {
		uid := gpu.PodUID(fmt.Sprintf("%02d", card))
		pods, want = append(pods, on(card, 16, uid)), append(want, uid)
	}
	n := node(16, make([]gpu.Memory, gpu.MaxCards), 0, pods...)
	got, ok := preemption.Choose(n, preemption.Request{Demand: gpu.Demand{Cards: gpu.MaxCards, Memory: 16}})
	if diff := cmp.Diff(want, got.Pods); diff != "" || !ok {
		t.Errorf("all cards: %v (-want +got):\n%s", ok, diff)
	}
	n.Cards[0].Used, n.Pods = 16, n.Pods[1:]
	if got, ok := preemption.Choose(n, preemption.Request{Demand: gpu.Demand{Cards: gpu.MaxCards, Memory: 16}}); ok {
		t.Errorf("one of them can't be freed: %v", got)
	}
}

// Two pods have two cards each. The plan has both cards of one pod rather than a card of each.
func TestChooseCardsOfOnePod(t *testing.T) {
	wide := func(uid gpu.PodUID, cards ...int) preemption.Pod {
		p := preemption.Pod{UID: uid, Requests: preemption.Amounts{0, 32}}
		for _, card := range cards {
			p.Placement = append(p.Placement, gpu.Share{Card: card, Memory: 16})
		}
		return p
	}
	n := node(16, make([]gpu.Memory, 4), 0, wide("a", 0, 2), wide("b", 1, 3))
	got, _ := preemption.Choose(n, preemption.Request{Demand: gpu.Demand{Cards: 2, Memory: 16}, Resources: preemption.Amounts{0, 32}})
	check.Equal(t, "the result", preemption.Victims{Pods: []gpu.PodUID{"a"}}, got)
}
