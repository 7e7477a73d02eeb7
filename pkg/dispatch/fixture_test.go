package dispatch

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reclaim"
	"github.com/gpushare/gpushare/test/fake"
)

var begin = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)

// firstPause is the pause after the first failure in a namespace: until its next turn. It doubles each time.
const firstPause = 2 * time.Second

// patience is Options.Patience.
const patience = 30 * time.Second

// fixture is a Manager that leads, with a real ledger. Gates open at once, and the watch reports it.
type fixture struct {
	*Manager
	t      *testing.T
	ledger *ledger.Ledger
	now    time.Time
	pods   map[string]Pod
	// groups are the sizes of groups.
	groups *fakeGroups
	// binding are the pods whose bind is in flight.
	binding map[gpu.PodUID]bool
	// granted are the names of the pods in the order in which they were granted; requeues counts the requeues.
	granted           []string
	requeues, expired int
	// failed counts the reclaims without success.
	failed int
	// evicted are the names of the pods whose eviction was requested, in order. evictionsFail makes such requests fail.
	evicted       []string
	evictionsFail bool
	// evicting are the victims of rounds whose deletion isn't visible yet.
	evicting map[gpu.PodUID]bool
	// meanwhile, if not nil, is called before a plan is made.
	meanwhile func()
	// planned, if not nil, is called with each plan before its victims are evicted.
	planned func(reclaim.Plan)
	// gatesFail makes the writes fail that open gates.
	gatesFail bool
	// tooLarge are pods that fit no node for their CPU.
	tooLarge []gpu.PodUID
}

// newFixture returns a fixture with nodes n0, n1 … of one card each, and the tenants alice and bob. change, which can be nil,
// changes the options.
func newFixture(t *testing.T, cards []gpu.Memory, change func(*Options)) *fixture {
	rules := NewTurnRules(1000)
	f := &fixture{
		t: t, now: begin, pods: map[string]Pod{}, binding: map[gpu.PodUID]bool{}, evicting: map[gpu.PodUID]bool{},
	}
	f.ledger = ledger.NewWithResources(resources{f: f, Resources: fake.Resources(func(q ledger.ResourceQuery) bool {
		return !slices.ContainsFunc(q.Pods, func(uid gpu.PodUID) bool { return slices.Contains(f.tooLarge, uid) })
	})}, rules)
	f.groups = &fakeGroups{f: f, sizes: map[string]int{}}
	f.ledger.AddFreedListener(func(node string) { f.Freed(node) })
	var nodes []string
	o := Options{
		Ledger: f.ledger, View: ledger.View{Card: placement.Binpack, Node: placement.Binpack}, Groups: f.groups,
		Release: func(uid gpu.PodUID) {
			if !f.binding[uid] {
				f.ledger.Release(uid)
			}
		},
		Nodes:     nodesOf(func(unique.Handle[string]) []string { return nodes }),
		Failures:  &queue.Failures{},
		TurnRules: rules, Patience: patience, MayEvict: func() bool { return true },
		Evicting: func(uid gpu.PodUID) bool { return f.evicting[uid] }, Observer: f,
	}
	if change != nil {
		change(&o)
	}
	f.Manager = New(o)
	for i, memory := range cards {
		name := fmt.Sprint("n", i)
		f.ledger.SetNode(name, ledger.NodeSpec{Unit: gpu.GiB, Cards: []gpu.Card{{Memory: memory}}})
		nodes = append(nodes, name)
	}
	for _, name := range []string{"alice", "bob"} {
		f.SetNamespace(name, Namespace{Tenant: name, Terms: fairshare.DefaultTerms})
	}
	f.StartLeading()
	return f
}

// resources are those of a fixture. The shape of a pod has its constraints.
type resources struct {
	fake.Resources
	f *fixture
}

func (r resources) Shape(uid gpu.PodUID) (placement.Shape, bool) {
	p, known := r.f.pods[string(uid)]
	return placement.Shape{Demand: p.Demand(), Constraints: p.Constraints}, known
}

// foundNodes are the nodes that find returns for constraints, until nodes change.
type foundNodes struct {
	find  func(unique.Handle[string]) []string
	found map[unique.Handle[string]][]string
}

func nodesOf(find func(unique.Handle[string]) []string) *foundNodes {
	return &foundNodes{find, map[unique.Handle[string]][]string{}}
}

func (n *foundNodes) UsableNodes(constraints unique.Handle[string]) []string {
	if _, known := n.found[constraints]; !known {
		n.found[constraints] = n.find(constraints)
	}
	return n.found[constraints]
}

func (n *foundNodes) UsableAmong(constraints unique.Handle[string], nodes []string) (among []string) {
	names := n.UsableNodes(constraints)
	return slices.DeleteFunc(slices.Clone(nodes), func(name string) bool { return !slices.Contains(names, name) })
}

// NodesChanged records that all nodes have changed.
func (f *fixture) NodesChanged() {
	if n, fake := f.Nodes.(*foundNodes); fake {
		clear(n.found)
	}
	for _, n := range f.ledger.Nodes() {
		f.Freed(n.Name)
	}
}

// fakeGroups says that the members of a group, which the first part of their names after the namespace is, are startable once
// enough exist that no other gate holds back. Their shape is the name of the group.
type fakeGroups struct {
	f      *fixture
	sizes  map[string]int
	urgent []gpu.PodUID
}

func (g *fakeGroups) Startable(key gang.Key, _ time.Time) gang.Startable {
	var together []gpu.PodUID
	bound := 0
	for _, p := range g.f.pods {
		switch {
		case p.Group != key || p.Ended:
		case p.Node != "":
			bound++
		case !p.GatedOtherwise:
			together = append(together, p.UID)
		}
	}
	slices.Sort(together)
	switch size := g.sizes[key.Name]; {
	case bound >= size:
		return gang.Startable{Alone: together, Completing: g.urgent}
	case bound+len(together) < size:
		return gang.Startable{}
	}
	return gang.Startable{Together: together, Shape: key.Name}
}

func (f *fixture) PodGranted(time.Duration) {}
func (f *fixture) ChargeExpired()           { f.expired++ }
func (f *fixture) ReclaimFailed()           { f.failed++ }

type edit func(*Pod)

func gatedOtherwise(p *Pod) { p.GatedOtherwise = true }
func open(p *Pod)           { p.Gated = false }
func priority(n int32) edit { return func(p *Pod) { p.Priority = n } }
func age(n int) edit        { return func(p *Pod) { p.Created = begin.Add(time.Duration(n) * time.Second) } }

// Surplus returns the bound members beyond the group's size, those with the last names. A group without a size has none.
func (g fakeGroups) Surplus(key gang.Key) (surplus []gpu.PodUID) {
	for _, p := range g.f.pods {
		if p.Group == key && p.Node != "" && !p.Ended && !p.Leaving {
			surplus = append(surplus, p.UID)
		}
	}
	slices.Sort(surplus)
	size := g.sizes[key.Name]
	if size == 0 || len(surplus) <= size {
		return nil
	}
	return surplus[size:]
}

func inGroup(name string) edit {
	return func(p *Pod) { p.Group = gang.Key{Namespace: p.Namespace, Name: name} }
}
func on(node string) edit { return func(p *Pod) { p.Node, p.Gated = node, false } }

// pod adds a gated pod, or changes one. Its name is namespace/name.
func (f *fixture) pod(name string, memory gpu.Memory, edits ...edit) {
	p, known := f.pods[name]
	if !known {
		namespace, short, _ := strings.Cut(name, "/")
		p = Pod{Pod: gpu.Pod{UID: gpu.PodUID(name), Namespace: namespace, Name: short, Request: memory}, Gated: true, Created: begin, Constraints: unique.Make("")}
	}
	for _, edit := range edits {
		edit(&p)
	}
	p.RoomKey = unique.Make(fmt.Sprint(p.Demand(), p.Priority, p.Constraints.Value()))
	if f.pods[name] = p; p.Node != "" {
		f.ledger.SetBound(p.Node, p.Pod, gpu.Placement{{Card: 0, Memory: p.Request}}, f.now)
	}
	f.SetPod(p)
}

// delete deletes the pods.
func (f *fixture) delete(names ...string) {
	for _, name := range names {
		p := f.pods[name]
		delete(f.pods, name)
		f.ledger.Remove(p.UID)
		f.RemovePod(p.UID)
	}
}

// tick lets time pass and performs the effects.
func (f *fixture) tick(pass time.Duration) {
	f.now = f.now.Add(pass)
	f.Tick(f.now)
	effects := f.TakeEffects()
	if effects.Requeue {
		f.requeues++
	}
	if effects.Reclaim != nil {
		f.reclaimFor(effects.Reclaim)
	}
	for _, opened := range effects.Open {
		f.GateOpened(opened.UID, !f.gatesFail)
		if p, exists := f.pods[string(opened.UID)]; exists && !f.gatesFail {
			f.granted = append(f.granted, opened.String())
			open(&p)
			f.pods[string(opened.UID)] = p
			f.SetPod(p)
		}
	}
}

// bind binds an admitted pod where its place is, or wherever it fits.
func (f *fixture) bind(name string) {
	f.t.Helper()
	p := f.pods[name]
	if !f.IsAdmitted(p.Pod) {
		f.t.Fatalf("%s is rejected", name)
	}
	node, _, placed := f.ledger.Lookup(p.UID)
	if !placed {
		if node, placed = f.anyFit(p.Pod); !placed {
			f.t.Fatalf("%s fits nowhere", name)
		}
	}
	f.pod(name, 0, on(node))
}

// anyFit returns a node that the pod fits.
func (f *fixture) anyFit(pod gpu.Pod) (node string, ok bool) {
	return f.ledger.FirstFit(pod, f.Nodes.UsableNodes(unique.Handle[string]{}))
}

// bindAll binds all pods that are admitted.
func (f *fixture) bindAll() {
	f.t.Helper()
	for name, p := range f.pods {
		if f.IsAdmitted(p.Pod) && p.Node == "" && !p.Gated {
			f.bind(name)
		}
	}
}

// allocated returns what the tenants have, as the Manager counts it.
func (f *fixture) allocated() map[string]gpu.Memory {
	out := map[string]gpu.Memory{}
	for _, tenant := range f.Tenants() {
		out[tenant.Name] = tenant.Allocated
	}
	return out
}

// knownAdmitted returns the pods that the Manager knows as granted or bound.
func (f *fixture) knownAdmitted() map[gpu.PodUID]bool {
	known := map[gpu.PodUID]bool{}
	for uid := range f.Manager.admitted.Range {
		known[uid.(gpu.PodUID)] = true
	}
	return known
}

// admitted returns the names of the unbound pods that filter may place.
func (f *fixture) admitted() (names []string) {
	for name, p := range f.pods {
		if f.IsAdmitted(p.Pod) && p.Node == "" {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// roundLasts is for how long places are held.
const roundLasts = 10 * time.Minute

// reclaimFor does what the caller of a Manager does: it makes a plan, has its places held, and evicts. Evicted pods stay until finish
// is called.
func (f *fixture) reclaimFor(search *Search) {
	need := search.Need()
	if f.meanwhile != nil {
		f.meanwhile()
	}
	plan, ok := reclaim.Choose(need, f.cluster())
	made := ok && f.Hold(search, plan) && !f.evictionsFail
	if made && f.planned != nil {
		f.planned(plan)
	}
	if made {
		tenants, running := map[string]Tenant{}, f.running()
		for _, t := range f.Tenants() {
			tenants[t.Name] = t
		}
		for _, v := range plan.Victims {
			tenant := tenants[v.Tenant]
			if running[v.Tenant] -= v.Memory(); running[v.Tenant] < tenant.Share {
				f.t.Errorf("%s gets %d of its share of %d by the eviction of %v", v.Tenant, running[v.Tenant], tenant.Share, v.Pods)
			}
			if beneficiary := tenants[v.For.Tenant]; beneficiary.Allocated >= beneficiary.Share {
				f.t.Errorf("%v are evicted for %s, which has %d of its share of %d", v.Pods, v.For.Tenant, beneficiary.Allocated, beneficiary.Share)
			}
			for _, pod := range v.Pods {
				f.evicted = append(f.evicted, pod.String())
				f.pod(pod.String(), 0, func(p *Pod) { p.Leaving, p.Lingers = true, false })
			}
		}
	}
	until := time.Time{}
	if made {
		until = f.now.Add(roundLasts)
	}
	f.Reclaimed(search, until)
}

// running returns what the bound pods of each tenant have that are not being deleted.
func (f *fixture) running() map[string]gpu.Memory {
	out := map[string]gpu.Memory{}
	for _, p := range f.pods {
		if ns := f.namespaces[p.Namespace]; p.Node != "" && !p.LeavesSoon() && !ns.Exempt {
			out[ns.Tenant] += p.Request
		}
	}
	return out
}

// cluster returns the state of the ledger, with the pods gone that are being deleted.
func (f *fixture) cluster() reclaim.Cluster {
	c := reclaim.Cluster{Cards: map[string][]placement.Card{}, Leaving: map[string][]gpu.PodUID{}, Places: map[gpu.PodUID]reclaim.Place{}}
	c.FitsResources = func(string, []gpu.Pod, []gpu.PodUID) bool { return true }
	for _, node := range f.ledger.Nodes() {
		available, _ := f.ledger.Availability(node.Name, gpu.Pod{}, nil)
		c.Cards[node.Name] = available.Cards
		for _, h := range f.reclaims.holds {
			for _, share := range h.reservation.Places {
				if share.Node == node.Name {
					c.Cards[node.Name][share.On[0].Card].Unhealthy = true // As package eviction does it.
				}
			}
		}
		for _, a := range node.Allocations {
			switch {
			case a.LeavesSoon():
				placement.Release(c.Cards[node.Name], a.Placement)
				c.Leaving[node.Name] = append(c.Leaving[node.Name], a.UID)
			case a.State == ledger.Bound:
				c.Places[a.UID] = reclaim.Place{Node: node.Name, On: a.Placement}
			}
		}
	}
	return c
}

// finish deletes the pods that are being deleted.
func (f *fixture) finish() {
	for name, p := range f.pods {
		if p.Leaving {
			f.delete(name)
		}
	}
}
