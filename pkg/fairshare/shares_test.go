package fairshare

import (
	"fmt"
	"math/big"
	"math/rand/v2"

	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
)

func TestShares(t *testing.T) {
	tenant := func(name string, weight int64, guaranteed, demand gpu.Memory) Tenant {
		return Tenant{Terms{weight, guaranteed}, name, demand}
	}
	for name, test := range map[string]struct {
		total   gpu.Memory
		tenants []Tenant
		want    []gpu.Memory
	}{
		"no tenants":                            {10, nil, []gpu.Memory{}},
		"halves":                                {10, []Tenant{tenant("alice", 1, 0, 100), tenant("bob", 1, 0, 100)}, []gpu.Memory{5, 5}},
		"by weight":                             {12, []Tenant{tenant("alice", 3, 0, 100), tenant("bob", 1, 0, 100)}, []gpu.Memory{9, 3}},
		"what one doesn't need":                 {12, []Tenant{tenant("alice", 1, 0, 2), tenant("bob", 1, 0, 100), tenant("carol", 1, 0, 100)}, []gpu.Memory{2, 5, 5}},
		"more than all need":                    {12, []Tenant{tenant("alice", 1, 0, 2), tenant("bob", 5, 0, 3)}, []gpu.Memory{2, 3}},
		"the guaranteed amount comes first":     {12, []Tenant{tenant("alice", 1, 8, 100), tenant("bob", 1, 0, 100)}, []gpu.Memory{10, 2}},
		"a guarantee that isn't used":           {12, []Tenant{tenant("alice", 1, 8, 3), tenant("bob", 1, 0, 100)}, []gpu.Memory{3, 9}},
		"more guaranteed than there is":         {9, []Tenant{tenant("alice", 9, 12, 100), tenant("bob", 1, 6, 100), tenant("carol", 1, 0, 100)}, []gpu.Memory{6, 3, 0}},
		"a unit that can't be divided, by name": {5, []Tenant{tenant("bob", 1, 0, 100), tenant("alice", 1, 0, 100)}, []gpu.Memory{2, 3}},
		"units to those that lost most":         {10, []Tenant{tenant("alice", 1, 0, 100), tenant("bob", 2, 0, 100), tenant("carol", 3, 0, 100)}, []gpu.Memory{2, 3, 5}},
		"the example in docs/fair-share.md":     {64, []Tenant{tenant("vision", 2, 0, 100), tenant("speech", 1, 32, 100), tenant("web", 1, 0, 100)}, []gpu.Memory{16, 40, 8}},
		"huge amounts": {1 << 62, []Tenant{tenant("alice", MaxWeight, 0, 1<<62), tenant("bob", MaxWeight, 0, 1<<62)},
			[]gpu.Memory{1 << 61, 1 << 61}},
	} {
		if diff := gocmp.Diff(test.want, Shares(test.total, test.tenants)); diff != "" {
			t.Errorf("%s: (-want +got)\n%s", name, diff)
		}
	}
}

// idealShares are the shares without rounding, by the definition: the level rises for all tenants at once, each gets level times
// weight, and a tenant that has what it demands gets no more.
func idealShares(total gpu.Memory, tenants []Tenant) []*big.Rat {
	shares := make([]*big.Rat, len(tenants))
	for i := range shares {
		shares[i] = new(big.Rat)
	}
	rat := func(n gpu.Memory) *big.Rat { return new(big.Rat).SetInt64(int64(n)) }
	left := rat(total)
	pour := func(weight func(Tenant) int64, limit func(Tenant) gpu.Memory) {
		for left.Sign() > 0 {
			var weights int64
			var step *big.Rat // By which the level rises until the next tenant has its limit.
			for i, c := range tenants {
				room := new(big.Rat).Sub(rat(limit(c)), shares[i])
				if room.Sign() <= 0 || weight(c) == 0 {
					continue
				}
				weights += weight(c)
				if until := room.Quo(room, new(big.Rat).SetInt64(weight(c))); step == nil || until.Cmp(step) < 0 {
					step = until
				}
			}
			if step == nil {
				return
			}
			if all := new(big.Rat).Quo(left, new(big.Rat).SetInt64(weights)); all.Cmp(step) < 0 {
				step = all
			}
			for i, c := range tenants {
				if shares[i].Cmp(rat(limit(c))) < 0 && weight(c) > 0 {
					part := new(big.Rat).Mul(step, new(big.Rat).SetInt64(weight(c)))
					shares[i].Add(shares[i], part)
					left.Sub(left, part)
				}
			}
		}
	}
	pour(func(c Tenant) int64 { return int64(c.Guaranteed) }, func(c Tenant) gpu.Memory { return min(c.Guaranteed, c.Demand) })
	pour(func(c Tenant) int64 { return c.Weight }, func(c Tenant) gpu.Memory { return c.Demand })
	return shares
}

// TestSharesModel compares random shares with the definition: each step of the division rounds to whole units, and the shares
// add up exactly, don't exceed the demands, and don't depend on the order of the tenants.
func TestSharesModel(t *testing.T) {
	for seed := range uint64(3000) {
		random := rand.New(rand.NewPCG(seed, 1))
		tenants := make([]Tenant, 1+random.IntN(8))
		var demands gpu.Memory
		for i := range tenants {
			tenants[i] = Tenant{Terms{1 + random.Int64N(5), gpu.Memory(max(random.IntN(40)-20, 0))}, fmt.Sprint("t", i), gpu.Memory(random.IntN(60))}
			demands += tenants[i].Demand
		}
		total := gpu.Memory(random.IntN(200))
		shares, ideal := Shares(total, tenants), idealShares(total, tenants)
		var sum gpu.Memory
		for i, share := range shares {
			sum += share
			off := new(big.Rat).Sub(new(big.Rat).SetInt64(int64(share)), ideal[i])
			if off.Abs(off).Cmp(big.NewRat(1, 1)) >= 0 || share > tenants[i].Demand {
				t.Fatalf("seed %d: total %d, tenants %v: shares %v, want about %v", seed, total, tenants, shares, ideal)
			}
		}
		if sum != min(total, demands) {
			t.Fatalf("seed %d: total %d, tenants %v: shares %v add up to %d", seed, total, tenants, shares, sum)
		}
		order := random.Perm(len(tenants))
		shuffled := make([]Tenant, len(tenants))
		for i, from := range order {
			shuffled[i] = tenants[from]
		}
		for i, share := range Shares(total, shuffled) {
			if share != shares[order[i]] {
				t.Fatalf("seed %d: in another order %s gets %d instead of %d", seed, shuffled[i].Name, share, shares[order[i]])
			}
		}
	}
}
