package placement

import (
	"testing"
	"unique"

	"github.com/gpushare/gpushare/pkg/gpu"
)

func TestStrandedText(t *testing.T) {
	for _, tc := range []struct {
		stranded Stranded
		unit     gpu.Unit
		want     string
	}{
		{Stranded{}, gpu.GiB, ""},
		{Stranded{ShortOfCPU: 12}, gpu.GiB, "12 GiB free, of no use: the node lacks CPU"},
		{
			Stranded{ShortOfNodeMemory: 512, ShortOfBoth: 1024}, gpu.MiB,
			"512 MiB free, of no use: the node lacks node memory; 1024 MiB free, of no use: the node lacks CPU and node memory",
		},
	} {
		if got := tc.stranded.Text(tc.unit); got != tc.want {
			t.Errorf("%v: %q, want %q", tc.stranded, got, tc.want)
		}
	}
}

func TestStranded(t *testing.T) {
	small, large, pinned := asks(1, 4, 1000), asks(2, 16, 8000), asks(1, 8, 1000)
	small.NodeMemory, pinned.Constraints = 1<<30, unique.Make("elsewhere")
	poor := roomWith(64000, 8, 16)
	poor.NodeMemory = 1 << 20
	neither := roomWith(500, 8, 16)
	neither.NodeMemory = 1 << 20
	sick := roomWith(0, 8, 16)
	sick.Cards[1].Unhealthy = true
	excluded := roomWith(64000, 8)
	excluded.Excluded = 1
	for name, tc := range map[string]struct {
		kinds []Kind
		node  NodeRoom
		want  Stranded
	}{
		"all can be used":                        {kindsOf(small, large), roomWith(64000, 8, 16), Stranded{}},
		"a small pod can use what is left":       {kindsOf(small, large), roomWith(1000, 16, 16), Stranded{}},
		"no CPU":                                 {kindsOf(small, large), roomWith(500, 8, 16, 0), Stranded{ShortOfCPU: 24}},
		"no memory of the node":                  {kindsOf(small), poor, Stranded{ShortOfNodeMemory: 24}},
		"neither":                                {kindsOf(small), neither, Stranded{ShortOfBoth: 24}},
		"what is too little is fragmentation":    {kindsOf(small), roomWith(0, 3, 4), Stranded{ShortOfCPU: 4}},
		"a card for a pod that needs two":        {kindsOf(large), roomWith(0, 16, 8), Stranded{}},
		"two cards, and too little CPU for them": {kindsOf(large), roomWith(7000, 16, 16), Stranded{ShortOfCPU: 32}},
		"an unhealthy card":                      {kindsOf(small), sick, Stranded{ShortOfCPU: 8}},
		"pods that can't use the node":           {kindsOf(pinned), excluded, Stranded{}},
		"more than the usual number of cards":    {kindsOf(small), roomWith(0, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4), Stranded{ShortOfCPU: 40}},
	} {
		o := NewOutlook(tc.kinds, 0, Binpack, []NodeRoom{tc.node})
		if got := o.Stranded(&tc.node); got != tc.want {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}
