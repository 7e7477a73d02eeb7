package preemption

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// cardsOf returns cards with 16 units each, of which the given amounts are used.
func cardsOf(used ...gpu.Memory) []placement.Card {
	cards := make([]placement.Card, len(used))
	for i := range used {
		cards[i] = placement.Card{Index: i, Memory: 16, Used: used[i]}
	}
	return cards
}

func TestFragmented(t *testing.T) {
	request := Request{Memory: 8, Resources: Amounts{8, 2}}
	for name, test := range map[string]struct {
		node Node
		want bool
	}{
		"the sum has room, no card has":        {Node{Cards: cardsOf(12, 12), Free: Amounts{8, 2}}, true},
		"a card has room":                      {Node{Cards: cardsOf(12, 8), Free: Amounts{12, 2}}, false},
		"the sum has none":                     {Node{Cards: cardsOf(12, 13), Free: Amounts{7, 2}}, false},
		"another resource has none":            {Node{Cards: cardsOf(12, 12), Free: Amounts{8, 1}}, false},
		"no card is large enough, full or not": {Node{Cards: []placement.Card{{Memory: 4}, {Index: 1, Memory: 4}}, Free: Amounts{8, 2}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := Fragmented(test.node, request); got != test.want {
				t.Errorf("%v, want %v", got, test.want)
			}
		})
	}
}

func TestChooseNode(t *testing.T) {
	request := Request{Memory: 8, Resources: Amounts{8}}
	podOn := func(uid string, card int, memory gpu.Memory, priority int32, budgets ...int) Pod {
		return Pod{UID: gpu.PodUID(uid), Priority: priority, Placement: gpu.On(card, memory), Requests: Amounts{int64(memory)}, Budgets: budgets}
	}
	expensive := Node{Cards: cardsOf(12, 12), Free: Amounts{8}, Pods: []Pod{podOn("expensive", 0, 12, 5)}}
	cheap := Node{Cards: cardsOf(12, 12), Free: Amounts{8}, Pods: []Pod{podOn("cheap", 1, 12, 1)}}
	guarded := Node{Cards: cardsOf(12, 12), Free: Amounts{8}, Pods: []Pod{podOn("guarded", 1, 12, 0, 0)}, Budgets: []int{0}}
	stuck := Node{Cards: cardsOf(12, 12), Free: Amounts{8}}
	for name, test := range map[string]struct {
		nodes []Node
		want  Candidate
		ok    bool
	}{
		"the cheapest":                  {[]Node{expensive, cheap, guarded}, Candidate{1, 1, Victims{Pods: []gpu.PodUID{"cheap"}}}, true},
		"equal cost: the first node":    {[]Node{stuck, cheap, cheap}, Candidate{1, 1, Victims{Pods: []gpu.PodUID{"cheap"}}}, true},
		"a budget outweighs priority":   {[]Node{guarded, expensive}, Candidate{1, 0, Victims{Pods: []gpu.PodUID{"expensive"}}}, true},
		"an unavoidable violation":      {[]Node{guarded}, Candidate{0, 1, Victims{Pods: []gpu.PodUID{"guarded"}, Violations: 1}}, true},
		"no card can be freed anywhere": {[]Node{stuck}, Candidate{}, false},
		"no nodes":                      {nil, Candidate{}, false},
	} {
		t.Run(name, func(t *testing.T) {
			got, ok := ChooseNode(test.nodes, request)
			if diff := cmp.Diff(test.want, got); diff != "" || ok != test.ok {
				t.Errorf("%v (-want +got):\n%s", ok, diff)
			}
		})
	}
}
