package ledger_test

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/fake"
)

// resourcesFixture is a ledger that knows what nodes have free besides GPU memory.
type resourcesFixture struct {
	*fixture
	cluster *eligibility.Cluster
	nodes   []string
}

// newResourcesFixture returns a ledger of nodes with 8 CPUs and two cards of 16.
func newResourcesFixture(t *testing.T, nodes int) *resourcesFixture {
	f := &resourcesFixture{fixture: &fixture{t: t}, cluster: eligibility.NewCluster()}
	f.Ledger = ledger.NewWithResources(f.cluster, nil)
	f.AddFreedListener(func(node string) { f.freed = append(f.freed, node) })
	for i := range nodes {
		name, s := fmt.Sprint("n", i+1), spec(16, 16)
		f.cluster.SetNode(fake.Node(name, 16, 16), &s) // It has eight CPUs.
		f.SetNode(name, s)
		f.nodes = append(f.nodes, name)
	}
	return f
}

// pending reports a pod that asks for CPUs.
func (f *resourcesFixture) pending(p gpu.Pod, cpus int64) gpu.Pod {
	f.cluster.SetPod(&eligibility.PodUse{Pod: p, Requests: eligibility.Amounts{corev1.ResourceCPU: 1000 * cpus}})
	return p
}

// run reports a pod that is bound to a card.
func (f *resourcesFixture) run(p gpu.Pod, node string, card int, cpus int64, since time.Time) {
	f.cluster.SetPod(&eligibility.PodUse{Pod: p, Node: node, Requests: eligibility.Amounts{corev1.ResourceCPU: 1000 * cpus}})
	f.SetBound(node, p, gpu.On(card, p.Request), since)
}

// end reports that a pod has ended.
func (f *resourcesFixture) end(uid gpu.PodUID) {
	f.cluster.DeletePod(uid)
	f.Remove(uid)
}

// A reservation keeps what its pod needs of the node besides the cards from single pods that come later, until the pod is bound.
func TestReservedResources(t *testing.T) {
	const fits, kept = reasons.Fits, reasons.ResourcesReserved
	f := newResourcesFixture(t, 1)
	f.run(pod("young", 4), "n1", 0, 3, at)
	f.run(pod("old", 4), "n1", 1, 3, longAgo)
	item := f.pending(pod("w0", 16, 1), 4)
	small, none, higher := f.pending(pod("small", 4, 1), 2), f.pending(pod("none", 4, 1), 0), f.pending(pod("higher", 4, 2), 2)
	finds := func(what string, pod gpu.Pod, want reasons.Reason) {
		t.Helper()
		expect(t, what+", Check", []reasons.Reason{want}, f.check(pod, "n1"))
		expect(t, what+", Rank", []reasons.Reason{want}, f.rank(binpack, pod, "n1"))
		_, reason := f.Availability("n1", pod, nil)
		expect(t, what+", Availability", want, reason)
		_, found := f.FirstFit(pod, f.nodes)
		expect(t, what+", FirstFit", want == fits, found)
		nominated := f.NominateAll([]ledger.Request{{Pod: pod, Nodes: f.nodes}}, binpack)
		expect(t, what+", NominateAll", want == fits, nominated[0] != "")
		f.End(ledger.Nominated, string(pod.UID))
		_, err := f.Reserve("n1", pod, placement.Binpack, at)
		expect(t, what+", Reserve", want == fits, err == nil)
		f.Release(pod.UID)
	}
	finds("before the reservation", small, fits)
	expect(t, "reserved", true, f.await([]ledger.Request{{Pod: item, Nodes: f.nodes}}, 1, longAgo.Add(time.Second)))
	// Two CPUs are free, and those of the young pod, which has to end on the reserved card, will be: one more than the item needs.
	finds("a pod that needs one too many", small, kept)
	finds("a pod that needs none", none, fits)
	finds("a pod of higher priority", higher, fits)
	expect(t, "it fits once the old pod has ended", []bool{false, true}, []bool{
		f.FitsResources("n1", []gpu.Pod{small}, nil, nil), f.FitsResources("n1", []gpu.Pod{small}, []gpu.PodUID{"old"}, nil),
	})
	expect(t, "all is free", false, f.AwaitedFree(testItem.ID))
	f.end("old")
	finds("with the CPUs of the old pod", small, fits)
	f.run(pod("long", 4, 2), "n1", 1, 5, at)
	f.end("young")
	expect(t, "all is free but CPU", false, f.AwaitedFree(testItem.ID))
	finds("all that is free is the item's", small, kept)
	f.end("long")
	expect(t, "all is free now", true, f.AwaitedFree(testItem.ID))
	f.End(ledger.Queued, testItem.ID)

	// The place of a plan keeps it too.
	f.run(pod("other", 4), "n1", 1, 3, at)
	f.reserve("n1", item)
	f.SetSource(ledger.Planned, item.UID)
	finds("beside a plan", small, kept)
	expect(t, "of higher priority", []reasons.Reason{fits}, f.check(higher, "n1"))
	f.ResetSource(ledger.Planned, item.UID)
	finds("beside a bind in progress", small, kept)
}

// The held places of reclaim keep the other resources too, with what the pods that are evicted for them use.
func TestReclaimedResources(t *testing.T) {
	f := newResourcesFixture(t, 1)
	f.run(pod("victim", 16), "n1", 0, 3, at)
	f.run(pod("stays", 4), "n1", 1, 2, at)
	item, behind, none := f.pending(pod("item", 16), 5), f.pending(pod("behind", 4), 2), f.pending(pod("none", 4), 0)
	f.AddReservation("item", ledger.Reservation{
		Priority: 9, Source: ledger.Reclaimed, Victims: []gpu.PodUID{"victim"}, Places: []ledger.Place{{Pod: item, Node: "n1", On: gpu.On(0, 16)}},
	})
	// Three CPUs are free, and those of the victim will be: one more than the item needs.
	expect(t, "a pod that needs one too many", []reasons.Reason{reasons.ResourcesReserved}, f.check(behind, "n1"))
	expect(t, "a pod that needs none", []reasons.Reason{reasons.Fits}, f.check(none, "n1"))
	f.End(ledger.Reclaimed, "item")
	expect(t, "after the end", []reasons.Reason{reasons.Fits}, f.check(behind, "n1"))
}

// A pod for which both reclaim and the queue keep a place on one node counts once.
func TestResourcesCountOnce(t *testing.T) {
	f := newResourcesFixture(t, 1)
	item, behind := f.pending(pod("item", 16), 4), f.pending(pod("behind", 4), 4)
	expect(t, "reserved", true, f.await([]ledger.Request{{Pod: item, Nodes: f.nodes}}, 9, longAgo))
	f.AddReservation("item", ledger.Reservation{Priority: 9, Source: ledger.Reclaimed, Places: []ledger.Place{{Pod: item, Node: "n1", On: gpu.On(0, 16)}}})
	expect(t, "a pod that needs what is left of eight CPUs", []reasons.Reason{reasons.Fits}, f.check(behind, "n1"))
}

// A pod that needs much CPU counts as one that needs as much memory: it keeps as much of the node from others.
func TestAwaitedPart(t *testing.T) {
	f := newResourcesFixture(t, 1)
	for cpus, want := range map[int64]gpu.Memory{1: 16, 6: 24, 8: 32} { // The node has eight CPUs, and 32 of memory.
		request := []ledger.Request{{Pod: f.pending(pod("w0", 16), cpus), Nodes: f.nodes}}
		expect(t, "reserved", true, f.await(request, 0, longAgo))
		expect(t, fmt.Sprint(cpus, " CPUs"), map[string]gpu.Memory{"n1": want}, f.AwaitedMemory(testItem.ID))
	}
}

// A choice needs nodes that will have enough of everything: pods that were placed before a time stay, also on other cards.
func TestAwaitedResources(t *testing.T) {
	f := newResourcesFixture(t, 3)
	recent := longAgo.Add(time.Second)
	f.run(pod("a", 4), "n1", 0, 2, at.Add(time.Minute)) // The card of the youngest pod, but another pod has the CPUs.
	f.run(pod("stays", 4), "n1", 1, 5, longAgo)
	f.run(pod("b", 4), "n2", 0, 4, at)
	f.run(pod("c", 4), "n2", 1, 4, at)
	f.run(pod("d", 16), "n3", 0, 1, longAgo)
	f.run(pod("e", 16), "n3", 1, 1, longAgo)
	members := func(cpus ...int64) (requests []ledger.Request) {
		for i, n := range cpus {
			requests = append(requests, ledger.Request{Pod: f.pending(pod(fmt.Sprint("w", i), 16), n), Nodes: f.nodes})
		}
		return requests
	}
	for _, test := range []struct {
		what string
		cpus []int64
		want map[string]gpu.Memory
	}{
		{"a pod for each card of one node", []int64{4, 4}, map[string]gpu.Memory{"n2": 32}},
		{"too much for one node", []int64{4, 5}, nil},
		{"a pod that needs few, and one that needs a whole node", []int64{3, 8}, map[string]gpu.Memory{"n1": 16, "n2": 32}},
		{"none has as many", []int64{9}, nil},
	} {
		expect(t, test.what, test.want != nil, f.await(members(test.cpus...), 0, recent))
		expect(t, test.what, test.want, f.AwaitedMemory(testItem.ID))
		f.End(ledger.Queued, testItem.ID)
	}
}

// Pods of one item that differ only in their CPU are compared with the nodes separately: the best nodes for one may have too little CPU for the
// other.
func TestAwaitedShapes(t *testing.T) {
	f := newResourcesFixture(t, 40)
	for _, node := range f.nodes[:39] {
		f.run(pod("old "+node, 16), node, 0, 7, longAgo.Add(-time.Hour))
	}
	f.run(pod("young 0", 16), "n40", 0, 3, at)
	f.run(pod("young 1", 16), "n40", 1, 3, at)
	few, many := f.pending(pod("w0", 16), 1), f.pending(pod("w1", 16), 4)
	expect(t, "reserved", true, f.await([]ledger.Request{{Pod: few, Nodes: f.nodes}, {Pod: many, Nodes: f.nodes}}, 0, longAgo))
}

// The same holds for pods that differ only in another resource, such as an adapter that only some members of a group have.
func TestAwaitedOtherResources(t *testing.T) {
	f := newResourcesFixture(t, 40)
	for _, node := range f.nodes[:39] {
		f.run(pod("old "+node, 16), node, 0, 7, longAgo.Add(-time.Hour))
	}
	adapter, with := corev1.ResourceName("example.com/adapter"), fake.Node("n40", 16, 16)
	with.Status.Allocatable[adapter] = resource.MustParse("1")
	s := spec(16, 16)
	f.cluster.SetNode(with, &s)
	f.run(pod("young 0", 16), "n40", 0, 1, at)
	f.run(pod("young 1", 16), "n40", 1, 1, at)
	leader, worker := f.pending(pod("w0", 16), 1), pod("w1", 16)
	f.cluster.SetPod(&eligibility.PodUse{Pod: worker, Requests: eligibility.Amounts{corev1.ResourceCPU: 1000, adapter: 1}})
	expect(t, "reserved", true, f.await([]ledger.Request{{Pod: leader, Nodes: f.nodes}, {Pod: worker, Nodes: f.nodes}}, 0, longAgo))
}

// countedResources counts the questions about the resources of nodes.
type countedResources struct {
	ledger.Resources
	asked int
}

func (c *countedResources) Fits(q ledger.ResourceQuery) bool {
	c.asked++
	return c.Resources.Fits(q)
}

// Of the pods of an item on one node, all together must be free there: one question for each node, and one report of freed memory.
func TestAwaitedFreeByNode(t *testing.T) {
	f := newResourcesFixture(t, 2)
	counted := &countedResources{Resources: f.cluster}
	f.fixture = &fixture{t: t, Ledger: ledger.NewWithResources(counted, nil)}
	f.AddFreedListener(func(node string) { f.freed = append(f.freed, node) })
	var requests []ledger.Request
	for i := range 8 { // Four fill a card, with half of the node's CPUs.
		requests = append(requests, ledger.Request{Pod: f.pending(pod(fmt.Sprint("w", i), 4), 1), Nodes: f.nodes[:1]})
	}
	f.SetNode("n1", spec(16, 16))
	f.takeFreed()
	expect(t, "reserved", true, f.await(requests, 0, longAgo))
	expect(t, "freed", []string{"n1"}, f.takeFreed())
	counted.asked = 0
	expect(t, "all is free", true, f.AwaitedFree(testItem.ID))
	expect(t, "questions", 1, counted.asked)
	f.run(pod("other", 1), "n1", 1, 0, at)
	expect(t, "a card lacks one", false, f.AwaitedFree(testItem.ID))
}

// Requests that differ in CPU alone are ranked together while the lock is held, however many kinds there are.
func TestAwaitManyKinds(t *testing.T) {
	f := newResourcesFixture(t, 4)
	var requests []ledger.Request
	for i := range 8 {
		requests = append(requests, ledger.Request{Pod: f.pending(pod(fmt.Sprint("w", i), 16), int64(1+i%3)), Nodes: f.nodes})
	}
	if lists := f.Shortlists(testItem, requests, longAgo); lists != 1 {
		t.Errorf("they are ranked by %d lists of nodes", lists)
	}
	if !f.ReserveAwaited(testItem, requests, longAgo) {
		t.Error("no reservation")
	}
}

// What is freed for another pod on a node, by kube-scheduler or by reclaim, is kept for that pod with its CPU: an item gets no reservation of another
// card there if the node hasn't enough CPU for both.
func TestAwaitBesideFreedCPU(t *testing.T) {
	places := map[string]func(f *resourcesFixture, p gpu.Pod){
		"a nomination": func(f *resourcesFixture, p gpu.Pod) { f.Nominate("n1", p, "victim") },
		"reclaim": func(f *resourcesFixture, p gpu.Pod) {
			f.AddReservation("item", ledger.Reservation{
				Priority: 5, Source: ledger.Reclaimed, Victims: []gpu.PodUID{"victim"}, Places: []ledger.Place{{Pod: p, Node: "n1", On: gpu.On(0, 16)}},
			})
		},
	}
	for name, place := range places {
		for cpus, want := range map[int64]bool{3: true, 5: false} {
			f := newResourcesFixture(t, 1)
			f.run(pod("victim", 16), "n1", 0, 5, at)
			f.run(pod("other", 16), "n1", 1, 3, at.Add(time.Second))
			p := f.pending(pod("p", 16, 5), 5)
			place(f, p)
			item := f.pending(pod("w0", 16, 5), cpus)
			expect(t, name+": reserved", want, f.await([]ledger.Request{{Pod: item, Nodes: f.nodes}}, 5, longAgo))
			f.end("victim")
			expect(t, name+": the pod", []reasons.Reason{reasons.Fits}, f.check(p, "n1"))
		}
	}
}

// What is planned counts the CPU of all pods with places and of nominated ones, whatever kube-scheduler has offered.
func TestPlannedResources(t *testing.T) {
	f := newResourcesFixture(t, 2)
	plan := func(p gpu.Pod) string {
		places, _ := f.ReserveAll([]ledger.Request{{Pod: p, Nodes: f.nodes[:1]}}, nil, binpack, at)
		if places == nil {
			return ""
		}
		f.Release(p.UID)
		return places[0].Node
	}
	asking, important := f.pending(pod("asking", 4), 5), f.pending(pod("important", 4, 1), 5)
	expect(t, "an empty node", "n1", plan(asking))
	f.cluster.SetPod(&eligibility.PodUse{Pod: gpu.Pod{UID: "other"}, Node: "n1", Requests: eligibility.Amounts{corev1.ResourceCPU: 4000}})
	expect(t, "beside a pod without GPU memory", "", plan(asking))
	f.cluster.DeletePod("other")
	f.reserve("n1", f.pending(pod("placed", 4), 4))
	expect(t, "beside a pod with a place", []string{"", ""}, []string{plan(asking), plan(important)})
	expect(t, "a filter call of a more important pod", []reasons.Reason{reasons.Fits}, f.check(important, "n1"))
	moved, ok := f.Move(ledger.Request{Pod: pod("placed", 4), Nodes: f.nodes[1:]}, binpack, at)
	expect(t, "after it was moved", []any{"n2", true, "n1"}, []any{moved, ok, plan(asking)})
	f.Nominate("n1", f.pending(pod("nominee", 4), 4))
	expect(t, "beside a nominated pod", []string{"", "n1"}, []string{plan(asking), plan(important)})
	requests := []ledger.Request{{Pod: f.pending(pod("x", 4), 4), Nodes: f.nodes[1:]}, {Pod: f.pending(pod("y", 4), 1), Nodes: f.nodes[1:]}}
	places, _ := f.ReserveAll(requests, nil, binpack, at)
	expect(t, "two pods that don't fit together", []ledger.ChosenNode(nil), places)
	places, yielded := f.ReserveAll(requests, [][]gpu.PodUID{{"placed"}}, binpack, at)
	expect(t, "when another gives way", []any{[]ledger.ChosenNode{{Node: "n2"}, {Node: "n2"}}, 1}, []any{places, yielded})
}
