package dispatch

import (
	"fmt"
	"slices"
	"testing"
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// The place of a pod is for what it asked for then: a pod whose number of cards changes gets another turn.
func TestDemandChanges(t *testing.T) {
	f := newFixture(t, []gpu.Memory{4}, nil)
	f.ledger.SetNode("n0", ledger.NodeSpec{Unit: gpu.GiB, Cards: []gpu.Card{{Index: 0, Memory: 4}, {Index: 1, Memory: 4}}})
	f.pod("alice/1", 4)
	f.tick(0)
	f.pod("alice/1", 0, func(p *Pod) { p.Cards = 2 })
	want(t, "the former place", 0, allocations(f))
	want(t, "charged meanwhile", map[string]gpu.Memory{"alice": 0}, f.allocated())
	f.tick(0)
	if _, a, _ := f.ledger.Lookup("alice/1"); len(a.Placement) != 2 {
		t.Errorf("its place is %v", a.Placement)
	}
	f.pod("alice/1", 0, priority(1))
	want(t, "the place after another change", 1, allocations(f))
	p := f.pods["alice/1"]
	p.Constraints = unique.Make("other nodes")
	f.SetPod(p)
	want(t, "the place after a change of the node selector", 0, allocations(f))
}

// kube-scheduler doesn't know by itself that a rejected pod needs no turn any more.
func TestNamespaceLeaves(t *testing.T) {
	f := newFixture(t, []gpu.Memory{4}, nil)
	f.pod("alice/1", 5, open)
	f.tick(0)
	want(t, "requeues", 0, f.requeues)
	f.SetNamespace("alice", Namespace{Tenant: "alice", Exempt: true})
	f.tick(0)
	want(t, "requeues", 1, f.requeues)
	f.tick(queue.Retry)
	want(t, "requeues", 1, f.requeues)
}

// The watch of namespaces can be ahead of that of pods.
func TestNamespaceDeletedBeforeItsPods(t *testing.T) {
	f := newFixture(t, []gpu.Memory{4}, nil)
	f.pod("alice/bound", 1, on("n0"))
	f.pod("alice/waiting", 5)
	f.pod("bob/waiting", 5)
	f.RemoveNamespace("alice")
	f.RemoveNamespace("bob")
	f.tick(0)
	f.pod("alice/bound", 0, func(p *Pod) { p.Leaving = true })
	f.delete("alice/bound", "alice/waiting", "bob/waiting")
	want(t, "tenants left", 0, len(f.queue.Tenants()))
}

// A pause that is over is no obstacle any more, also for a pod that isn't tried because others like it don't fit.
func TestPauseEnds(t *testing.T) {
	f := newFixture(t, []gpu.Memory{4}, nil)
	f.pod("alice/paused", 4, age(1))
	f.tick(0)
	f.tick(patience)
	f.pod("bob/1", 4, on("n0"))
	f.pod("alice/first", 4)
	f.tick(0)
	want(t, "during the pause", reasons.ObstaclePaused, f.Turns()["alice/paused"].Obstacle)
	f.tick(firstPause)
	want(t, "after it", reasons.ObstacleNoRoom, f.Turns()["alice/paused"].Obstacle)
}

// A pod for which there will never be room, for its CPU for example, doesn't block its tenant most of the time.
func TestUselessWaitsGetRare(t *testing.T) {
	f := newFixture(t, []gpu.Memory{4}, nil)
	f.pod("alice/large", 4)
	f.pod("bob/1", 1, on("n0"))
	granted, hours := 0, 4
	for i := range hours * 60 {
		name := fmt.Sprint("alice/", i)
		f.pod(name, 1, age(1+i))
		f.tick(time.Minute)
		if slices.Contains(f.admitted(), name) {
			granted++
			f.bind(name)
		}
		f.delete(name)
	}
	if granted < hours*60/2 {
		t.Errorf("in %d of %d minutes a pod behind it was granted", granted, hours*60)
	}
}

// Each of many pods that all differ gets its turn, whatever changes meanwhile.
func TestManyConstraints(t *testing.T) {
	f := newFixture(t, []gpu.Memory{4}, nil)
	for i := range 4 * maxSearches {
		name := fmt.Sprint("alice/", i)
		f.pod(name, 5, age(-1))
		p := f.pods[name]
		p.Constraints, p.RoomKey = unique.Make(name), unique.Make(name)
		f.SetPod(p)
	}
	f.pod("alice/last", 4)
	for range 5 {
		f.NodesChanged()
		f.tick(100 * time.Millisecond)
	}
	want(t, "granted", []string{"alice/last"}, f.admitted())
}
