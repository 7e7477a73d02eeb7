package dispatch

import (
	"fmt"
	"slices"
	"testing"
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
)

// manyKinds is more kinds than a round tries of one tenant.
const manyKinds = 20 * maxSearches

// unlike adds a gated pod that is like no other one.
func (f *fixture) unlike(name string, memory gpu.Memory, edits ...edit) {
	f.pod(name, memory, edits...)
	p := f.pods[name]
	p.RoomKey = unique.Make(name)
	f.pods[name] = p
	f.SetPod(p)
}

// More kinds than a round tries wait of each of two tenants, and something changes before each round. Another tenant, which comes after both, gets
// room as soon as there is some.
func TestTurnBehindManyKinds(t *testing.T) {
	for name, change := range map[string]func(f *fixture, n int){
		"nothing changes":           func(*fixture, int) {},
		"nodes change":              func(f *fixture, _ int) { f.NodesChanged() },
		"something else is freed":   func(f *fixture, _ int) { f.Freed("n1") },
		"more pods of these come":   func(f *fixture, n int) { f.unlike(fmt.Sprint("alice/more-", n), 5) },
		"all of these come at once": func(*fixture, int) {},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, []gpu.Memory{16, 4}, nil)
			f.SetNamespace("carol", Namespace{Tenant: "carol", Terms: fairshare.DefaultTerms})
			f.pod("carol/has", 12, on("n0"))
			f.pod("carol/ends", 4, on("n0"), age(-1))
			f.pod("bob/has", 2, on("n1"))
			f.pod("alice/has", 2, on("n1"))
			f.pod("carol/waits", 4, age(1))
			f.tick(time.Second)
			for i := range manyKinds {
				f.unlike(fmt.Sprint("alice/", i), 5)
				f.unlike(fmt.Sprint("bob/", i), 5)
			}
			if name != "all of these come at once" {
				for range 20 {
					f.tick(100 * time.Millisecond)
				}
			}
			f.delete("carol/ends")
			ticks := 0
			for ; len(f.granted) == 0 && ticks < 100; ticks++ {
				change(f, ticks)
				f.tick(100 * time.Millisecond)
			}
			want(t, "granted", []string{"carol/waits"}, f.granted)
			if ticks > 4 {
				t.Errorf("after %d ticks", ticks)
			}
		})
	}
}

// However many nodes change between two ticks, pods that fit are granted.
func TestNodesThatChange(t *testing.T) {
	const nodes = 200
	f := &constraintsFixture{cluster: eligibility.NewCluster()}
	f.fixture = newFixture(t, nil, func(o *Options) { o.Nodes = f.cluster })
	report := func() {
		for i := range nodes {
			f.node(fmt.Sprint("n", i), "first", 4)
		}
	}
	report()
	for i := range 10 {
		name := fmt.Sprint("alice/", i)
		f.in("first", "", name, 4)
		report()
		f.tick(100 * time.Millisecond)
		want(t, "granted", i+1, len(f.granted))
	}
}

// A pod has waited so long for room that an autoscaler may see it. Now a node has come, but the round ends before the pod has its turn: its gate
// stays closed until it gets its place.
func TestGateBeforeTurn(t *testing.T) {
	f := newFixture(t, []gpu.Memory{4, 4}, func(o *Options) { o.Provisioning = 1 })
	f.SetNamespace("carol", Namespace{Tenant: "carol", Terms: fairshare.DefaultTerms})
	f.pod("alice/has", 2, on("n0"))
	f.pod("bob/has", 2, on("n0"))
	f.pod("carol/has", 4, on("n1"))
	f.pod("carol/waits", 4)
	for range provisionAfter/time.Second - 1 {
		f.tick(time.Second)
	}
	for i := range manyKinds {
		f.unlike(fmt.Sprint("alice/", i), 5)
		f.unlike(fmt.Sprint("bob/", i), 5)
	}
	f.delete("carol/has")
	f.NodesChanged()
	for ticks := 0; f.pods["carol/waits"].Gated; ticks++ {
		if ticks == 20 {
			t.Fatal("its gate stays closed")
		}
		f.tick(time.Second)
	}
	want(t, "granted", true, f.IsAdmitted(f.pods["carol/waits"].Pod))
}

// Something is freed while a tenant has so many open pods that its items aren't tried. They are tried there once pods are bound.
func TestFreedBeforeTurn(t *testing.T) {
	f := newFixture(t, []gpu.Memory{4, maxOpen / 2}, nil)
	f.SetNamespace("carol", Namespace{Tenant: "carol", Exempt: true})
	f.pod("carol/1", 4, on("n0"))
	f.pod("carol/2", maxOpen/2, on("n1"))
	f.pod("alice/large", 4, age(1))
	f.tick(0)
	for i := range maxOpen / 2 {
		f.pod(fmt.Sprint("alice/", i), 1)
	}
	f.delete("carol/2")
	f.tick(100 * time.Millisecond)
	want(t, "open", maxOpen/2, len(f.admitted()))
	f.delete("carol/1")
	f.tick(100 * time.Millisecond)
	f.tick(100 * time.Millisecond)
	f.bindAll()
	f.tick(100 * time.Millisecond)
	want(t, "admitted", []string{"alice/large"}, f.admitted())
}

// Something is freed on more nodes than are listed while more kinds than a round tries wait: in the end there is nothing left to try.
func TestManyFreedAndManyKinds(t *testing.T) {
	f := newFixture(t, slices.Repeat([]gpu.Memory{4}, 2*maxFreed), nil)
	for i := range manyKinds {
		f.unlike(fmt.Sprint("alice/", i), 5)
	}
	for i := range 2 * maxFreed {
		f.Freed(fmt.Sprint("n", i))
	}
	for range 30 {
		f.tick(100 * time.Millisecond)
	}
	want(t, "unfinished", 0, len(f.unfinished))
}

// Something is freed while more groups wait than a round tries, each of its own kind. Each of them is tried there, and in the end there is
// nothing left to try.
func TestFreedAndManyGroups(t *testing.T) {
	f := newFixture(t, []gpu.Memory{4, 4}, nil)
	f.SetNamespace("carol", Namespace{Tenant: "carol", Exempt: true})
	f.pod("carol/1", 4, on("n0"))
	f.pod("carol/2", 4, on("n1"))
	for i := range 4 * maxSearches {
		group := fmt.Sprint(i)
		f.groups.sizes[group] = 2
		for member := range 2 {
			f.unlike(fmt.Sprint("alice/", group, "-", member), 4, inGroup(group))
		}
	}
	for range 10 {
		f.tick(100 * time.Millisecond)
	}
	want(t, "unfinished", 0, len(f.unfinished))
	freed := f.rounds
	f.Freed("n1")
	for range 10 {
		f.tick(100 * time.Millisecond)
	}
	want(t, "unfinished after something was freed", 0, len(f.unfinished))
	for id, it := range f.items {
		if it.kind.searchedIn <= freed {
			t.Errorf("%s was not tried", id)
		}
	}
}

// Many tenants wait with many kinds each. A round tries a bounded number of them, and each gets its turn.
func TestRoundOfManyTenants(t *testing.T) {
	const tenants, ofEach = 40, 40
	f := newFixture(t, []gpu.Memory{4}, nil)
	for i := range tenants * ofEach {
		name := fmt.Sprint("t", i%tenants)
		f.SetNamespace(name, Namespace{Tenant: name})
		f.unlike(fmt.Sprint(name, "/", i), 5)
	}
	for range tenants*ofEach/maxSearches + 20 {
		f.tick(20 * time.Millisecond)
		tried := 0
		for _, it := range f.items {
			if it.kind.searchedIn == f.rounds {
				tried++
			}
		}
		if tried > 3*maxSearches {
			t.Fatalf("a round has tried all nodes for %d items", tried)
		}
	}
	for _, it := range f.items {
		if it.kind.searchedIn == 0 {
			t.Fatalf("%s had no turn", it.ID)
		}
	}
}

// A tenant has so many kinds that its first item is due again before all others were tried. The item gets what is freed meanwhile.
func TestFreedWhileOthersAreTried(t *testing.T) {
	f := newFixture(t, []gpu.Memory{4}, nil)
	f.pod("alice/has", 4, on("n0"))
	f.unlike("alice/first", 4, age(-1))
	for i := range manyKinds {
		f.unlike(fmt.Sprint("alice/", i), 5)
	}
	for range manyKinds/maxSearches - 1 {
		f.tick(300 * time.Millisecond)
	}
	want(t, "is due", true, f.items["pod alice/first alice/first"].kind.isDue(f.now))
	f.delete("alice/has")
	f.tick(300 * time.Millisecond)
	want(t, "granted", []string{"alice/first"}, f.granted)
}

// TestSearchLimit: with more nodes a round tries fewer items, so that it takes no longer.
func TestSearchLimit(t *testing.T) {
	for nodes, want := range map[int]int{0: 16, 100: 16, 1500: 16, 5000: 4, 10_000: 2, 100_000: 2} {
		check.Equal(t, fmt.Sprint(nodes, " nodes"), want, searchLimit(nodes))
	}
}
