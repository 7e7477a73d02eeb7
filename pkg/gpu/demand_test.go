package gpu

import (
	"math"
	"testing"
)

func TestDemand(t *testing.T) {
	for name, tc := range map[string]struct {
		pod   Pod
		want  Demand
		total Memory
	}{
		"one card by default": {Pod{Request: 8}, Demand{1, 8, 0, 1, false, 0, Limits{}}, 8},
		"one card, named":     {Pod{Request: 8, Cards: 1, Cores: 30}, Demand{1, 8, 30, 1, false, 0, Limits{}}, 8},
		"two cards, of which each container has a share": {Pod{Request: 8, Cards: 2, Cores: 60, Containers: 3}, Demand{2, 4, 30, 3, false, 0, Limits{}}, 8},
		"shared memory of its own":                       {Pod{Request: 8, SharedMemory: true}, Demand{1, 8, 0, 1, true, 0, Limits{}}, 8},
		"near an adapter":                                {Pod{Request: 8, Cards: 2, RDMA: RDMARequired}, Demand{2, 4, 0, 1, false, RDMARequired, Limits{}}, 8},
		"what can't be divided is rounded up":            {Pod{Request: 7, Cards: 2, Cores: 5}, Demand{2, 4, 3, 1, false, 0, Limits{}}, 8},
		"less than one unit for each card":               {Pod{Request: 1, Cards: 3}, Demand{3, 1, 0, 1, false, 0, Limits{}}, 3},
		"the largest amounts":                            {Pod{Request: math.MaxInt64, Cards: 2, Cores: math.MaxInt32}, Demand{2, 1 << 62, 1 << 30, 1, false, 0, Limits{}}, math.MaxInt64},
		"a negative number of cards counts as none":      {Pod{Request: 8, Cards: -1}, Demand{1, 8, 0, 1, false, 0, Limits{}}, 8},
	} {
		expect(t, name, tc.want, tc.pod.Demand())
		expect(t, name+": total", tc.total, tc.want.Total())
	}
	expect(t, "the placement of a demand", Placement{{Card: 3, Memory: 4, Cores: 30, Containers: 1}, {Card: 1, Memory: 4, Cores: 30, Containers: 1}}, Demand{2, 4, 30, 1, false, 0, Limits{}}.On(3, 1))
	expect(t, "its cards", []int{3, 1}, Demand{2, 4, 30, 1, false, 0, Limits{}}.On(3, 1).Cards())
}

func TestCoresArithmetic(t *testing.T) {
	for name, tc := range map[string]struct{ got, want Cores }{
		"a negative amount is zero":                   {NewCores(-1), 0},
		"an amount past 32 bits is the largest":       {NewCores(math.MaxInt64), math.MaxInt32},
		"a sum":                                       {Cores(30).Add(70), 100},
		"a sum that would wrap is the largest amount": {Cores(math.MaxInt32).Add(1), math.MaxInt32},
		"a difference":                                {Cores(100).Sub(30), 70},
		"a difference that would be negative is zero": {Cores(30).Sub(100), 0},
	} {
		expect(t, name, tc.want, tc.got)
	}
	expect(t, "text", "30", Cores(30).String())
}
