package dispatch

import (
	"fmt"
	"slices"
	"testing"
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/pkg/reclaim"
)

const after, minRuntime = 5 * time.Minute, 10 * time.Minute

// newReclaimFixture returns a fixture that reclaims, in which bob's pods of 1 fill the nodes, the lowest numbers on the first one. They
// have run for an hour, and the higher the number the younger they are.
func newReclaimFixture(t *testing.T, cards ...gpu.Memory) *fixture {
	f := newFixture(t, cards, func(o *Options) { o.ReclaimAfter, o.MinRuntime = after, minRuntime })
	n := 0
	for i, memory := range cards {
		for range memory {
			f.pod(fmt.Sprint("bob/", n), 1, on(fmt.Sprint("n", i)), func(p *Pod) { p.Bound = begin.Add(time.Duration(n)*time.Second - time.Hour) })
			n++
		}
	}
	f.tick(0)
	return f
}

// countedNames counts calls of Names.
type countedNames struct {
	Nodes
	calls *int
}

// UsableNodes implements Nodes.
func (c countedNames) UsableNodes(constraints unique.Handle[string]) []string {
	*c.calls++
	return c.Nodes.UsableNodes(constraints)
}

// Finding the nodes for hundreds of different constraints takes long, so the search does that without the Manager's lock.
func TestReclaimFindsNodesInItsSearch(t *testing.T) {
	calls := 0
	f := newFixture(t, []gpu.Memory{1}, func(o *Options) {
		o.ReclaimAfter, o.MinRuntime, o.Nodes = after, minRuntime, countedNames{o.Nodes, &calls}
	})
	f.pod("bob/0", 1, on("n0"), func(p *Pod) { p.Bound = begin.Add(-time.Hour) })
	f.pod("alice/0", 1)
	f.run(after)
	var search *Search
	for range 5 {
		f.now = f.now.Add(time.Second)
		f.Tick(f.now)
		if search = f.TakeEffects().Reclaim; search != nil {
			break
		}
	}
	calls = 0
	want(t, "nodes", []string{"n0"}, search.Need().Items[0].Pods[0].Nodes)
	want(t, "calls by the search", 1, calls)
}

// run lets time pass in steps of a second.
func (f *fixture) run(d time.Duration) {
	for range d / time.Second {
		f.tick(time.Second)
	}
}

// Bob fills the cluster, and Alice comes: exactly the excess of Bob's pods goes, and nothing more happens then.
func TestReclaim(t *testing.T) {
	f := newReclaimFixture(t, 4, 4)
	for i := range 6 {
		f.pod(fmt.Sprint("alice/", i), 1, age(i))
	}
	f.run(after)
	want(t, "before the time", []string(nil), f.evicted)
	f.run(2 * time.Second)
	want(t, "the excess, the newest first", []string{"bob/7", "bob/6", "bob/5", "bob/4"}, f.evicted)
	f.pod("bob/again", 1) // As their controller creates them.
	f.run(30 * time.Second)
	want(t, "while they end", []string(nil), f.admitted())
	want(t, "alice's reason", "alice/0: pods of other tenants are evicted for it", f.Tenants()[0].Reason())
	f.finish()
	f.run(time.Second)
	want(t, "alice gets the room", []string{"alice/0", "alice/1", "alice/2", "alice/3"}, f.admitted())
	f.bindAll()
	f.run(time.Hour)
	want(t, "evictions", 4, len(f.evicted))
	want(t, "tenants", map[string]gpu.Memory{"alice": 4, "bob": 4}, f.allocated())
	want(t, "reclaims without success", 0, f.failed)
}

// The leader changes while a plan is made: only the next one evicts pods.
func TestReclaimLeaderChanges(t *testing.T) {
	f := newReclaimFixture(t, 4)
	f.pod("alice/large", 2)
	f.meanwhile = func() { f.StopLeading(); f.StartLeading() }
	f.run(after + 2*time.Second)
	want(t, "evicted by a leader that isn't one any more", []string(nil), f.evicted)
	f.meanwhile = nil
	f.run(after)
	want(t, "evicted by the next one", []string{"bob/3", "bob/2"}, f.evicted)
}

// While the victims of one attempt end, another one makes room for other items. What the former has evicted doesn't count twice.
func TestReclaimAtOnce(t *testing.T) {
	for name, evicted := range map[string]func(f *fixture, names ...string){
		"victims are being deleted":        func(*fixture, ...string) {},
		"their deletion isn't visible yet": (*fixture).invisible,
	} {
		t.Run(name, func(t *testing.T) {
			f := newReclaimFixture(t, 4, 4)
			f.SetNamespace("carol", Namespace{Tenant: "carol", Terms: fairshare.DefaultTerms})
			f.pod("alice/0", 2)
			f.run(10 * time.Second)
			f.pod("carol/large", 4)
			f.run(after - 5*time.Second)
			want(t, "evicted for the first", []string{"bob/7", "bob/6"}, f.evicted)
			evicted(f, "bob/7", "bob/6")
			f.run(15 * time.Second)
			want(t, "for carol, bob would have less than its share", 2, len(f.evicted))
			f.delete("carol/large")
			f.pod("alice/1", 2)
			f.run(queue.Retry)
			want(t, "evicted for both", []string{"bob/7", "bob/6", "bob/3", "bob/2"}, f.evicted)
			evicted(f, "bob/3", "bob/2")
			f.pod("alice/2", 2)
			f.run(after)
			want(t, "bob keeps its share", 4, len(f.evicted))
			want(t, "before the victims have ended", []string(nil), f.admitted())
			f.delete("bob/3", "bob/2")
			f.run(time.Second)
			want(t, "the second doesn't wait for the victims of the first", []string{"alice/1"}, f.admitted())
		})
	}
}

// invisible makes the deletion of victims invisible: only the caller of the Manager knows that it evicts them.
func (f *fixture) invisible(names ...string) {
	for _, name := range names {
		f.evicting[gpu.PodUID(name)] = true
		f.pod(name, 0, func(p *Pod) { p.Leaving = false })
	}
}

// Alice's pods can't be bound, because their volume claim is misspelt; a CronJob replaces them every 15 minutes. Bob's pods are evicted for them
// again after 10 minutes, then after 20, and so on, although each time it is another pod.
func TestReclaimForPodsThatNeverStart(t *testing.T) {
	f := newReclaimFixture(t, 8, 8)
	serial, name := 0, ""
	for second := range 24 * 60 * 60 {
		if second%(15*60) == 0 {
			f.delete(name)
			serial++
			name = fmt.Sprint("alice/", serial)
			f.pod(name, 1, func(p *Pod) { p.Created = f.now })
		}
		f.tick(time.Second)
		f.finish()
		for name, p := range f.pods { // Bob's controller replaces what was evicted.
			if p.Namespace == "bob" && p.Node == "" && f.IsAdmitted(p.Pod) {
				f.bind(name)
			}
		}
		if second%60 == 0 && f.running()["bob"] < 16 {
			serial++
			f.pod(fmt.Sprint("bob/", 1000+serial), 1, func(p *Pod) { p.Created = f.now })
		}
	}
	if n := len(f.evicted); n < 3 || n > 8 {
		t.Errorf("%d evictions in a day", n)
	}
	f.delete(name)
	f.pod("alice/other", 2, func(p *Pod) { p.Created = f.now })
	before := len(f.evicted)
	f.run(2 * after)
	f.finish()
	f.run(time.Second)
	want(t, "pods of another kind don't wait", true, len(f.evicted) > before && slices.Contains(f.admitted(), "alice/other"))
	f.bind("alice/other")
}

// Alice's pods are withdrawn once pods were evicted for them, as an autoscaler does by accident: for eight hours, but only few pods are evicted.
func TestReclaimForPodsThatAreWithdrawn(t *testing.T) {
	deletes := func(f *fixture, serial int) { f.delete(fmt.Sprint("alice/", serial-1)) }
	creates := func(f *fixture, serial int) {
		f.pod(fmt.Sprint("alice/", serial), gpu.Memory(1+serial%3), func(p *Pod) { p.Created = f.now })
	}
	sets := func(cards int) func(f *fixture, serial int) {
		return func(f *fixture, serial int) { f.pod("alice/it", 2, func(p *Pod) { p.Cards = cards }) }
	}
	for name, tc := range map[string]struct {
		withdraws, again func(f *fixture, serial int)
		after            time.Duration
	}{
		"others come a minute later":          {deletes, creates, time.Minute},
		"others come a quarter later":         {deletes, creates, 15 * time.Minute},
		"its number of cards changes for 10s": {sets(2), sets(1), 10 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			f := newReclaimFixture(t, 8, 8)
			attempts, bobs, next := 0, 0, f.now
			for range 8 * 60 * 60 / 5 {
				if !next.IsZero() && !f.now.Before(next) {
					tc.again(f, attempts)
					next = time.Time{}
				}
				before := len(f.evicted)
				f.tick(5 * time.Second)
				if len(f.evicted) > before {
					attempts++
					tc.withdraws(f, attempts)
					next = f.now.Add(tc.after)
				}
				f.finish()
				for ; f.running()["bob"] < 16; bobs++ { // Its controller replaces what was evicted.
					name := fmt.Sprint("bob/new-", bobs)
					f.pod(name, 1, func(p *Pod) { p.Created = f.now })
					f.tick(0)
					f.bind(name)
				}
			}
			if attempts < 3 || attempts > 14 {
				t.Errorf("pods were evicted %d times in eight hours", attempts)
			}
		})
	}
}

// Alice withdrew a pod an hour ago. Whether the end of the next hold is another withdrawal.
func TestReclaimWithdrawn(t *testing.T) {
	nothing, deletes := func(*fixture) {}, func(f *fixture) { f.delete("alice/1") }
	leave := func(f *fixture) {
		for _, name := range []string{"bob/2", "bob/3"} {
			f.pod(name, 0, func(p *Pod) { p.Leaving = true })
		}
	}
	const pauses, asBefore, forgotten = "pauses", "as before", "forgotten"
	for name, tc := range map[string]struct {
		first, then func(f *fixture)
		want        string
	}{
		"its pod is deleted":         {nothing, deletes, pauses},
		"nothing was evicted for it": {leave, deletes, asBefore},
		"it is created again": {nothing, func(f *fixture) {
			deletes(f)
			f.pod("alice/again", 2)
			f.finish()
			f.run(time.Second)
			want(t, "admitted", []string{"alice/again"}, f.admitted())
		}, pauses},
		"it gets what is held": {nothing, (*fixture).finish, forgotten},
		"it gets other room":   {nothing, func(f *fixture) { f.delete("bob/0", "bob/1") }, forgotten},
	} {
		t.Run(name, func(t *testing.T) {
			f := newReclaimFixture(t, 2, 2)
			pause(f.reclaims.withdrawn, "alice", f.now.Add(-time.Hour), longestWasted)
			tc.first(f)
			f.pod("alice/1", 2)
			f.run(after + 2*time.Second)
			want(t, "holds", 1, len(f.reclaims.holds))
			tc.then(f)
			f.run(2 * time.Second)
			got := forgotten
			if _, known := f.reclaims.withdrawn["alice"]; known {
				got = map[bool]string{true: pauses, false: asBefore}[f.reclaims.withdrawn.Has("alice", f.now)]
			}
			want(t, "what is known of alice", tc.want, got)
		})
	}
}

func guarantees(amount gpu.Memory) Namespace {
	return Namespace{Tenant: "bob", Terms: fairshare.Terms{Weight: 1, Guaranteed: amount}}
}

// What happens while places are held.
func TestReclaimHold(t *testing.T) {
	for name, tc := range map[string]struct {
		meanwhile func(f *fixture)
		// admitted are admitted in the end, and the number of pods is evicted.
		admitted []string
		evicted  int
		failed   int
	}{
		"the victims end":                         {func(*fixture) {}, []string{"alice/1"}, 2, 0},
		"the pod is deleted":                      {func(f *fixture) { f.delete("alice/1") }, []string{"bob/small"}, 2, 0},
		"the pod changes":                         {func(f *fixture) { f.pod("alice/1", 0, func(p *Pod) { p.Cards = 2 }) }, []string{"bob/small"}, 2, 0},
		"its tenant has no share any more":        {func(f *fixture) { f.SetNamespace("bob", guarantees(4)) }, []string{"alice/1"}, 2, 0},
		"its namespace is exempt":                 {func(f *fixture) { f.SetNamespace("alice", Namespace{Tenant: "alice", Exempt: true}) }, []string{"alice/1", "bob/small"}, 2, 0},
		"the victims stay for long, and end then": {func(f *fixture) { f.run(roundLasts + 2*after) }, []string{"alice/1"}, 2, 1},
		"an eviction has no effect":               {func(f *fixture) { f.pod("bob/3", 0, func(p *Pod) { p.Leaving = false }); f.run(roundLasts) }, []string{"bob/small"}, 2, 1},
	} {
		t.Run(name, func(t *testing.T) {
			f := newReclaimFixture(t, 4)
			f.pod("alice/1", 2)
			f.pod("bob/small", 1)
			f.run(after + 2*time.Second)
			tc.meanwhile(f)
			f.tick(time.Second)
			f.finish()
			f.run(2 * time.Second)
			want(t, "admitted", tc.admitted, f.admitted())
			want(t, "evictions", tc.evicted, len(f.evicted))
			want(t, "without success", tc.failed, f.failed)
		})
	}
}

// holdNext runs until places are held for items. It returns their search before pods are evicted.
func (f *fixture) holdNext() (search *Search) {
	for search == nil {
		f.now = f.now.Add(time.Second)
		f.Tick(f.now)
		search = f.TakeEffects().Reclaim
	}
	plan, _ := reclaim.Choose(search.Need(), f.cluster())
	want(f.t, "the plan is right", true, f.Hold(search, plan))
	return search
}

// A pod is deleted after places were held for it, but before the evictions. Its tenant pauses if these are made.
func TestReclaimWithdrawnBeforeEvictions(t *testing.T) {
	for _, evicted := range []bool{false, true} {
		f := newReclaimFixture(t, 4)
		f.pod("alice/1", 2)
		search := f.holdNext()
		f.delete("alice/1")
		f.tick(time.Second)
		want(t, "holds", 1, len(f.reclaims.holds))
		until := time.Time{}
		if evicted {
			until = f.now.Add(roundLasts)
		}
		f.Reclaimed(search, until)
		f.tick(time.Second)
		want(t, "holds in the end", 0, len(f.reclaims.holds))
		want(t, "pauses", evicted, f.reclaims.withdrawn.Has("alice", f.now))
	}
}

// One of two equal items for which pods are evicted is deleted meanwhile. The other one still has its places, so their kind doesn't pause.
func TestReclaimOfEqualItems(t *testing.T) {
	for range 20 { // The order of the holds is random.
		f := newReclaimFixture(t, 8)
		f.pod("alice/1", 1)
		f.pod("alice/2", 1)
		search := f.holdNext()
		want(t, "holds", 2, len(f.reclaims.holds))
		f.delete("alice/1")
		f.Reclaimed(search, f.now.Add(roundLasts))
		want(t, "pauses", 0, len(f.reclaims.pauses))
	}
}

// What is being deleted already is enough. The places are held until that has ended.
func TestReclaimHoldWithoutEvictions(t *testing.T) {
	f := newReclaimFixture(t, 4)
	for _, name := range []string{"bob/2", "bob/3"} {
		f.pod(name, 0, func(p *Pod) { p.Leaving = true })
	}
	f.pod("alice/1", 2)
	f.run(after + 2*time.Second)
	want(t, "holds", 1, len(f.reclaims.holds))
	f.delete("bob/2", "bob/3")
	f.run(2 * time.Second)
	want(t, "admitted", []string{"alice/1"}, f.admitted())
	want(t, "holds in the end", 0, len(f.reclaims.holds))
	want(t, "evicted", []string(nil), f.evicted)
}

// A tenant deletes its pods with a grace period of a month. They are evicted like pods that run.
func TestReclaimOfPodsThatLinger(t *testing.T) {
	f := newReclaimFixture(t, 4)
	for i := range 4 {
		f.pod(fmt.Sprint("bob/", i), 0, func(p *Pod) { p.Leaving, p.Lingers = true, true })
	}
	f.pod("alice/1", 2)
	f.run(after + 2*time.Second)
	want(t, "evicted", []string{"bob/3", "bob/2"}, f.evicted)
	want(t, "holds", 1, len(f.reclaims.holds))
	f.run(time.Minute)
	want(t, "evicted in the end", 2, len(f.evicted))
}

// The nodes of held places are away for a moment, so the shares are smaller. What was evicted is still alice's: no further pods are evicted for her.
func TestReclaimHoldOutlastsNode(t *testing.T) {
	f := newReclaimFixture(t, 4, 4, 4)
	for i := range 8 {
		f.pod(fmt.Sprint("alice/", i), 1, age(i))
	}
	f.run(after + 2*time.Second)
	want(t, "evicted", 6, len(f.evicted))
	f.pod("bob/again", 1)
	open := func(nodes ...string) {
		f.Nodes = nodesOf(func(unique.Handle[string]) []string { return nodes })
		f.NodesChanged()
	}
	open("n0")
	f.finish()
	f.run(2 * time.Second)
	open("n0", "n1")
	f.run(5 * time.Second)
	open("n0", "n1", "n2")
	f.run(2 * time.Second)
	f.bindAll()
	f.run(after)
	want(t, "evictions", 6, len(f.evicted))
	want(t, "tenants", map[string]gpu.Memory{"alice": 6, "bob": 6}, f.allocated())
}

// All pods of bob name one group. The members beyond its number are evicted like single pods.
func TestReclaimSurplus(t *testing.T) {
	for name, tc := range map[string]struct {
		number  int
		alice   []gpu.Memory
		evicted []string
		has     map[string]gpu.Memory
	}{
		"a number of 1":                        {1, []gpu.Memory{1, 1, 1, 1, 1}, []string{"bob/7", "bob/6", "bob/5", "bob/4"}, map[string]gpu.Memory{"alice": 4, "bob": 4}},
		"as many as the number stay":           {6, []gpu.Memory{1, 1, 1, 1, 1}, []string{"bob/7", "bob/6"}, map[string]gpu.Memory{"alice": 2, "bob": 6}},
		"the surplus makes no room":            {7, []gpu.Memory{4}, nil, map[string]gpu.Memory{"alice": 0, "bob": 8}},
		"a number that is that of the members": {8, []gpu.Memory{1, 1}, nil, map[string]gpu.Memory{"alice": 0, "bob": 8}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newReclaimFixture(t, 4, 4)
			f.groups.sizes["all"] = tc.number
			for i := range 8 {
				f.pod(fmt.Sprint("bob/", i), 0, inGroup("all"))
			}
			for i, request := range tc.alice {
				f.pod(fmt.Sprint("alice/", i), request, age(i))
			}
			for range 20 {
				f.run(after)
				f.finish()
				f.run(time.Second)
				f.bindAll()
			}
			want(t, "evicted", tc.evicted, f.evicted)
			want(t, "tenants", tc.has, f.allocated())
		})
	}
}

// The API server refuses, or doesn't answer: the attempt ends, and the next one comes later each time.
func TestReclaimRefused(t *testing.T) {
	f := newReclaimFixture(t, 4)
	attempts := 0
	f.meanwhile = func() { attempts++ }
	f.evictionsFail = true
	f.pod("alice/1", 2)
	f.run(after + time.Hour)
	want(t, "attempts in an hour", 12, attempts)
	want(t, "what bob's pods have", 4, f.running()["bob"])
	f.pod("bob/small", 1)
	f.delete("bob/3")
	f.run(time.Second)
	want(t, "nothing stays held", []string{"bob/small"}, f.admitted())
	f.evictionsFail = false
	f.delete("bob/small")
	f.run(queue.LongestPause)
	want(t, "evictions", 1, len(f.evicted))
}

// Which pods may be evicted.
func TestReclaimVictims(t *testing.T) {
	young := func(p *Pod) { p.Bound = begin }
	old := func(n int) edit {
		return func(p *Pod) { p.Bound = begin.Add(-time.Duration(n) * time.Hour) }
	}
	f := newFixture(t, []gpu.Memory{8, 8}, func(o *Options) { o.ReclaimAfter, o.MinRuntime = after, minRuntime })
	f.groups.sizes["job"] = 2
	f.SetNamespace("free", Namespace{Tenant: "free", Exempt: true})
	f.pod("bob/young", 4, on("n0"), young)
	f.pod("bob/urgent", 4, on("n0"), old(1), priority(1000))
	f.pod("free/other", 2, on("n1"), old(1))
	f.pod("bob/job-0", 3, on("n1"), old(2), inGroup("job"))
	f.pod("bob/job-1", 3, on("n1"), young, inGroup("job"))
	f.pod("alice/1", 4)
	f.pod("alice/2", 4, age(1))
	f.run(after + 2*time.Second)
	want(t, "a group as a whole, since its first member is old", []string{"bob/job-0", "bob/job-1"}, f.evicted)
	f.finish()
	f.run(time.Second)
	want(t, "admitted", []string{"alice/1"}, f.admitted())
}

// A pod that was not bound after its turn isn't worth evictions for long.
func TestReclaimAfterFailures(t *testing.T) {
	f := newReclaimFixture(t, 4)
	f.delete("bob/3", "bob/2")
	f.pod("alice/stuck", 2)
	f.run(time.Second)
	want(t, "it has its turn", []string{"alice/stuck"}, f.admitted())
	f.run(patience)
	for i := range 2 {
		f.pod(fmt.Sprint("bob/new-", i), 1, on("n0"), func(p *Pod) { p.Bound = begin.Add(-time.Hour) })
	}
	f.run(2 * after)
	want(t, "evicted early", []string(nil), f.evicted)
	f.run(after + firstPause)
	want(t, "evicted in the end", 2, len(f.evicted))
}

// A group that had its places and wasn't bound, as package gang found, isn't worth evictions for long either.
func TestReclaimAfterFailureOfGroup(t *testing.T) {
	f := newReclaimFixture(t, 4)
	f.groups.sizes["job"] = 2
	f.pod("alice/job-0", 1, inGroup("job"))
	f.pod("alice/job-1", 1, inGroup("job"))
	f.Failures.Failed(queue.Profile{Namespace: "alice", ID: gang.Key{Namespace: "alice", Name: "job"}.ItemID(), ShapeKey: "job"}, f.now, f.now)
	f.run(2 * after)
	want(t, "evicted early", []string(nil), f.evicted)
	f.run(after + firstPause)
	want(t, "evicted in the end", 2, len(f.evicted))
}

// A tenant gets no room for pods with which it would have more than its share, except for its first.
func TestReclaimWithinShare(t *testing.T) {
	f := newReclaimFixture(t, 4, 4)
	for i := range 3 {
		f.pod(fmt.Sprint("alice/", i), 3, age(i))
	}
	f.run(after + 2*time.Second)
	want(t, "for one of three", 3, len(f.evicted))
	f.finish()
	f.run(time.Second)
	f.bindAll()
	f.run(time.Hour)
	want(t, "evictions", 3, len(f.evicted))
	want(t, "tenants", map[string]gpu.Memory{"alice": 3, "bob": 5}, f.allocated())
}

// A pod for which reclaim finds no room leaves the tenant's share to those behind it.
func TestReclaimBehindPodWithoutRoom(t *testing.T) {
	f := newReclaimFixture(t, 4, 4)
	f.delete("bob/0", "bob/4")
	for i := range 2 {
		f.pod(fmt.Sprint("bob/protected-", i), 1, on(fmt.Sprint("n", i)), func(p *Pod) { p.Bound = begin })
	}
	f.pod("alice/large", 4)
	f.pod("alice/small", 1, age(1))
	f.run(after + 10*time.Second)
	want(t, "evictions", 1, len(f.evicted))
	f.finish()
	f.run(time.Second)
	want(t, "admitted", []string{"alice/small"}, f.admitted())
}

// A pod that no node could run, for its CPU, is no demand: nothing is evicted for it.
func TestReclaimNeedsCPU(t *testing.T) {
	f := newReclaimFixture(t, 4)
	f.tooLarge = []gpu.PodUID{"alice/1"}
	f.pod("alice/1", 2)
	f.run(time.Hour)
	want(t, "evictions", 0, len(f.evicted))
	want(t, "its obstacle", reasons.ObstacleNeverFits, f.Turns()["alice/1"].Obstacle)
	want(t, "tenants", []Tenant{
		{Terms: fairshare.DefaultTerms, Name: "alice", Waiting: 1, WaitingMemory: 2, Infeasible: 1, Next: f.pods["alice/1"].Pod, Obstacle: reasons.ObstacleNeverFits},
		{Terms: fairshare.DefaultTerms, Name: "bob", Share: 4, Allocated: 4},
	}, f.Tenants())
}

// While places are held, the tenant's later pods get other room. That doesn't end what is held, but it is the turn of others before.
func TestReclaimHoldIsCharged(t *testing.T) {
	f := newReclaimFixture(t, 4, 4)
	f.SetNamespace("carol", Namespace{Tenant: "carol", Terms: fairshare.DefaultTerms})
	f.pod("alice/1", 3)
	f.run(after + 2*time.Second)
	want(t, "evicted", []string{"bob/7", "bob/6", "bob/5"}, f.evicted)
	f.pod("carol/1", 2, on("n1"), func(p *Pod) { p.Leaving = true })
	for i := range 2 {
		f.pod(fmt.Sprint("alice/small-", i), 1, age(1))
		f.pod(fmt.Sprint("carol/small-", i), 1, age(2))
	}
	f.delete("bob/0")
	f.run(time.Second)
	want(t, "the turn of carol with 2, since alice is about to have 3", []string{"carol/small-0"}, f.admitted())
	f.delete("carol/small-1")
	f.delete("bob/1", "bob/2")
	f.run(time.Second)
	want(t, "what nothing else can use", []string{"alice/small-0", "alice/small-1", "carol/small-0"}, f.admitted())
	want(t, "the places are still held", reasons.ObstacleMakingRoom, f.Turns()["alice/1"].Obstacle)
	f.delete("carol/1")
	f.finish()
	f.run(2 * time.Second)
	want(t, "what was held", []string{"alice/1", "alice/small-0", "alice/small-1", "carol/small-0"}, f.admitted())
	want(t, "what tenants have", map[string]gpu.Memory{"alice": 5, "bob": 2, "carol": 1}, f.allocated())
}

// A namespace moves to another tenant while places are held for its pod: they were held for what the former tenant lacks, and charged to it.
func TestReclaimTenantChanges(t *testing.T) {
	f := newReclaimFixture(t, 4, 4)
	for namespace, tenant := range map[string]string{"alice-2": "alice", "dave": "dave"} {
		f.SetNamespace(namespace, Namespace{Tenant: tenant, Terms: fairshare.DefaultTerms})
	}
	f.pod("alice/1", 3)
	f.run(after + 2*time.Second)
	want(t, "evicted", []string{"bob/7", "bob/6", "bob/5"}, f.evicted)
	f.SetNamespace("alice", Namespace{Tenant: "carol", Terms: fairshare.DefaultTerms})
	f.run(2 * time.Second)
	f.pod("dave/1", 2, on("n1"), func(p *Pod) { p.Leaving = true })
	f.pod("dave/small", 1, age(1))
	f.pod("alice-2/small", 1, age(2))
	f.delete("bob/0")
	f.run(time.Second)
	want(t, "the turn of alice, which has nothing", []string{"alice-2/small"}, f.admitted())
}

// slowNodes calls meanwhile after nodes were found without the Manager's lock, as the Manager does to compute shares after a node changed.
type slowNodes struct {
	Nodes
	manager   *Manager
	meanwhile func()
}

// newSlowFixture returns a fixture with slowNodes. Only pods with constraints make it look for nodes.
func newSlowFixture(t *testing.T, memory gpu.Memory) (*fixture, *slowNodes) {
	nodes := &slowNodes{}
	f := newFixture(t, []gpu.Memory{memory}, func(o *Options) { nodes.Nodes, o.Nodes, o.ReclaimAfter = o.Nodes, nodes, after })
	nodes.manager = f.Manager
	return f, nodes
}

func (n *slowNodes) UsableNodes(constraints unique.Handle[string]) []string {
	names := n.Nodes.UsableNodes(constraints)
	if n.meanwhile != nil && n.manager.mu.TryLock() { // Else a round calls it.
		n.manager.mu.Unlock()
		n.meanwhile()
	}
	return names
}

// Shares are computed without the Manager's lock. What changes meanwhile counts: no room is made for a pod that was deleted.
func TestReclaimChangesDuringSearch(t *testing.T) {
	f, nodes := newSlowFixture(t, 2)
	f.pod("bob/0", 1, on("n0"))
	f.pod("bob/1", 1, on("n0"))
	f.pod("alice/0", 1, only("n0"))
	f.run(after)
	searches := 0
	nodes.meanwhile = func() {
		searches++
		f.delete("alice/0")
	}
	f.NodesChanged()
	f.run(time.Second)
	nodes.meanwhile = nil
	want(t, "shares were computed", true, searches > 0)
	want(t, "an attempt", true, f.reclaims.search == nil)
	f.pod("alice/1", 1)
	f.run(after + time.Second)
	want(t, "evicted for a pod that waits", []string{"bob/0"}, f.evicted)
}

// A node is added while shares are computed, and another call computes them with this node. The call that ends last doesn't know the node: what it
// found must not stay.
func TestNodeAddedDuringSearch(t *testing.T) {
	f, nodes := newSlowFixture(t, 2)
	nodes.Nodes = nodesOf(func(unique.Handle[string]) []string { return []string{"n0", "n1"} })
	for i := range 4 {
		f.pod(fmt.Sprint("alice/", i), 1, only("n0 n1"))
	}
	nodes.meanwhile = func() {
		nodes.meanwhile = nil
		f.ledger.SetNode("n1", ledger.NodeSpec{Unit: gpu.GiB, Cards: []gpu.Card{{Memory: 2}}})
		f.NodesChanged()
		want(t, "the share with the node", gpu.Memory(4), f.Tenants()[0].Share)
	}
	f.NodesChanged()
	want(t, "the share without the node", gpu.Memory(2), f.Tenants()[0].Share)
	want(t, "the share afterwards", gpu.Memory(4), f.Tenants()[0].Share)
}

// A member of a group changes while shares are computed, so its group is in no item until the next round. Its places stay held.
func TestReclaimHoldDuringSearch(t *testing.T) {
	f, nodes := newSlowFixture(t, 4)
	for i := range 4 {
		f.pod(fmt.Sprint("bob/", i), 1, on("n0"))
	}
	f.groups.sizes["group"] = 2
	f.pod("alice/1", 1, inGroup("group"), only("n0"))
	f.pod("alice/2", 1, inGroup("group"), only("n0"))
	f.run(after + 2*time.Second)
	want(t, "evictions", 2, len(f.evicted))
	changes := 0
	nodes.meanwhile = func() {
		changes++
		f.pod("alice/1", 1, only("n0"), open)
	}
	f.NodesChanged()
	f.run(time.Second)
	nodes.meanwhile = nil
	want(t, "the member has changed", true, changes > 0)
	want(t, "places are held", true, len(f.reclaims.holds) > 0)
	f.run(time.Second)
	want(t, "places are still held", true, len(f.reclaims.holds) > 0)
	f.finish()
	f.run(2 * time.Second)
	want(t, "admitted", []string{"alice/1", "alice/2"}, f.admitted())
	want(t, "evictions in the end", 2, len(f.evicted))
}

// A pod of a third tenant that comes for two seconds in every four minutes makes the share of the tenant that waits too small for its pod each
// time, and delays evictions only by that.
func TestReclaimTimeCountsDown(t *testing.T) {
	f := newFixture(t, []gpu.Memory{80, 80, 80, 80}, func(o *Options) { o.ReclaimAfter, o.MinRuntime = after, minRuntime })
	for i := range 3 {
		f.pod(fmt.Sprint("bob/", i), 80, on(fmt.Sprint("n", i)), func(p *Pod) { p.Bound = begin.Add(-time.Hour) })
	}
	f.pod("alice/0", 80, on("n3"))
	f.pod("alice/1", 80) // Her share is 160.
	f.pod("bob/again", 80)
	f.SetNamespace("carol", Namespace{Tenant: "carol", Terms: fairshare.DefaultTerms})
	f.run(4 * time.Minute)
	f.pod("carol/small", 2)
	f.run(2 * time.Second)
	f.delete("carol/small")
	f.run(time.Minute)
	want(t, "evicted before the time", 0, len(f.evicted))
	f.run(6 * time.Second)
	want(t, "evicted after it", 1, len(f.evicted))
	f.finish()
	f.run(time.Second)
	f.bindAll()
	f.run(after / 2)
	f.delete("alice/1")
	f.pod("bob/takes-it", 80, on("n0"))
	f.pod("alice/2", 80)
	f.run(after/2 - 5*time.Second)
	want(t, "evicted before the time has counted up again", 1, len(f.evicted))
	f.run(10 * time.Second)
	want(t, "evicted after it", 2, len(f.evicted))
}
