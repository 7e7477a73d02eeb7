package dispatch

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
)

func want[T any](t *testing.T, what string, want, got T) {
	t.Helper()
	check.Equal(t, what, want, got)
}

// Bob submits many pods of high priority, Alice few: they end equal, and no pod is granted for which there is no room.
func TestAlternate(t *testing.T) {
	f := newFixture(t, []gpu.Memory{4, 4}, nil)
	for i := range 20 {
		f.pod(fmt.Sprint("bob/", i), 1, priority(100), age(i))
	}
	for i := range 6 {
		f.pod(fmt.Sprint("alice/", i), 1, age(60+i))
	}
	f.tick(0)
	want(t, "the tenants", map[string]gpu.Memory{"alice": 4, "bob": 4}, f.allocated())
	want(t, "granted", []string{"alice/0", "alice/1", "alice/2", "alice/3", "bob/0", "bob/1", "bob/2", "bob/3"}, f.admitted())
	f.bindAll()
	f.delete("alice/0", "alice/1", "bob/0")
	f.tick(0)
	want(t, "after some have ended", []string{"alice/4", "alice/5", "bob/4"}, f.admitted())
	tenants := f.Tenants()
	want(t, "what waits", []Tenant{
		{Terms: fairshare.DefaultTerms, Name: "alice", Share: 4, Allocated: 4, Before: 1},
		{Terms: fairshare.DefaultTerms, Name: "bob", Share: 4, Allocated: 4, Waiting: 15, WaitingMemory: 15, PassedOver: 15, Next: f.pods["bob/5"].Pod, Obstacle: reasons.ObstacleNoRoom},
	}, tenants)
	want(t, "the reason", "bob/5: no card has room for it now", tenants[1].Reason())
	turns := f.Turns()
	want(t, "a turn", reasons.Turn{Tenant: "bob", Share: 4, Allocated: 4, Obstacle: reasons.ObstacleNoRoom}, turns["bob/9"])
	want(t, "turns", 15, len(turns))
}

// TestAdmitDuringTick checks that filter calls don't wait for a Tick, which takes long in a large cluster.
func TestAdmitDuringTick(t *testing.T) {
	f := newFixture(t, []gpu.Memory{10}, nil)
	f.pod("alice/a", 10)
	f.pod("bob/b", 10)
	f.tick(0)
	f.mu.Lock()
	defer f.mu.Unlock()
	for name, want := range map[string]bool{"alice/a": true, "bob/b": false} {
		if got := f.IsAdmitted(f.pods[name].Pod); got != want {
			t.Errorf("%s: admitted %t, want %t", name, got, want)
		}
	}
}

// What filter does with pods for which it isn't called in the usual way.
func TestAdmit(t *testing.T) {
	f := newFixture(t, []gpu.Memory{2}, nil)
	f.SetNamespace("system", Namespace{Tenant: "system", Exempt: true})
	f.pod("alice/gated", 2)
	f.pod("bob/removed-the-gate", 2, open)
	f.pod("system/free", 1)
	f.pod("bob/urgent", 1, priority(1000))
	f.pod("bob/no-memory", 0)
	f.pod("bob/other-gate", 1, gatedOtherwise)
	f.pod("unknown/pod", 1)
	want(t, "before the first tick", []string{"bob/no-memory", "bob/urgent", "system/free"}, f.admitted())
	f.tick(0)
	want(t, "granted", []string{"alice/gated", "bob/no-memory", "bob/urgent", "system/free"}, f.admitted())
	want(t, "opened", []string{"alice/gated", "bob/no-memory", "bob/urgent", "system/free"}, f.granted)
	want(t, "charged", map[string]gpu.Memory{"alice": 2, "bob": 0}, f.allocated())
	f.delete("alice/gated")
	f.tick(0)
	if admitted := f.IsAdmitted(f.pods["bob/removed-the-gate"].Pod); !admitted || f.requeues != 1 {
		t.Errorf("after its turn, the pod without a gate is admitted: %v, with %d requeues", admitted, f.requeues)
	}
	f.SetNamespace("unknown", Namespace{Tenant: "carol", Terms: fairshare.DefaultTerms})
	f.delete("bob/removed-the-gate")
	f.tick(0)
	if !f.IsAdmitted(f.pods["unknown/pod"].Pod) {
		t.Error("the pod whose namespace was unknown is not granted")
	}
	f.StopLeading()
	if f.IsAdmitted(f.pods["unknown/pod"].Pod) {
		t.Error("a replica that doesn't lead admits the pod")
	}
}

// A pod that isn't bound in time loses its charge and its place, and waits longer each time. Others go first meanwhile.
func TestChargeExpires(t *testing.T) {
	f := newFixture(t, []gpu.Memory{2}, nil)
	f.pod("alice/stuck", 2)
	f.pod("bob/1", 2, age(1))
	f.tick(0)
	want(t, "first", []string{"alice/stuck"}, f.admitted())
	f.tick(patience - time.Second)
	want(t, "before the charge ends", []string{"alice/stuck"}, f.admitted())
	f.tick(time.Second)
	want(t, "after it", []string{"bob/1"}, f.admitted())
	want(t, "a turn", reasons.Turn{Tenant: "alice", Share: 0, Obstacle: reasons.ObstaclePaused}, f.Turns()["alice/stuck"])
	f.bind("bob/1")
	f.delete("bob/1")
	f.tick(0)
	want(t, "during its pause", []string(nil), f.admitted())
	f.tick(firstPause)
	want(t, "after its pause", []string{"alice/stuck"}, f.admitted())
	f.tick(patience)
	f.tick(2*firstPause - time.Second)
	want(t, "during its second pause", []string(nil), f.admitted())
	f.tick(time.Second)
	want(t, "after its second pause", []string{"alice/stuck"}, f.admitted())
	f.binding["alice/stuck"] = true
	f.tick(patience)
	want(t, "while its bind is in flight", []string{"alice/stuck"}, f.admitted())
	f.binding["alice/stuck"] = false
	f.ledger.Release("alice/stuck") // The bind failed.
	f.tick(queue.Retry)
	want(t, "after a failed bind", []string(nil), f.admitted())
	want(t, "expired", 3, f.expired)
	want(t, "charged", map[string]gpu.Memory{"alice": 0}, f.allocated())
}

// A group is granted as a whole or not at all, and one that is half open after a change of leaders is granted again.
func TestGroups(t *testing.T) {
	f := newFixture(t, []gpu.Memory{4, 4}, nil)
	f.groups.sizes["job"] = 3
	f.pod("alice/job-0", 2, inGroup("job"))
	f.pod("alice/job-1", 2, inGroup("job"))
	f.pod("alice/job-2", 2, inGroup("job"), gatedOtherwise)
	f.tick(0)
	want(t, "a member has another gate", []string(nil), f.admitted())
	f.pod("bob/1", 3)
	f.tick(0)
	f.pod("alice/job-2", 0, func(p *Pod) { p.GatedOtherwise = false })
	f.tick(0)
	want(t, "no room for all", []string{"bob/1"}, f.admitted())
	f.delete("bob/1")
	f.tick(0)
	want(t, "room for all", []string{"alice/job-0", "alice/job-1", "alice/job-2"}, f.admitted())

	f.StopLeading()
	f.pod("alice/job-2", 0, func(p *Pod) { p.Gated = true }) // The former leader didn't get that far.
	want(t, "without a leader", []string(nil), f.admitted())
	want(t, "nothing stays reserved", 0, allocations(f))
	f.StartLeading()
	f.granted = nil
	f.tick(0)
	want(t, "resumed", []string{"alice/job-0", "alice/job-1", "alice/job-2"}, f.admitted())
	want(t, "the gate that was left", []string{"alice/job-2"}, f.granted)
	want(t, "requeues", 1, f.requeues)
	f.bindAll()
	f.pod("alice/job-3", 1, inGroup("job"))
	f.tick(0)
	want(t, "a member that joins the running group", []string{"alice/job-3"}, f.admitted())
	want(t, "charged", map[string]gpu.Memory{"alice": 7}, f.allocated())
}

// A member of a running group fails. Its replacement goes before the older pods of its tenant, but not before those of tenants that have less.
func TestUrgentReplacement(t *testing.T) {
	f := newFixture(t, []gpu.Memory{1, 1, 1, 1}, nil)
	f.groups.sizes["job"] = 3
	for i := range 4 {
		f.pod(fmt.Sprint("alice/job-", i), 1, inGroup("job"), on(fmt.Sprint("n", i)))
	}
	f.pod("alice/older", 1, age(-10), priority(5))
	f.tick(time.Second)
	f.delete("alice/job-3")
	f.pod("alice/job-4", 1, inGroup("job"), age(100))
	f.pod("bob/1", 1, age(200))
	f.groups.urgent = []gpu.PodUID{"alice/job-4"}
	f.tick(time.Second)
	want(t, "admitted", []string{"bob/1"}, f.admitted())
	f.delete("bob/1")
	f.tick(time.Second)
	want(t, "admitted then", []string{"alice/job-4"}, f.admitted())
	f.delete("alice/job-4")
	f.groups.urgent = nil
	f.pod("alice/job-5", 1, inGroup("job"), age(100))
	f.tick(firstPause)
	want(t, "one that isn't urgent waits", []string{"alice/older"}, f.admitted())
}

// Few writes are in flight at a time, those of granted pods first: they hold memory.
func TestOpenGates(t *testing.T) {
	f := newFixture(t, []gpu.Memory{2}, nil)
	f.SetNamespace("free", Namespace{Tenant: "free", Exempt: true})
	for i := range 100 {
		f.pod(fmt.Sprint("free/", i), 1)
	}
	f.pod("alice/granted", 2)
	f.Tick(f.now)
	first := f.TakeEffects().Open
	if len(first) != MaxOpening || first[0].Name != "granted" {
		t.Fatalf("%d writes, the first for %v", len(first), first[0])
	}
	f.Tick(f.now)
	want(t, "more while these are in flight", 0, len(f.TakeEffects().Open))
	for i, pod := range first {
		f.GateOpened(pod.UID, i > 0)
	}
	f.Tick(f.now)
	want(t, "the rest", 101-MaxOpening, len(f.TakeEffects().Open))
	want(t, "the failed one", reasons.Turn{Tenant: "alice", Obstacle: reasons.ObstacleGateStuck}, f.Turns()["alice/granted"])
	for range 3 {
		f.Tick(f.now.Add(queue.Retry - 1))
		want(t, "too early", 0, len(f.TakeEffects().Open))
		f.now = f.now.Add(queue.Retry)
		f.Tick(f.now)
		want(t, "the failed one again", first[:1], f.TakeEffects().Open)
		f.GateOpened(first[0].UID, false)
	}
}

// The plan of a group takes over the places of its members.
func TestGiveUpPlace(t *testing.T) {
	f := newFixture(t, []gpu.Memory{4}, nil)
	f.pod("alice/1", 4)
	f.tick(0)
	want(t, "places", []gpu.PodUID{"alice/1"}, f.placesOn("n0"))
	if !f.GiveUpPlace("alice/1") || f.GiveUpPlace("alice/1") {
		t.Error("there must be one place to give up")
	}
	want(t, "places", nil, f.placesOn("n0"))
	want(t, "allocations", 0, allocations(f))
	want(t, "the charge stays", []string{"alice/1"}, f.admitted())
}

// Filter is about to send a pod to a node: a granted pod doesn't take that memory as long as the bind is likely.
func TestTentativePlacement(t *testing.T) {
	f := newFixture(t, []gpu.Memory{4, 4}, nil)
	f.ledger.AddTentative(gpu.Pod{UID: "filtered", Request: 4}, []string{"n0"}, f.now)
	f.pod("alice/1", 4)
	f.pod("alice/2", 4, age(1))
	f.tick(0)
	want(t, "places on n0", nil, f.placesOn("n0"))
	want(t, "places on n1", []gpu.PodUID{"alice/1"}, f.placesOn("n1"))
	f.tick(2 * queue.Retry)
	want(t, "places on n0 after no bind came", []gpu.PodUID{"alice/2"}, f.placesOn("n0"))
}

// The terms of a tenant are the largest of its namespaces'. A change counts at once.
func TestTerms(t *testing.T) {
	f := newFixture(t, []gpu.Memory{6}, nil)
	f.SetNamespace("bob", Namespace{Tenant: "team", Terms: fairshare.Terms{Weight: 2}})
	f.SetNamespace("carol", Namespace{Tenant: "team", Terms: fairshare.Terms{Weight: 1, Guaranteed: 3}})
	f.pod("bob/1", 1, on("n0"))
	f.pod("carol/1", 1, on("n0"))
	want(t, "tenants", []Tenant{{Terms: fairshare.Terms{Weight: 2, Guaranteed: 3}, Name: "team", Share: 2, Allocated: 2}}, f.Tenants())
	f.SetNamespace("bob", Namespace{Tenant: "bob", Terms: fairshare.DefaultTerms})
	f.SetNamespace("carol", Namespace{Tenant: "carol", Exempt: true})
	want(t, "tenants", map[string]gpu.Memory{"bob": 1}, f.allocated())
	f.RemoveNamespace("bob")
	f.delete("bob/1", "carol/1")
	f.RemoveNamespace("carol")
	if left := f.queue.Tenants(); len(left) != 1 || left[0].Name != "alice" {
		t.Errorf("tenants are left: %v", left)
	}
}

// placesOn returns the pods with places of fair sharing on the node.
func (f *fixture) placesOn(name string) (uids []gpu.PodUID) {
	node, _ := f.ledger.Node(name)
	for _, a := range node.Allocations {
		if f.ledger.HasSource(ledger.Granted, a.UID) {
			uids = append(uids, a.UID)
		}
	}
	return uids
}

func allocations(f *fixture) (n int) {
	for _, node := range f.ledger.Nodes() {
		n += len(node.Allocations)
	}
	return n
}

// TestFaults makes random changes: pods come, go and end at any moment, users remove gates, the writes that open gates fail, binds
// fail, leaders change, namespaces change, the clock steps, and pods are evicted for tenants below their share. When it is over, no pod
// waits that fits, no tenant is charged for a pod that isn't there, and no place stays reserved. No card is ever over its size.
func TestFaults(t *testing.T) {
	evictions := 0
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 1))
		f := newFixture(t, []gpu.Memory{8, 8, 4}, func(o *Options) {
			o.Provisioning = int(seed % 3)
			if seed%2 == 0 {
				o.ReclaimAfter, o.MinRuntime = 10*time.Second, 20*time.Second
			}
		})
		f.groups.sizes["g"] = 3
		for step := range 150 {
			names := make([]string, 0, len(f.pods))
			for name := range f.pods {
				names = append(names, name)
			}
			slices.Sort(names)
			name := ""
			if len(names) > 0 {
				name = names[random.IntN(len(names))]
			}
			switch what := random.IntN(17); {
			case what < 4:
				var edits []edit
				if random.IntN(4) == 0 {
					edits = append(edits, inGroup("g"))
				}
				if random.IntN(4) == 0 {
					edits = append(edits, open)
				}
				f.pod(fmt.Sprintf("%s/%d", []string{"alice", "bob"}[random.IntN(2)], step), gpu.Memory(1+random.IntN(5)), edits...)
			case name == "":
			case what < 6:
				f.delete(name)
			case what == 6 && f.pods[name].Node == "":
				f.pod(name, 0, open)
			case what == 7:
				f.gatesFail = !f.gatesFail
			case what == 8:
				f.StopLeading()
				f.tick(0) // Nothing may come of it.
				f.StartLeading()
			case what == 9:
				f.SetNamespace("bob", Namespace{Tenant: []string{"bob", "alice"}[random.IntN(2)], Terms: fairshare.Terms{Weight: 1 + random.Int64N(3)}, Exempt: random.IntN(5) == 0})
			case what < 12:
				if p := f.pods[name]; p.Node == "" && !p.Gated {
					if f.IsAdmitted(p.Pod) {
						if _, fits := f.anyFit(p.Pod); fits {
							f.bind(name)
						}
					}
				}
			case what == 12: // A process's clock does this only if its times lose their monotonic part.
				f.tick(time.Duration(random.IntN(1200)-600) * time.Second)
			case what == 13:
				f.finish()
			case what == 14:
				f.evictionsFail = !f.evictionsFail
			default:
				f.tick(time.Duration(random.IntN(20)) * time.Second)
			}
			admitted := map[gpu.PodUID]bool{}
			for uid, p := range f.Manager.pods {
				if p.charged() || p.Node != "" {
					admitted[uid] = true
				}
			}
			if diff := cmp.Diff(admitted, f.knownAdmitted()); diff != "" {
				t.Fatalf("seed %d: admitted pods (-want +got):\n%s", seed, diff)
			}
			for _, node := range f.ledger.Nodes() {
				if node.Used[0] > node.Cards[0].Memory {
					t.Fatalf("seed %d: %s has %d of %d", seed, node.Name, node.Used[0], node.Cards[0].Memory)
				}
			}
		}
		f.gatesFail, f.evictionsFail = false, false
		f.SetNamespace("bob", Namespace{Tenant: "bob", Terms: fairshare.DefaultTerms})
		for range 200 { // Longer than any pause, and than all steps back.
			f.tick(20 * time.Second)
			f.finish()
			for name, p := range f.pods {
				if f.IsAdmitted(p.Pod) && p.Node == "" && !p.Gated {
					if _, fits := f.anyFit(p.Pod); fits {
						f.bind(name)
					}
				}
			}
		}
		sums := map[string]gpu.Memory{}
		for name, p := range f.pods {
			charged := f.Manager.pods[p.UID].charged()
			if p.Node != "" || charged {
				sums[p.Namespace] += p.Request
			}
			if _, fits := f.anyFit(p.Pod); fits && p.Node == "" && p.Group.Name == "" {
				t.Fatalf("seed %d: %s waits although it fits", seed, name)
			}
			if charged {
				t.Fatalf("seed %d: %s is charged and not bound", seed, name)
			}
		}
		for name, amount := range f.allocated() {
			if sums[name] != amount {
				t.Fatalf("seed %d: %s is charged for %d, and its pods have %d", seed, name, amount, sums[name])
			}
		}
		for name := range f.pods {
			f.delete(name)
		}
		evictions += len(f.evicted)
		var places []gpu.PodUID
		for _, node := range f.ledger.Nodes() {
			places = append(places, f.placesOn(node.Name)...)
		}
		if n := allocations(f); n > 0 || f.reclaims.search != nil || len(f.reclaims.holds) > 0 ||
			len(f.charged)+len(f.items)+len(f.members)+len(f.gated)+len(places)+len(f.knownAdmitted())+len(f.inNamespace)+len(f.Manager.allocated)+len(f.kept) > 0 {
			t.Fatalf("seed %d: something is left: %d allocations, charged %v, items %v, members %v, gated %v, places %v", seed, n, f.charged, f.items, f.members, f.gated, places)
		}
	}
	if evictions < 50 {
		t.Errorf("only %d evictions", evictions)
	}
}
