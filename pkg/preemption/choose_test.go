package preemption_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/preemption"
)

// edit changes a pod of a table.
type edit func(*preemption.Pod)

func proposed(p *preemption.Pod)  { p.Proposed = true }
func leaving(p *preemption.Pod)   { p.Leaving = true }
func fixed(p *preemption.Pod)     { p.Proposed, p.Fixed = true, true }
func uncounted(p *preemption.Pod) { p.Uncounted = true }

func priority(n int32) edit  { return func(p *preemption.Pod) { p.Priority = n } }
func guarded(by ...int) edit { return func(p *preemption.Pod) { p.Budgets = by } }
func takes(cpu, sum int64) edit {
	return func(p *preemption.Pod) { p.Takes = preemption.Amounts{cpu, sum} }
}

// on returns a pod that holds memory of a card, and as much of the node's sum.
func on(card int, memory gpu.Memory, uid gpu.PodUID, edits ...edit) preemption.Pod {
	p := preemption.Pod{UID: uid, Where: gpu.On(card, memory), Takes: preemption.Amounts{0, int64(memory)}}
	for _, edit := range edits {
		edit(&p)
	}
	return p
}

// beside returns a pod that holds no GPU memory.
func beside(uid gpu.PodUID, edits ...edit) preemption.Pod {
	p := preemption.Pod{UID: uid}
	for _, edit := range edits {
		edit(&p)
	}
	return p
}

// node returns a node with cards of one size, filled by the pods and by what else is held of each card. Of the other
// resources, CPU and the sum of GPU memory, so much CPU and what the cards have free is left.
func node(size gpu.Memory, others []gpu.Memory, cpu int64, pods ...preemption.Pod) preemption.Node {
	n := preemption.Node{Pods: pods}
	free := int64(0)
	for i, held := range others {
		n.Cards = append(n.Cards, placement.Card{Index: i, Memory: size, Used: held})
		free += int64(size - held)
	}
	for _, p := range pods {
		for _, share := range p.Where {
			n.Cards[share.Card].Used = n.Cards[share.Card].Used.Add(share.Memory)
			free -= int64(share.Memory)
		}
	}
	n.Free = preemption.Amounts{cpu, free}
	return n
}

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
	claimed := node(16, []gpu.Memory{0, 0}, 0, on(0, 16, "a", leaving, proposed), on(1, 16, "b"))
	claimed.Cards[0].Used = 32 // A nominated pod waits for a.

	tests := map[string]struct {
		node    preemption.Node
		request gpu.Memory
		cpu     int64
		want    uids
		breaks  int
	}{
		"victims on two cards give way to those on one": {
			node: node(16, none, 0,
				on(0, 9, "a9"), on(0, 7, "a7", proposed), on(1, 9, "b9", proposed), on(1, 7, "b7"), on(2, 9, "c9"), on(2, 7, "c7")),
			request: 16, want: uids{"a7", "a9"},
		},
		"no more go than the card needs": {
			node: node(16, none, 0, on(0, 9, "a9"), on(0, 7, "a7"), on(1, 16, "b", proposed), on(2, 16, "c")), request: 7, want: uids{"a7"},
		},
		"one large pod rather than two small ones": {
			node: node(16, []gpu.Memory{0}, 0, on(0, 4, "x", proposed), on(0, 4, "y", proposed), on(0, 8, "z")), request: 8, want: uids{"z"},
		},
		"the smallest that is enough": {
			node: node(21, []gpu.Memory{0}, 0, on(0, 9, "x", proposed), on(0, 7, "y"), on(0, 5, "z")), request: 6, want: uids{"y"},
		},
		"what is free on the card counts": {
			node: node(16, []gpu.Memory{0, 0}, 0, on(0, 16, "a", proposed), on(1, 10, "b")), request: 16, want: uids{"b"},
		},
		"a card that a pod of higher priority sits on can't be freed": {
			node: node(16, []gpu.Memory{1, 0, 1}, 0, on(0, 15, "a", proposed), on(1, 16, "b"), on(2, 15, "c")), request: 16, want: uids{"b"},
		},
		"no card can be freed": {
			node: node(16, []gpu.Memory{9, 9}, 0, on(0, 7, "a", proposed), on(1, 7, "b", proposed)), request: 8,
		},
		"the lowest priority goes, though it is more pods": {
			node: node(16, none, 0, on(0, 16, "a", priority(5), proposed), on(1, 9, "b", priority(4)), on(1, 7, "c", priority(1)),
				on(2, 16, "d", priority(6))),
			request: 16, want: uids{"b", "c"},
		},
		"of one card too the lowest priority goes first": {
			node:    node(16, []gpu.Memory{0}, 0, on(0, 8, "a", priority(5), proposed), on(0, 4, "b", priority(3)), on(0, 4, "c", priority(2))),
			request: 8, want: uids{"b", "c"},
		},
		"the highest priority is named first": {
			node:    node(16, []gpu.Memory{0}, 0, on(0, 4, "a", priority(1)), on(0, 8, "b", priority(3), proposed), on(0, 4, "c", priority(2))),
			request: 16, want: uids{"b", "c", "a"},
		},
		"equal priorities: fewer victims": {
			node: node(16, []gpu.Memory{0, 0}, 0, on(0, 8, "a", proposed), on(0, 8, "b"), on(1, 16, "c")), request: 16, want: uids{"c"},
		},
		"equal in all: the lower card": {
			node: node(16, none, 0, on(2, 16, "a", proposed), on(1, 16, "b"), on(0, 16, "c")), request: 16, want: uids{"c"},
		},
		"a budget counts for more than a priority": {
			node:    budgets(node(16, []gpu.Memory{0, 0}, 0, on(0, 16, "a", guarded(0), proposed), on(1, 16, "b", priority(9))), 1, 0),
			request: 16, want: uids{"b"},
		},
		"a budget that allows one": {
			node:    budgets(node(16, []gpu.Memory{0}, 0, on(0, 8, "a", guarded(0)), on(0, 8, "b", guarded(0), proposed)), 0, 1),
			request: 8, want: uids{"b"},
		},
		"a budget is kept for the lowest priority": {
			node: budgets(node(16, []gpu.Memory{0}, 0, on(0, 8, "a", guarded(0), priority(5)), on(0, 4, "b", guarded(0), priority(1)),
				on(0, 4, "c", proposed)), 0, 1),
			request: 8, want: uids{"b", "c"},
		},
		"a budget that must be broken is counted": {
			node:    budgets(node(16, []gpu.Memory{0}, 0, on(0, 8, "a", guarded(0, 1)), on(0, 8, "b", guarded(0), proposed)), 0, 1, 5),
			request: 16, want: uids{"a", "b"}, breaks: 1,
		},
		"the other resources keep proposed victims in": {
			node: node(16, []gpu.Memory{0, 0}, 1,
				on(0, 16, "a", proposed), on(1, 16, "b", priority(1)), beside("cpu", proposed, takes(3, 0), priority(-1)), beside("idle", proposed)),
			request: 16, cpu: 4, want: uids{"a", "cpu"},
		},
		"a victim that serves both is preferred": {
			node:    node(16, []gpu.Memory{0, 0}, 0, on(0, 16, "a"), on(1, 16, "b", proposed, takes(4, 16))),
			request: 16, cpu: 4, want: uids{"b"},
		},
		"even among the pods of one card": {
			node:    node(16, []gpu.Memory{0}, 0, on(0, 8, "x", proposed, takes(4, 8)), on(0, 8, "y")),
			request: 8, cpu: 4, want: uids{"x"},
		},
		"the node's sum of GPU memory counts as well": {
			// Units of a card that fell ill are allocated, but no longer allocatable.
			node: func() preemption.Node {
				n := node(16, []gpu.Memory{0, 0}, 0, on(0, 16, "a", proposed), on(1, 16, "b"))
				n.Cards[0].Unhealthy, n.Free[1] = true, -16
				return n
			}(),
			request: 16, want: uids{"a", "b"},
		},
		"a proposed victim beside which nobody knows": {
			node:    node(16, []gpu.Memory{0, 0}, 9, on(0, 16, "a"), on(1, 1, "b", fixed), beside("c", fixed), on(1, 15, "d")),
			request: 16, want: uids{"b", "c", "d"},
		},
		"where our sums say no, the proposal stays": {
			node:    node(16, []gpu.Memory{0, 0}, 0, on(0, 16, "a"), on(1, 2, "b", proposed), beside("c", proposed), on(1, 14, "d")),
			request: 16, cpu: 4, want: uids{"b", "c", "d"},
		},
		"violations of others' victims are taken over": {
			node:    budgets(node(16, []gpu.Memory{0}, 0, on(0, 16, "a", guarded(0)), beside("c", fixed, uncounted), beside("d", fixed, uncounted)), 1, 0),
			request: 16, want: uids{"a", "c", "d"}, breaks: 2,
		},
		"a card with room leaves the proposal alone": {
			node:    budgets(node(16, []gpu.Memory{0, 0}, 0, on(0, 8, "a"), beside("c", proposed, takes(1, 0)), on(1, 16, "d", proposed)), 1),
			request: 8, cpu: 1, want: uids{"c", "d"}, breaks: 1,
		},
		"a card with room and no proposal: nobody has to leave": {
			node: node(16, []gpu.Memory{0}, 9, on(0, 8, "a")), request: 8,
		},
		"no proposal: newer schedulers ask that": {
			node: node(16, []gpu.Memory{0, 0}, 9, on(0, 9, "a"), on(1, 8, "b")), request: 16, want: uids{"b"},
		},
		"a pod that leaves anyway costs nothing": {
			node:    budgets(node(16, []gpu.Memory{0, 0}, 0, on(0, 16, "a", proposed, priority(-5)), on(1, 16, "b", leaving, priority(5), guarded(0))), 0, 0),
			request: 16, want: uids{"b"},
		},
		"a leaving pod that isn't needed isn't named": {
			node: node(16, []gpu.Memory{0}, 0, on(0, 8, "a", proposed), on(0, 4, "b", leaving), on(0, 4, "c", leaving)), request: 4, want: uids{"c"},
		},
		"what a nominated pod waits for isn't given out again": {node: claimed, request: 16, want: uids{"b"}},
		"an unhealthy card can't be freed":                     {node: ill, request: 16, want: uids{"b"}},
		"a card that is too small can't be freed":              {node: small, request: 16, want: uids{"b"}},
		"a pod on two cards frees its part of each": {
			node: func() preemption.Node {
				wide := preemption.Pod{UID: "w", Where: gpu.Placement{{Card: 0, Memory: 6}, {Card: 1, Memory: 10}}, Takes: preemption.Amounts{0, 16}}
				return node(16, []gpu.Memory{10, 0}, 0, wide, on(1, 6, "b", proposed))
			}(),
			request: 10, want: uids{"w"},
		},
		"no cards": {node: preemption.Node{Pods: pods{beside("a", proposed)}, Free: preemption.Amounts{0, 0}}, request: 1},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got, ok := preemption.Choose(test.node, preemption.Request{
				Memory: test.request, Others: preemption.Amounts{test.cpu, int64(test.request)},
			})
			if ok != (len(test.want) > 0) {
				t.Errorf("found: %v", ok)
			}
			if diff := cmp.Diff(preemption.Victims{Pods: test.want, Violations: test.breaks}, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
