package dispatch

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/queue"
)

// strange is a pod that a user bound to an unknown node by spec.nodeName, with as much as a request can be.
func strange(namespace string) Pod {
	return Pod{Pod: gpu.Pod{UID: gpu.PodUID(namespace + "/strange"), Namespace: namespace, Name: "strange", Request: math.MaxInt64}, Node: "elsewhere"}
}

// TestHugeRequest: when a pod with a huge request ends, its tenant has what its other pods have.
func TestHugeRequest(t *testing.T) {
	f := newFixture(t, []gpu.Memory{16, 16}, nil)
	f.pod("alice/a", 16, on("n0"))
	p := strange("alice")
	f.SetPod(p)
	p.Ended = true
	f.SetPod(p)
	want(t, "allocated", map[string]gpu.Memory{"alice": 16}, f.allocated())
	f.Tenants() // It must not panic.
}

// TestHugeRequests: the requests of several tenants add up to more than a number can hold.
func TestHugeRequests(t *testing.T) {
	f := newFixture(t, []gpu.Memory{16, 16}, nil)
	f.pod("alice/a", 16)
	for i := range 6 {
		namespace := fmt.Sprint("strange-", i)
		f.SetNamespace(namespace, Namespace{Tenant: namespace, Terms: fairshare.DefaultTerms})
		f.SetPod(strange(namespace))
	}
	f.Tenants() // It must end.
	f.tick(time.Second)
	want(t, "admitted", []string{"alice/a"}, f.admitted())
}

// TestUnbindablePods: a tenant whose pods are never bound, because their volume doesn't exist, doesn't keep others from their turns.
func TestUnbindablePods(t *testing.T) {
	f := newFixture(t, []gpu.Memory{20_000}, nil)
	f.pod("bob/has", 1000, on("n0"))
	for i := range 3000 {
		f.pod(fmt.Sprint("alice/", i), 1, age(i))
	}
	f.tick(time.Second)
	f.pod("bob/waits", 1)
	f.tick(2 * time.Second)
	if !f.IsAdmitted(f.pods["bob/waits"].Pod) {
		t.Error("the pod of a tenant with few open ones awaits its turn")
	}
}

// TestGroupPriority: a group has the lowest priority of its members.
func TestGroupPriority(t *testing.T) {
	f := newFixture(t, []gpu.Memory{4}, nil)
	f.groups.sizes["job"] = 2
	f.pod("alice/job-0", 2, inGroup("job"), priority(9))
	f.pod("alice/job-1", 2, inGroup("job"))
	f.pod("alice/single", 4, priority(5))
	f.tick(time.Second)
	want(t, "admitted", []string{"alice/single"}, f.admitted())
}

// TestForgetTenants: a tenant whose namespace is deleted while places are held for its pods is forgotten.
func TestForgetTenants(t *testing.T) {
	f := newReclaimFixture(t, 4)
	for i := range 3 {
		namespace := fmt.Sprint("ci-", i)
		f.SetNamespace(namespace, Namespace{Tenant: namespace, Terms: fairshare.DefaultTerms})
		f.pod(namespace+"/1", 2)
		f.run(after + 12*time.Minute)
		f.RemoveNamespace(namespace)
		f.delete(namespace + "/1")
		f.run(2 * time.Second)
		for name, p := range f.pods {
			if p.Leaving {
				f.pod(name, 0, func(p *Pod) { p.Leaving = false })
			}
		}
	}
	for _, s := range f.queue.Tenants() {
		if s.Name != "alice" && s.Name != "bob" {
			t.Errorf("the queue knows %s", s.Name)
		}
	}
}

// TestUnbindableGroup: nor do two tenants, each with a group of more pods than may be granted at one time, even if it is created again and
// again.
func TestUnbindableGroup(t *testing.T) {
	f := newFixture(t, []gpu.Memory{20_000}, nil)
	f.groups.sizes["job"] = maxOpen + 1
	f.SetNamespace("carol", Namespace{Tenant: "carol", Terms: fairshare.DefaultTerms})
	f.pod("bob/has", 1000, on("n0"))
	for i := range maxOpen + 1 {
		f.pod(fmt.Sprint("alice/job-", i), 1, inGroup("job"))
		f.pod(fmt.Sprint("carol/job-", i), 1, inGroup("job"))
	}
	f.tick(time.Second)
	f.pod("alice/single", 1)
	f.pod("bob/waits", 1)
	f.tick(2 * time.Second)
	for name, want := range map[string]bool{"alice/job-0": true, "carol/job-0": true, "alice/single": false, "bob/waits": true} {
		if got := f.IsAdmitted(f.pods[name].Pod); got != want {
			t.Errorf("%s is admitted: %v", name, got)
		}
	}
}

// TestPodsThatDiffer: a tenant with many pods that can all use different nodes doesn't keep others from their turns.
func TestPodsThatDiffer(t *testing.T) {
	f := newFixture(t, []gpu.Memory{16}, withSelectors("n0"))
	f.pod("bob/has", 1, on("n0"))
	for i := range 100 {
		f.pod(fmt.Sprint("alice/", i), 1, only(fmt.Sprint("other-", i)))
	}
	f.pod("bob/waits", 1)
	f.tick(time.Second)
	want(t, "admitted", []string{"bob/waits"}, f.admitted())
	f.pod("alice/fits", 1, age(1))
	for range 100 / maxSearches {
		f.tick(100 * time.Millisecond)
	}
	f.tick(100 * time.Millisecond)
	want(t, "admitted, when all were tried", []string{"alice/fits", "bob/waits"}, f.admitted())
}

// TestVictimsThatChange: a user who keeps changing the labels of running pods doesn't keep them from being evicted.
func TestVictimsThatChange(t *testing.T) {
	f := newReclaimFixture(t, 4, 4)
	f.pod("alice/1", 2)
	f.meanwhile = func() {
		for i := range 8 {
			f.pod(fmt.Sprint("bob/", i), 0, func(p *Pod) { p.Cards = 2 - p.Cards })
		}
	}
	f.run(after + 2*time.Second)
	want(t, "evicted", []string{"bob/7", "bob/6"}, f.evicted)
}

// TestUrgentMemberThatWaits: only a running member that needs no turn spares its group. One that is never bound, or has ended, doesn't.
func TestUrgentMemberThatWaits(t *testing.T) {
	f := newReclaimFixture(t, 4, 4)
	for i := range 4 {
		f.pod(fmt.Sprint("bob/", i), 0, inGroup("job"))
		f.pod(fmt.Sprint("bob/", 4+i), 0, inGroup("other"))
	}
	f.pod("bob/waits", 100, inGroup("job"), priority(1000))
	f.pod("bob/ended", 1, inGroup("other"), priority(1000), on("n1"), func(p *Pod) { p.Ended = true })
	f.ledger.Remove("bob/ended")
	for i := range 2 {
		f.pod(fmt.Sprint("alice/", i), 2)
	}
	f.run(after + 2*time.Second)
	want(t, "evicted", 4, len(f.evicted))
}

// TestItemThatChanges: a user who keeps replacing a pod that gets room doesn't keep other tenants from theirs.
func TestItemThatChanges(t *testing.T) {
	f := newReclaimFixture(t, 4, 4)
	f.SetNamespace("carol", Namespace{Tenant: "carol", Terms: fairshare.DefaultTerms})
	f.pod("alice/1", 2)
	f.pod("carol/0", 1)
	n := 0
	f.meanwhile = func() {
		f.delete(fmt.Sprint("carol/", n))
		n++
		f.pod(fmt.Sprint("carol/", n), 1)
	}
	f.run(after + queue.Retry/2)
	want(t, "evicted for alice", []string{"bob/7", "bob/6"}, f.evicted)
}

// TestStartOfRunningPods: a pod that ran before this process began to lead stays as old as it is when its labels change.
func TestStartOfRunningPods(t *testing.T) {
	f := newReclaimFixture(t, 4, 4)
	for i := range 8 {
		f.pod(fmt.Sprint("bob/", i), 0, func(p *Pod) { p.Cards = 2 })
	}
	f.pod("alice/1", 2)
	f.run(after + 2*time.Second)
	want(t, "evicted", []string{"bob/7", "bob/6"}, f.evicted)
}

// TestItemsThatChange: nor does a user who replaces pods by pods that differ from the former ones.
func TestItemsThatChange(t *testing.T) {
	f := newReclaimFixture(t, 4, 4)
	f.SetNamespace("carol", Namespace{Tenant: "carol", Terms: fairshare.DefaultTerms})
	f.pod("alice/1", 2)
	f.pod("carol/0", 1)
	n := 0
	f.meanwhile = func() {
		f.delete(fmt.Sprint("carol/", n))
		n++
		f.pod(fmt.Sprint("carol/", n), 1, priority(int32(n)))
	}
	f.run(after + queue.Retry/2)
	want(t, "evicted for alice", []string{"bob/7", "bob/6"}, f.evicted)
}

// TestSharesThatChange: a user who creates pods whenever a plan is made, and deletes them again, ends attempts for others, since these have
// lower shares meanwhile. The next attempt comes soon all the same.
func TestSharesThatChange(t *testing.T) {
	f := newReclaimFixture(t, 4, 4)
	f.SetNamespace("carol", Namespace{Tenant: "carol", Terms: fairshare.DefaultTerms})
	for i := range 4 {
		f.pod(fmt.Sprint("alice/", i), 1)
	}
	f.meanwhile = func() { f.pod("carol/1", 4) }
	for range time.Hour / time.Second {
		f.tick(time.Second)
		if _, exists := f.pods["carol/1"]; exists {
			f.delete("carol/1")
		}
	}
	want(t, "evicted", []string(nil), f.evicted)
	f.meanwhile = nil
	f.run(queue.Retry + time.Second)
	want(t, "evicted for alice", []string{"bob/7", "bob/6", "bob/5", "bob/4"}, f.evicted)
}

// TestShareOfVictims: nor does the share of the tenant whose pods are to be evicted make others wait for long, if it changes meanwhile.
func TestShareOfVictims(t *testing.T) {
	f := newReclaimFixture(t, 4, 4)
	f.pod("alice/1", 4)
	more := func(guaranteed gpu.Memory) {
		f.SetNamespace("bob", Namespace{Tenant: "bob", Terms: fairshare.Terms{Weight: 1, Guaranteed: guaranteed}})
	}
	f.meanwhile = func() { more(7) }
	for range time.Hour / time.Second {
		f.tick(time.Second)
		more(0)
	}
	want(t, "evicted", []string(nil), f.evicted)
	f.meanwhile = nil
	f.run(queue.Retry + time.Second)
	want(t, "evicted for alice", []string{"bob/7", "bob/6", "bob/5", "bob/4"}, f.evicted)
}

// TestDemandThatFlaps: a tenant that creates and deletes pods every few seconds keeps others from nothing that is within their shares for most of
// the time.
func TestDemandThatFlaps(t *testing.T) {
	f := newReclaimFixture(t, 6, 6)
	f.SetNamespace("carol", Namespace{Tenant: "carol", Terms: fairshare.DefaultTerms})
	for i := range 6 {
		f.pod(fmt.Sprint("alice/", i), 1)
	}
	for second := range int(time.Hour / time.Second) {
		switch second % 5 {
		case 0:
			f.pod("carol/1", 6)
		case 2:
			f.delete("carol/1")
		}
		f.tick(time.Second)
		if second%20 == 0 {
			f.finish()
		}
		f.bindAll()
	}
	want(t, "evicted", []string{"bob/11", "bob/10", "bob/9", "bob/8", "bob/7", "bob/6"}, f.evicted)
	want(t, "tenants", map[string]gpu.Memory{"alice": 6, "bob": 6}, f.allocated())
}

// TestUnbindableTenants: however many tenants have pods that are never bound, another tenant gets a turn.
func TestUnbindableTenants(t *testing.T) {
	f := newFixture(t, []gpu.Memory{20_000}, nil)
	f.pod("bob/has", 1000, on("n0"))
	for tenant := range maxOpen {
		name := fmt.Sprint("carol-", tenant)
		f.SetNamespace(name, Namespace{Tenant: name, Terms: fairshare.DefaultTerms})
		for i := range 2 {
			f.pod(fmt.Sprint(name, "/", i), 1, age(i))
		}
	}
	f.tick(time.Second)
	f.pod("bob/waits-0", 1)
	f.pod("bob/waits-1", 1)
	f.tick(2 * time.Second)
	bobs := func() (names []string) {
		for _, name := range f.admitted() {
			if f.pods[name].Namespace == "bob" {
				names = append(names, name)
			}
		}
		return names
	}
	want(t, "admitted", []string{"bob/waits-0"}, bobs())
	f.bind("bob/waits-0")
	f.tick(time.Second)
	want(t, "admitted then", []string{"bob/waits-1"}, bobs())
	if n := len(f.admitted()); n > maxOpen+1 {
		t.Errorf("%d pods are admitted", n)
	}
}

// TestFewUnbindableTenants: beside some tenants with as many such pods as they may have, another tenant has several open pods.
func TestFewUnbindableTenants(t *testing.T) {
	f := newFixture(t, []gpu.Memory{20_000}, nil)
	f.pod("bob/has", 1000, on("n0"))
	for tenant := range 16 {
		name := fmt.Sprint("carol-", tenant)
		f.SetNamespace(name, Namespace{Tenant: name, Terms: fairshare.DefaultTerms})
		for i := range 64 {
			f.pod(fmt.Sprint(name, "/", i), 1, age(i))
		}
	}
	f.tick(time.Second)
	before := len(f.admitted())
	for i := range 8 {
		f.pod(fmt.Sprint("bob/", i), 1)
	}
	f.tick(2 * time.Second)
	if more := len(f.admitted()) - before; more < 4 {
		t.Errorf("%d of its pods are admitted beside %d others", more, before)
	}
}
