package dispatch

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// cpu is a Capacity in which some pods fit no node.
type cpu struct{ tooLarge []gpu.PodUID }

func (c cpu) Take(_ string, uid gpu.PodUID) bool { return !slices.Contains(c.tooLarge, uid) }
func (c cpu) Return(string, gpu.PodUID)          {}

// What never fits, by its cards, for its CPU, or as a whole group, is no demand until the nodes change.
func TestNeverFits(t *testing.T) {
	large := cpu{[]gpu.PodUID{"bob/cpu"}}
	f := newFixture(t, []gpu.Memory{4, 4}, func(o *Options) {
		o.Capacity = func(...ledger.Source) ledger.Capacity { return large }
		o.EmptyCapacity = func() ledger.Capacity { return o.Capacity() }
	})
	f.pod("alice/1", 4)
	f.pod("alice/2", 4)
	f.tick(0)
	f.bindAll()
	f.groups.sizes["job"] = 3
	for _, name := range []string{"bob/job-0", "bob/job-1", "bob/job-2"} {
		f.pod(name, 4, inGroup("job"), priority(2))
	}
	f.pod("bob/cpu", 3, priority(1))
	f.pod("bob/card", 5)
	f.pod("bob/fits", 2, age(1))
	f.tick(0)
	want(t, "the tenants", []Tenant{
		{Terms: fairshare.DefaultTerms, Name: "alice", Share: 6, Allocated: 8, Before: 1},
		{Terms: fairshare.DefaultTerms, Name: "bob", Share: 2, Waiting: 6, WaitingMemory: 22, PassedOver: 1, Infeasible: 5, Next: f.pods["bob/fits"].Pod, Obstacle: reasons.ObstacleNoRoom},
	}, f.Tenants())
	large.tooLarge[0] = ""
	f.delete("bob/fits")
	f.tick(time.Second)
	want(t, "the share while no node has changed", 0, f.share("bob"))
	f.NodesChanged()
	f.tick(time.Second)
	want(t, "the share with larger nodes", 3, f.share("bob"))
	f.groups.sizes["job"] = 2
	f.delete("bob/job-2")
	f.tick(time.Second)
	want(t, "the share with a smaller group", 4, f.share("bob"))
}

// CPU that pods without GPU memory used is free again, which changes no node: some time later the pod that needs it counts for its tenant's demand.
func TestNeverFitsExpires(t *testing.T) {
	large := cpu{[]gpu.PodUID{"bob/cpu"}}
	f := newFixture(t, []gpu.Memory{4}, func(o *Options) {
		o.EmptyCapacity = func() ledger.Capacity { return large }
	})
	f.pod("alice/1", 4, on("n0"))
	f.pod("bob/cpu", 3)
	f.tick(0)
	want(t, "the share while no node has the CPU", 0, f.share("bob"))
	large.tooLarge[0] = ""
	f.tick(feasibleFor)
	want(t, "the share afterwards", 2, f.share("bob"))
}

// A pod that is too large for every card is no demand, although a smaller one of the same kind is tried before it and has no room.
func TestNeverFitsBehindSmaller(t *testing.T) {
	f := newFixture(t, []gpu.Memory{8}, func(o *Options) {
		o.Capacity = func(...ledger.Source) ledger.Capacity { return cpu{} }
		o.EmptyCapacity = func() ledger.Capacity { return o.Capacity() }
	})
	f.pod("bob/1", 8)
	f.tick(0)
	f.bindAll()
	f.pod("alice/small", 4, priority(1))
	f.pod("alice/large", 1000)
	f.tick(0)
	want(t, "alice's share", 4, f.share("alice"))
	want(t, "the obstacles", []reasons.Obstacle{reasons.ObstacleNoRoom, reasons.ObstacleNeverFits}, []reasons.Obstacle{f.Turns()["alice/small"].Obstacle, f.Turns()["alice/large"].Obstacle})
}

// A pod gets its turn at once although another tenant waits with hundreds of pods of different sizes that come first and fit
// nowhere now.
func TestManySizes(t *testing.T) {
	f := newFixture(t, []gpu.Memory{1000, 10}, func(o *Options) {
		o.Capacity = func(...ledger.Source) ledger.Capacity { return cpu{} }
		o.EmptyCapacity = func() ledger.Capacity { return o.Capacity() }
	})
	f.pod("alice/large", 401)
	f.tick(0)
	f.bindAll()
	for size := range gpu.Memory(400) {
		f.pod(fmt.Sprintf("bob/%d", size), 600+size)
	}
	f.pod("alice/small", 5)
	f.tick(0)
	want(t, "the unbound pods that had their turn", []string{"alice/small"}, f.admitted())
}

func (f *fixture) share(tenant string) gpu.Memory {
	tenants := f.Tenants()
	return tenants[slices.IndexFunc(tenants, func(t Tenant) bool { return t.Name == tenant })].Share
}
