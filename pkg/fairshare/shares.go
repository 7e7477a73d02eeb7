package fairshare

import (
	"cmp"
	"math/bits"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// The largest values that Terms can have. They keep sums over tenants within 64 bits.
const (
	MaxWeight     = 1_000_000
	MaxGuaranteed = gpu.Memory(1) << 40
)

// Terms are what an administrator grants a tenant.
type Terms struct {
	// Weight is the tenant's part of what is left when the guaranteed amounts are met, in proportion to the weights of the
	// others. It is from 1 to MaxWeight.
	Weight int64
	// Guaranteed is the amount that the tenant gets before others get more than theirs; MaxGuaranteed at most.
	Guaranteed gpu.Memory
}

// DefaultTerms are those of a tenant for which nothing is set.
var DefaultTerms = Terms{Weight: 1}

// Claim is what a tenant claims of the memory that is divided.
type Claim struct {
	Terms
	// Name orders tenants with equal claims, so that the shares don't depend on the order of the claims.
	Name string
	// Demand is the amount that the tenant could use: what it has, and what its pods wait for.
	Demand gpu.Memory
}

// Shares divides total among the claims, to the unit, and returns the shares in the order of the claims. Each tenant gets its
// guaranteed amount first; if total doesn't suffice for that, in proportion to the guaranteed amounts. What is left is divided
// by weight. No share exceeds the demand. The shares add up to total, or to the sum of the demands if that is less.
func Shares(total gpu.Memory, claims []Claim) []gpu.Memory {
	shares := make([]gpu.Memory, len(claims))
	byGuarantee, byWeight := make([]vessel, len(claims)), make([]vessel, len(claims))
	for i, c := range claims {
		byGuarantee[i] = vessel{name: c.Name, weight: uint64(c.Guaranteed), size: min(c.Guaranteed, c.Demand), level: &shares[i]}
	}
	left := fill(total, byGuarantee)
	for i, c := range claims {
		byWeight[i] = vessel{name: c.Name, weight: uint64(max(c.Weight, 1)), size: c.Demand.Sub(shares[i]), level: &shares[i]}
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
	// rest is the part of a unit that is cut off, see fill.
	rest uint64
}

// fill divides the room among the vessels in proportion to their weights, none beyond its size, and returns what is left when
// all are full. Parts of units are cut off, and the units that this leaves go to the vessels that lost most by it.
func fill(room gpu.Memory, vessels []vessel) (left gpu.Memory) {
	vessels = slices.DeleteFunc(vessels, func(v vessel) bool { return v.size == 0 || v.weight == 0 })
	// Those that are full first, in this order.
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
