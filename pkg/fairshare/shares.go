package fairshare

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"
	"strconv"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// The largest values that Terms can have. They keep sums over tenants within 64 bits.
const (
	MaxWeight     = 1_000_000
	MaxGuaranteed = gpu.Memory(1) << 40
)

// Terms are the settings of a tenant, which an administrator makes.
type Terms struct {
	// Weight determines how the memory that is left after the guaranteed amounts is divided: in proportion to the weights. It is from 1 to
	// MaxWeight.
	Weight int64 `json:"weight"`
	// Guaranteed is the amount that the tenant gets before any tenant gets more than its own guaranteed amount; MaxGuaranteed at most.
	Guaranteed gpu.Memory `json:"guaranteed"`
}

// DefaultTerms are those of a tenant for which nothing is set.
var DefaultTerms = Terms{Weight: 1}

// Tenant is one of those among which memory is divided.
type Tenant struct {
	Terms
	// Name orders tenants that are equal otherwise, so that the shares don't depend on the order of the tenants.
	Name string
	// Demand is the amount that the tenant could use: the memory that its pods have, and the memory that its waiting pods request.
	Demand gpu.Memory
}

// Shares divides total among the tenants, in whole units, and returns the shares in the order of the tenants. Each tenant gets its
// guaranteed amount first; if total is too small for all of them, it is divided in proportion to the guaranteed amounts. The rest is divided
// by weight. No share exceeds the demand. The shares add up to total, or to the sum of the demands if that is less.
func Shares(total gpu.Memory, tenants []Tenant) []gpu.Memory {
	shares := make([]gpu.Memory, len(tenants))
	byGuarantee, byWeight := make([]vessel, len(tenants)), make([]vessel, len(tenants))
	for i, t := range tenants {
		byGuarantee[i] = vessel{name: t.Name, weight: uint64(t.Guaranteed), size: min(t.Guaranteed, t.Demand), level: &shares[i]}
	}
	left := fill(total, byGuarantee)
	for i, t := range tenants {
		byWeight[i] = vessel{name: t.Name, weight: uint64(max(t.Weight, 1)), size: t.Demand.Sub(shares[i]), level: &shares[i]}
	}
	fill(left, byWeight)
	return shares
}

// vessel is a tenant in one step of the division: it holds size at most, and fills in proportion to weight.
type vessel struct {
	name   string
	weight uint64
	size   gpu.Memory
	level  *gpu.Memory
	// rest is the fraction of a unit that was lost by rounding, see fill.
	rest uint64
}

// fill divides room among the vessels in proportion to their weights. No vessel gets more than its size. fill returns what is left when
// all vessels are full. Fractions of units are rounded down. The units that are left by that go to the vessels that lost most by the rounding.
func fill(room gpu.Memory, vessels []vessel) (left gpu.Memory) {
	vessels = slices.DeleteFunc(vessels, func(v vessel) bool { return v.size == 0 || v.weight == 0 })
	// The order in which the vessels become full.
	slices.SortFunc(vessels, func(a, b vessel) int {
		return cmp.Or(compareRatios(uint64(a.size), a.weight, uint64(b.size), b.weight), cmp.Compare(a.name, b.name))
	})
	var weights uint64
	for _, v := range vessels {
		weights += v.weight
	}
	for len(vessels) > 0 && compareRatios(uint64(vessels[0].size), vessels[0].weight, uint64(room), weights) <= 0 {
		v := vessels[0]
		*v.level = v.level.Add(v.size)
		room, weights, vessels = room.Sub(v.size), weights-v.weight, vessels[1:]
	}
	if len(vessels) == 0 {
		return room
	}
	divided := gpu.Memory(0)
	for i := range vessels {
		v := &vessels[i]
		high, low := bits.Mul64(uint64(room), v.weight)
		part, rest := bits.Div64(high, low, weights) // It can't overflow, because the weight is one of the weights.
		v.rest = rest
		*v.level, divided = v.level.Add(gpu.Memory(part)), divided.Add(gpu.Memory(part))
	}
	slices.SortFunc(vessels, func(a, b vessel) int { return cmp.Or(cmp.Compare(b.rest, a.rest), cmp.Compare(a.name, b.name)) })
	for i := range int(room.Sub(divided)) { // Fewer than there are vessels, none of which is full.
		*vessels[i].level = vessels[i].level.Add(1)
	}
	return 0
}

// compareRatios compares a/b with c/d. b and d are positive.
func compareRatios(a, b, c, d uint64) int {
	high, low := bits.Mul64(a, d)
	otherHigh, otherLow := bits.Mul64(c, b)
	return cmp.Or(cmp.Compare(high, otherHigh), cmp.Compare(low, otherLow))
}

// ParseWeight parses a tenant's weight: a whole number from 1 to MaxWeight.
func ParseWeight(text string) (int64, error) { return parse(text, 1, MaxWeight) }

// ParseGuaranteed parses a tenant's guaranteed amount: a whole number of units from 0 to MaxGuaranteed.
func ParseGuaranteed(text string) (gpu.Memory, error) {
	amount, err := parse(text, 0, int64(MaxGuaranteed))
	return gpu.Memory(amount), err
}

func parse(text string, least, most int64) (int64, error) {
	number, err := strconv.ParseInt(text, 10, 64)
	if err != nil || number < least || number > most {
		return 0, fmt.Errorf("%.32q is not a whole number from %d to %d", text, least, most)
	}
	return number, nil
}
