package dispatch

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gpu"
)

// only restricts a pod to nodes.
func only(nodes string) edit { return func(p *Pod) { p.Constraints = unique.Make(nodes) } }

// old makes a pod old enough to be evicted.
func old(p *Pod) { p.Bound = begin.Add(-time.Hour) }

// withSelectors lets pods use all nodes, or those that only names.
func withSelectors(all string) func(*Options) {
	return func(o *Options) {
		o.ReclaimAfter, o.MinRuntime = after, minRuntime
		o.Nodes = nodesOf(func(constraints unique.Handle[string]) []string {
			if constraints.Value() == "" {
				return strings.Fields(all)
			}
			return strings.Fields(constraints.Value())
		})
	}
}

// Alice's pods can use n0 only, which is full with those of bob. Carol has more than its share on n1, but no pod of bob is evicted for that if
// it would have less than its share then.
func TestReclaimInRegions(t *testing.T) {
	for name, tc := range map[string]struct {
		bob []edit
		// carol is what the pods of carol are.
		carol   []edit
		evicted map[string]int
		want    map[string]gpu.Memory
		shares  map[string]gpu.Memory
	}{
		"bob's pods can use n1 too": {
			[]edit{old}, []edit{old}, map[string]int{},
			map[string]gpu.Memory{"alice": 0, "bob": 6, "carol": 12}, map[string]gpu.Memory{"alice": 6, "bob": 6, "carol": 6},
		},
		"bob's pods can use n0 only": {
			[]edit{old, only("n0")}, []edit{old}, map[string]int{"bob": 3},
			map[string]gpu.Memory{"alice": 3, "bob": 3, "carol": 12}, map[string]gpu.Memory{"alice": 3, "bob": 3, "carol": 12},
		},
		"carol's pods can't be evicted": {
			[]edit{old}, []edit{old, priority(1000)}, map[string]int{},
			map[string]gpu.Memory{"alice": 0, "bob": 6, "carol": 12}, map[string]gpu.Memory{"alice": 6, "bob": 6, "carol": 6},
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, []gpu.Memory{6, 12}, withSelectors("n0 n1"))
			f.SetNamespace("carol", Namespace{Tenant: "carol", Terms: fairshare.DefaultTerms})
			for i := range 6 {
				f.pod(fmt.Sprint("alice/", i), 1, age(i), only("n0"))
				f.pod(fmt.Sprint("bob/", i), 1, append(tc.bob, on("n0"))...)
			}
			for i := range 12 {
				f.pod(fmt.Sprint("carol/", i), 1, append(tc.carol, on("n1"))...)
			}
			shares := map[string]gpu.Memory{}
			for range 30 { // Bob and carol have controllers that create evicted pods again.
				f.run(after / 10)
				f.recreate()
			}
			evicted := map[string]int{}
			for _, name := range f.evicted {
				namespace, _, _ := strings.Cut(name, "/")
				evicted[namespace]++
			}
			for _, tenant := range f.Tenants() {
				shares[tenant.Name] = tenant.Share
			}
			want(t, "evicted", tc.evicted, evicted)
			want(t, "tenants", tc.want, f.allocated())
			want(t, "shares", tc.shares, shares)
		})
	}
}

// recreate ends the pods that are being deleted, creates new ones like them, and binds what is admitted.
func (f *fixture) recreate() {
	for name, p := range f.pods {
		if p.Leaving {
			f.delete(name)
			f.pod(name+"+", p.Request, func(next *Pod) { next.Constraints, next.Created = p.Constraints, f.now })
		}
	}
	f.tick(time.Second)
	f.bindAll()
}

// Whatever tenants have, and wherever their pods can run: after some time nothing is evicted any more.
func TestReclaimEnds(t *testing.T) {
	evicted := 0
	for seed := range uint64(40) {
		random := rand.New(rand.NewPCG(seed, 5))
		f := newFixture(t, []gpu.Memory{8, 8, 8, 8, 8, 8}, withSelectors("n0 n1 n2 n3 n4 n5"))
		f.ReclaimAfter, f.MinRuntime = 3*time.Second, 0
		pools := []string{"", "", "n0 n1", "n2 n3", "n1 n2"}
		for i, tenant := range []string{"alice", "bob", "carol", "dave", "erin"} {
			f.SetNamespace(tenant, Namespace{Tenant: tenant, Terms: fairshare.Terms{Weight: 1 + random.Int64N(3)}})
			for n := range 2 + random.IntN(16) {
				f.pod(fmt.Sprint(tenant, "/", n), gpu.Memory(1+random.IntN(4)), age(random.IntN(9)), only(pools[(i+random.IntN(2))%len(pools)]))
			}
			f.tick(time.Second)
			f.bindAll()
		}
		for range 300 {
			f.recreate()
		}
		before := len(f.evicted)
		for range 300 {
			f.recreate()
		}
		if after := len(f.evicted); after > before {
			t.Errorf("seed %d: %d evictions, and %d later", seed, before, after-before)
		}
		evicted += before
	}
	if evicted == 0 {
		t.Error("no pod was evicted")
	}
}

// A node is cordoned. What pods have there remains their tenant's.
func TestSharesOnClosedNodes(t *testing.T) {
	f := newFixture(t, []gpu.Memory{8, 8}, withSelectors("n0"))
	f.pod("bob/1", 8, on("n1"), old)
	f.pod("bob/2", 4, on("n0"), old)
	f.pod("alice/1", 4, on("n0"), old)
	f.pod("alice/2", 4)
	f.run(after + 2*time.Second)
	f.finish()
	f.run(time.Second)
	want(t, "alice gets what bob has on the other node", []string{"alice/2"}, f.admitted())
	shares := map[string]gpu.Memory{}
	for _, tenant := range f.Tenants() {
		shares[tenant.Name] = tenant.Share
	}
	want(t, "shares", map[string]gpu.Memory{"alice": 8, "bob": 8}, shares)
}

// Constraints that would make too many regions are not distinguished, and nodes are divided as the others require.
func TestRegions(t *testing.T) {
	memory := map[string]gpu.Memory{}
	for i := range 200 {
		memory[fmt.Sprint("n", i)] = 1
	}
	var constraints []unique.Handle[string]
	for i := range 2 * maxClasses {
		constraints = append(constraints, unique.Make(fmt.Sprint(i)))
	}
	r := newRegions(constraints, func(c unique.Handle[string]) []string {
		var pool int
		_, _ = fmt.Sscan(c.Value(), &pool)
		return []string{"n199", fmt.Sprint("n", 2*pool), fmt.Sprint("n", 2*pool+1)}
	}, memory)
	want(t, "classes", 1+maxClasses, len(r.Classes))
	want(t, "regions: one for each class, that of the last node, and the others", maxClasses+2, len(r.Sizes))
	want(t, "one that is distinguished", 3, int(r.Sizes[r.Classes[1][0]]+r.Sizes[r.Classes[1][1]]))
	want(t, "one that isn't distinguished", allNodes, r.classes[constraints[maxClasses]])
}
