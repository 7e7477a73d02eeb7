package dispatch

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
)

// An autoscaler sees only pods whose gates are open.
func TestAutoscalerSees(t *testing.T) {
	for name, tc := range map[string]struct {
		cards []gpu.Memory
		scene func(f *fixture)
		// passes, then the gates of these pods are open. No pod gets a charge.
		passes time.Duration
		want   []string
	}{
		"there is no node": {nil, func(f *fixture) { f.pod("alice/1", 4) }, 0, []string{"alice/1"}},
		"no node of the pod's pool": {[]gpu.Memory{16}, func(f *fixture) {
			f.Nodes = nodesOf(func(unique.Handle[string]) []string { return nil })
			f.pod("alice/1", 4)
		}, 0, []string{"alice/1"}},
		"a group that is larger than all nodes": {[]gpu.Memory{16, 16, 16}, func(f *fixture) { f.group("alice/job", 4) }, 0,
			[]string{"alice/job-0", "alice/job-1", "alice/job-2", "alice/job-3"}},
		"nodes that are full":        {[]gpu.Memory{4}, func(f *fixture) { f.fill(); f.pod("alice/1", 4) }, provisionAfter - time.Second, nil},
		"nodes that are full longer": {[]gpu.Memory{4}, func(f *fixture) { f.fill(); f.pod("alice/1", 4) }, provisionAfter + queue.Retry, []string{"alice/1"}},
		"one item of each tenant": {nil, func(f *fixture) {
			f.pod("alice/1", 4)
			f.pod("alice/2", 4)
			f.pod("bob/1", 4)
			f.pod("bob/2", 4)
		}, provisionLife - time.Second, []string{"alice/1", "bob/1"}},
		"the next one, if no node came": {nil, func(f *fixture) { f.pod("alice/1", 4); f.pod("alice/2", 4) }, provisionLife + queue.Retry, []string{"alice/1", "alice/2"}},
		"a member that joins later": {nil, func(f *fixture) {
			f.group("alice/job", 2)
			f.tick(0)
			f.delete("alice/job-1")
			f.tick(0)
			f.pod("alice/job-2", 16, inGroup("job"))
		}, queue.Retry, []string{"alice/job-0", "alice/job-2"}},
		"a pod that never had a gate takes no turn": {nil, func(f *fixture) { f.pod("alice/1", 4, open); f.pod("alice/2", 4) }, 0, []string{"alice/1", "alice/2"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, tc.cards, func(o *Options) { o.Provisioning = 1 })
			tc.scene(f)
			f.tick(0)
			for passed := time.Duration(0); passed < tc.passes; passed += time.Second {
				f.tick(time.Second)
			}
			var opened []string
			for name, p := range f.pods {
				if !p.Gated && p.Node == "" {
					opened = append(opened, name)
				}
			}
			slices.Sort(opened)
			want(t, "gates that are open", tc.want, opened)
			want(t, "granted", nil, f.admitted())
		})
	}
}

// group adds the members of a group, each of which asks for a whole card.
func (f *fixture) group(name string, size int) {
	_, short, _ := strings.Cut(name, "/")
	f.groups.sizes[short] = size
	for i := range size {
		f.pod(fmt.Sprint(name, "-", i), 16, inGroup(short))
	}
}

// fill fills the first node with a pod of a third tenant.
func (f *fixture) fill() {
	f.SetNamespace("carol", Namespace{Tenant: "carol"})
	f.pod("carol/1", 4, on("n0"))
}

// A new node goes to the tenant whose turn it is.
func TestNewNode(t *testing.T) {
	f := newFixture(t, []gpu.Memory{4}, func(o *Options) { o.Provisioning = 1 })
	f.pod("bob/has", 4, on("n0"))
	f.pod("bob/seen", 4)
	f.run(provisionAfter + queue.Retry)
	want(t, "bob's gate", false, f.pods["bob/seen"].Gated)
	f.pod("alice/1", 4)
	f.ledger.SetNode("n0", ledger.NodeSpec{Unit: gpu.GiB, Cards: []gpu.Card{{Index: 0, Memory: 4}, {Index: 1, Memory: 4}}})
	f.NodesChanged()
	f.tick(0)
	want(t, "granted", []string{"alice/1"}, f.admitted())
	f.delete("alice/1")
	f.requeues = 0
	f.tick(0)
	want(t, "granted next", []string{"bob/seen"}, f.admitted())
	want(t, "requeues", 1, f.requeues)
}

// No node comes: pods of tenants above their share are evicted, as for any other pod.
func TestAutoscalerAndReclaim(t *testing.T) {
	f := newReclaimFixture(t, 4, 4)
	f.Provisioning = 1
	f.pod("alice/1", 2)
	f.run(after + 2*time.Second)
	want(t, "its gate", false, f.pods["alice/1"].Gated)
	want(t, "evicted", []string{"bob/7", "bob/6"}, f.evicted)
}

// The gates that a former leader has opened for an autoscaler stay open. The next leader opens those of one more item.
func TestAutoscalerLeaderChanges(t *testing.T) {
	f := newFixture(t, nil, func(o *Options) { o.Provisioning = 1 })
	for i := range 3 {
		f.pod(fmt.Sprint("alice/", i), 4)
	}
	f.tick(0)
	f.StopLeading()
	f.StartLeading()
	f.tick(queue.Retry)
	want(t, "opened", []string{"alice/0", "alice/1"}, f.granted)
}
