package gpu

import (
	"math"
	"testing"

	"github.com/gpushare/gpushare/test/check"
)

func TestMemoryArithmetic(t *testing.T) {
	for name, tc := range map[string]struct{ got, want Memory }{
		"a negative amount is zero":                          {NewMemory(-1), 0},
		"the smallest negative amount is zero":               {NewMemory(math.MinInt64), 0},
		"a sum":                                              {Memory(4069).Add(4069), 8138},
		"a sum of the largest amount and zero":               {Memory(math.MaxInt64).Add(0), math.MaxInt64},
		"a sum that would wrap is the largest amount":        {Memory(math.MaxInt64).Add(1), math.MaxInt64},
		"a sum of two largest amounts is the largest amount": {Memory(math.MaxInt64).Add(math.MaxInt64), math.MaxInt64},
		"a difference":                                       {Memory(16276).Sub(12207), 4069},
		"a difference that would be negative is zero":        {Memory(4069).Sub(8138), 0},
		"zero minus the largest amount is zero":              {Memory(0).Sub(math.MaxInt64), 0},
		"the largest amount minus itself is zero":            {Memory(math.MaxInt64).Sub(math.MaxInt64), 0},
		"a placement's total is the sum over its cards":      {Placement{{Card: 0, Memory: 4069}, {Card: 3, Memory: 4069}}.Total(), 8138},
		"a placement's total saturates":                      {Placement{{Card: 0, Memory: math.MaxInt64}, {Card: 1, Memory: 1}}.Total(), math.MaxInt64},
		"an empty placement has a total of zero":             {Placement(nil).Total(), 0},
	} {
		expect(t, name, tc.want, tc.got)
	}
}

func TestString(t *testing.T) {
	for name, tc := range map[string]struct{ got, want string }{
		"memory":        {Memory(8138).String(), "8138"},
		"one card":      {On(1, 8138).String(), "card 1"},
		"several cards": {Placement{{Card: 0, Memory: 1}, {Card: 2, Memory: 1}}.String(), "cards 0, 2"},
		"no card":       {Placement{}.String(), "no card"},
		"a pod":         {Pod{UID: "u", Namespace: "default", Name: "binpack-1"}.String(), "default/binpack-1"},
	} {
		expect(t, name, tc.want, tc.got)
	}
}

func TestPlacementEqual(t *testing.T) {
	for name, tc := range map[string]struct {
		a, b Placement
		want bool
	}{
		"the same card and memory":        {On(1, 8138), On(1, 8138), true},
		"another card":                    {On(1, 8138), On(2, 8138), false},
		"other memory":                    {On(1, 8138), On(1, 4069), false},
		"the same cards in another order": {Placement{{Card: 0, Memory: 1}, {Card: 1, Memory: 1}}, Placement{{Card: 1, Memory: 1}, {Card: 0, Memory: 1}}, false},
		"a nil and an empty placement":    {nil, Placement{}, true},
		"a placement and nil":             {On(0, 0), nil, false},
		"an additional card":              {On(0, 1), Placement{{Card: 0, Memory: 1}, {Card: 1, Memory: 1}}, false},
	} {
		expect(t, name, tc.want, tc.a.Equal(tc.b))
		expect(t, name+", with swapped arguments", tc.want, tc.b.Equal(tc.a))
	}
}

func TestCardHealthy(t *testing.T) {
	expect(t, "without a reason", true, Card{Index: 3}.Healthy())
	expect(t, "with a Xid", false, Card{Unhealthy: "Xid 79"}.Healthy())
}

var expect = check.Equal
