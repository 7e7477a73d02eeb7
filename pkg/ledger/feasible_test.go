package ledger_test

import (
	"slices"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// Do pods fit nodes n1 (two cards of 16) and n2 (one of 8) together, which are full?
func TestFitsEmpty(t *testing.T) {
	all := []string{"n1", "n2", "unknown"}
	several := pod("several", 20)
	several.Cards = 2
	for name, test := range map[string]struct {
		pods  []gpu.Pod
		nodes []string
		slots map[string]int
		want  bool
	}{
		"the largest": {[]gpu.Pod{pod("p", 16)}, all, nil, true},
		"too large":   {[]gpu.Pod{pod("p", 17)}, all, nil, false},
		"too large for the nodes that it can use": {[]gpu.Pod{pod("p", 9)}, all[1:], nil, false},
		"two cards":                               {[]gpu.Pod{several}, all, nil, true},
		"as much as there is":                     {[]gpu.Pod{pod("p", 16), pod("q", 16), pod("r", 8)}, all, nil, true},
		"more than there is":                      {[]gpu.Pod{pod("p", 16), pod("q", 16), pod("r", 9)}, all, nil, false},
		"a smaller one after one that fits later": {[]gpu.Pod{pod("p", 12), pod("q", 12), pod("r", 5), pod("s", 4)}, all, nil, true},
		"too little of anything else":             {[]gpu.Pod{pod("p", 1), pod("q", 1)}, all[:1], map[string]int{"n1": 1}, false},
		"enough of it on two nodes":               {[]gpu.Pod{pod("p", 1), pod("q", 1)}, all, map[string]int{"n1": 1, "n2": 1}, true},
	} {
		var resources ledger.Resources
		if test.slots != nil {
			resources = &slots{free: test.slots}
		}
		f := newFixtureWith(t, resources, spec(16, 16), spec(8))
		f.bind("n1", 0, pod("a", 16))
		f.bind("n1", 1, pod("b", 16))
		f.bind("n2", 0, pod("c", 8))
		var requests []ledger.Request
		for _, p := range test.pods {
			requests = append(requests, ledger.Request{Pod: p, Nodes: slices.Clip(test.nodes)})
		}
		if got := f.FitsEmpty(requests); got != test.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
