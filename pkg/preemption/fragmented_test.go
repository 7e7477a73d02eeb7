package preemption_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/preemption"
)

func TestFragmented(t *testing.T) {
	request := preemption.Request{Demand: units(8), Resources: preemption.Amounts{2, 8}}
	for name, tc := range map[string]struct {
		node preemption.Node
		want bool
	}{
		"the sum has room, no card has":        {node(16, []gpu.Memory{12, 12}, 2), true},
		"a card has room":                      {node(16, []gpu.Memory{12, 8}, 2), false},
		"the sum has none":                     {node(16, []gpu.Memory{12, 13}, 2), false},
		"another resource has none":            {node(16, []gpu.Memory{12, 12}, 1), false},
		"no card is large enough, full or not": {node(4, []gpu.Memory{0, 0}, 2), false},
	} {
		if got := preemption.Fragmented(tc.node, request); got != tc.want {
			t.Errorf("%s: %t, want %t", name, got, tc.want)
		}
	}
}

func TestChooseNode(t *testing.T) {
	request := preemption.Request{Demand: units(8), Resources: preemption.Amounts{0, 8}}
	onlyCard := func(card int, uid gpu.PodUID, edits ...edit) preemption.Node {
		others := []gpu.Memory{12, 12}
		others[card] = 0
		return node(16, others, 0, on(card, 12, uid, edits...))
	}
	expensive, cheap := onlyCard(0, "expensive", priority(5)), onlyCard(1, "cheap", priority(1))
	guarded, stuck := onlyCard(1, "guarded", budgeted(0)), node(16, []gpu.Memory{12, 12}, 0)
	guarded.Budgets = []int{0}
	victims := func(at, card, violations int, uid gpu.PodUID) preemption.Candidate {
		return preemption.Candidate{Node: at, Cards: []int{card}, Victims: preemption.Victims{Pods: []gpu.PodUID{uid}, Violations: violations}}
	}
	type nodes = []preemption.Node
	for name, tc := range map[string]struct {
		nodes nodes
		want  preemption.Candidate
	}{
		"the cheapest":                   {nodes{expensive, cheap, guarded}, victims(1, 1, 0, "cheap")},
		"equal cost: the first node":     {nodes{stuck, cheap, cheap}, victims(1, 1, 0, "cheap")},
		"a budget outweighs priority":    {nodes{guarded, expensive}, victims(1, 0, 0, "expensive")},
		"an unavoidable violation":       {nodes{guarded}, victims(0, 1, 1, "guarded")},
		"no card can be freed on a node": {nodes: nodes{stuck}},
		"no nodes":                       {},
	} {
		got, ok := preemption.ChooseNode(tc.nodes, request)
		if diff := cmp.Diff(tc.want, got); diff != "" || ok != (tc.want.Pods != nil) {
			t.Errorf("%s: %t (-want +got):\n%s", name, ok, diff)
		}
	}
}
