package fairshare

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
)

func TestPoolsShares(t *testing.T) {
	// Two pools of 10 and 20. Pods of class 0 can use both, those of class 1 the first one, those of class 2 the second one.
	pools := Pools{[]gpu.Memory{10, 20}, [][]int{{0, 1}, {0}, {1}}}
	weights := func(weights ...int64) (tenants []Tenant) {
		for i, weight := range weights {
			tenants = append(tenants, Tenant{Terms: Terms{Weight: weight}, Name: fmt.Sprint(i)})
		}
		return tenants
	}
	for name, test := range map[string]struct {
		tenants []Tenant
		demands [][]gpu.Memory
		want    []gpu.Memory
	}{
		"all can use both":                              {weights(1, 2), [][]gpu.Memory{{50, 0, 0}, {50, 0, 0}}, []gpu.Memory{10, 20}},
		"one can use the first pool":                    {weights(1, 1), [][]gpu.Memory{{50, 0, 0}, {0, 50, 0}}, []gpu.Memory{20, 10}},
		"it has its share there":                        {weights(1, 1), [][]gpu.Memory{{50, 0, 0}, {0, 0, 50}}, []gpu.Memory{15, 15}},
		"two divide a pool, and others what is left":    {weights(1, 4, 1, 1), [][]gpu.Memory{{0, 50, 0}, {0, 50, 0}, {0, 0, 50}, {50, 0, 0}}, []gpu.Memory{2, 8, 10, 10}},
		"a tenant with pods of two classes":             {weights(1, 1), [][]gpu.Memory{{0, 50, 3}, {50, 0, 0}}, []gpu.Memory{13, 17}},
		"what isn't asked for in a pool goes to others": {weights(1, 1, 1), [][]gpu.Memory{{0, 4, 0}, {50, 0, 0}, {0, 0, 50}}, []gpu.Memory{4, 13, 13}},
		"less than the guaranteed amount": {
			[]Tenant{{Terms: Terms{1, 20}, Name: "0"}, {Terms: Terms{1, 0}, Name: "1"}, {Terms: Terms{1, 5}, Name: "2"}},
			[][]gpu.Memory{{0, 50, 0}, {50, 0, 0}, {50, 0, 0}}, []gpu.Memory{10, 8, 12},
		},
		"no tenant asks": {weights(1), [][]gpu.Memory{{0, 0, 0}}, []gpu.Memory{0}},
	} {
		for i := range test.tenants {
			test.tenants[i].Demand = sum(test.demands[i])
		}
		if diff := gocmp.Diff(test.want, pools.Shares(test.tenants, test.demands)); diff != "" {
			t.Errorf("%s: (-want +got)\n%s", name, diff)
		}
	}
}

func sum(amounts []gpu.Memory) (sum gpu.Memory) {
	for _, amount := range amounts {
		sum += amount
	}
	return sum
}

// randomPools returns pools and classes, each of which can use at least one pool.
func randomPools(random *rand.Rand) (p Pools) {
	for range 1 + random.IntN(4) {
		p.Sizes = append(p.Sizes, gpu.Memory(random.IntN(40)))
	}
	for range 1 + random.IntN(4) {
		class := slices.DeleteFunc(random.Perm(len(p.Sizes)), func(int) bool { return random.IntN(2) == 0 })
		if len(class) == 0 {
			class = []int{random.IntN(len(p.Sizes))}
		}
		p.Classes = append(p.Classes, class)
	}
	return p
}

// fits reports whether the shares fit the pools, by Hall's condition: all subsets of tenants and classes are tried.
func (p Pools) fits(shares []gpu.Memory, demands [][]gpu.Memory) bool {
	for classes := range 1 << len(p.Classes) {
		room, inside := gpu.Memory(0), map[int]bool{}
		for class := range p.Classes {
			if classes&(1<<class) != 0 {
				for _, pool := range p.Classes[class] {
					inside[pool] = true
				}
			}
		}
		for pool := range inside {
			room += p.Sizes[pool]
		}
		need := gpu.Memory(0) // Which can't be met outside of these classes.
		for tenant, share := range shares {
			for class, demand := range demands[tenant] {
				if classes&(1<<class) == 0 {
					share -= demand
				}
			}
			need += max(share, 0)
		}
		if need > room {
			return false
		}
	}
	return true
}

// slowShares gives unit by unit to the tenant with the least of its guaranteed amount, and then with the least in proportion to its
// weight, that can use one more beside what the others have.
func (p Pools) slowShares(tenants []Tenant, demands [][]gpu.Memory) []gpu.Memory {
	shares, full := make([]gpu.Memory, len(tenants)), make([]bool, len(tenants))
	level := func(i int) float64 { // With its next unit.
		c, guaranteed := tenants[i], min(tenants[i].Guaranteed, tenants[i].Demand)
		if shares[i] < guaranteed {
			return float64(shares[i]+1)/float64(c.Guaranteed) - 1e9
		}
		return float64(shares[i]-guaranteed+1) / float64(c.Weight)
	}
	for {
		next := -1
		for i := range tenants {
			if !full[i] && (next < 0 || level(i) < level(next)) {
				next = i
			}
		}
		if next < 0 {
			return shares
		}
		shares[next]++
		if shares[next] > tenants[next].Demand || !p.fits(shares, demands) {
			shares[next]--
			full[next] = true
		}
	}
}

// TestPoolsSharesModel compares the shares of random tenants with slow ones. Units that can't be divided go to different tenants, once
// in each step of the decomposition.
func TestPoolsSharesModel(t *testing.T) {
	for seed := range uint64(2000) {
		random := rand.New(rand.NewPCG(seed, 4))
		p := randomPools(random)
		tenants, demands := make([]Tenant, 1+random.IntN(6)), [][]gpu.Memory{}
		for i := range tenants {
			tenants[i] = Tenant{Terms{1 + random.Int64N(4), gpu.Memory(max(random.IntN(40)-20, 0))}, fmt.Sprint("t", i), 0}
			demands = append(demands, make([]gpu.Memory, len(p.Classes)))
			for class := range p.Classes {
				demands[i][class] = gpu.Memory(max(random.IntN(60)-20, 0))
			}
			tenants[i].Demand = sum(demands[i])
		}
		shares, want := p.Shares(tenants, demands), p.slowShares(tenants, demands)
		if !p.fits(shares, demands) || sum(shares) != sum(want) {
			t.Fatalf("seed %d: pools %v, tenants %v, demands %v: shares %v don't fit or leave room, want %v", seed, p, tenants, demands, shares, want)
		}
		for i := range shares {
			if off := shares[i] - want[i]; off < -2 || off > 2 {
				t.Fatalf("seed %d: pools %v, tenants %v, demands %v: shares %v, want %v", seed, p, tenants, demands, shares, want)
			}
		}
	}
}

// BenchmarkPoolsShares divides 32 pools among tenants that ask for about as much as there is. Each class of pods can use a few pools.
func BenchmarkPoolsShares(b *testing.B) {
	const pools = 32
	for _, count := range []int{50, 200, 400} {
		b.Run(fmt.Sprint(count, " tenants"), func(b *testing.B) {
			random := rand.New(rand.NewPCG(1, 1))
			p, tenants, demands := Pools{}, make([]Tenant, count), make([][]gpu.Memory, count)
			for range pools {
				p.Sizes = append(p.Sizes, gpu.Memory(500+random.IntN(4000)))
				p.Classes = append(p.Classes, random.Perm(pools)[:1+random.IntN(4)])
			}
			for i := range count {
				demands[i] = make([]gpu.Memory, pools)
				for range 3 {
					demands[i][random.IntN(pools)] = gpu.Memory(random.IntN(100_000 / count))
				}
				tenants[i] = Tenant{Terms{1 + random.Int64N(4), 0}, fmt.Sprint(i), sum(demands[i])}
			}
			for b.Loop() {
				p.Shares(tenants, demands)
			}
		})
	}
}
