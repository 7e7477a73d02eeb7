package dispatch

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// What never fits, by its cards, for its CPU, or as a whole group, is no demand until the nodes change.
func TestNeverFits(t *testing.T) {
	f := newFixture(t, []gpu.Memory{4, 4}, nil)
	f.tooLarge = []gpu.PodUID{"bob/cpu"}
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
	f.tooLarge = nil
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
	f := newFixture(t, []gpu.Memory{4}, nil)
	f.tooLarge = []gpu.PodUID{"bob/cpu"}
	f.pod("alice/1", 4, on("n0"))
	f.pod("bob/cpu", 3)
	f.tick(0)
	want(t, "the share while no node has the CPU", 0, f.share("bob"))
	f.tooLarge = nil
	f.tick(queue.Retry)
	want(t, "the share afterwards", 2, f.share("bob"))
}

// A pod that is too large for every card is no demand, although a smaller one of the same kind is tried before it and has no room.
func TestNeverFitsBehindSmaller(t *testing.T) {
	f := newFixture(t, []gpu.Memory{8}, nil)
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
	f := newFixture(t, []gpu.Memory{1000, 10}, nil)
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
