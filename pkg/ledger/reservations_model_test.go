package ledger_test

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// reservationModel is the trivial model of reservations: for each pod that asks, what is reserved against it is allocated to invented pods,
// and the question goes to the model of allocations.
type reservationModel struct {
	*model
	nominated map[gpu.PodUID]nomination
	held      []heldPlace
	heldUpTo  int32
	// binding are the pods of which a bind has begun, and owner the sources of placed reservations.
	binding map[gpu.PodUID]bool
	owner   map[gpu.PodUID]ledger.Source
}

// isAssumed reports whether the pod has an assumed allocation.
func (m *reservationModel) isAssumed(uid gpu.PodUID) bool {
	return m.allocations[uid] != nil && m.allocations[uid].State == ledger.Assumed
}

// own sets the source of the pod's placed reservation, if there is one.
func (m *reservationModel) own(uid gpu.PodUID, source ledger.Source) {
	if m.isAssumed(uid) || m.binding[uid] {
		m.owner[uid] = source
	}
}

// ended ends the pod's placed reservation when it has no assumed allocation any more, unless a bind has begun.
func (m *reservationModel) ended(uid gpu.PodUID) {
	if !m.isAssumed(uid) && !m.binding[uid] {
		delete(m.owner, uid)
	}
}

// reservedOn returns the pods that count in the capacity of the node.
func (m *reservationModel) reservedOn(node string) (uids []gpu.PodUID) {
	allocated := m.uids(node)
	if _, known := m.specs[node]; !known && len(allocated) == 0 {
		return nil
	}
	for _, uid := range allocated {
		if owner := m.owner[uid]; m.isAssumed(uid) && (owner == ledger.Planned || owner == ledger.Granted) {
			uids = append(uids, uid)
		}
	}
	for _, h := range m.held {
		if h.Node == node {
			uids = append(uids, h.UID)
		}
	}
	slices.Sort(uids)
	return slices.Compact(uids)
}

type nomination struct {
	node    string
	pod     gpu.Pod
	victims []gpu.PodUID
}

// view returns the model as the pod sees it on the node.
func (m *reservationModel) view(node string, pod gpu.Pod, awaited bool) *model {
	view := &model{specs: m.specs, allocations: maps.Clone(m.allocations)}
	use := func(where gpu.Placement) {
		uid := gpu.PodUID(fmt.Sprint("invented-", len(view.allocations)))
		view.allocations[uid] = &allocation{node, ledger.Allocation{Placement: where}}
	}
	items := map[gpu.PodUID]int{}
	for _, h := range m.held {
		items[h.UID] = h.Item
	}
	for _, h := range m.held {
		if h.Node == node && m.allocations[h.UID] == nil && pod.Priority <= m.heldUpTo && items[pod.UID] != h.Item {
			use(h.On)
		}
	}
	if awaited && m.seesKept(pod) {
		use(m.keptOn(node, true))
	}
	for _, n := range m.nominees(node) {
		if n.pod.Priority >= pod.Priority && n.pod.UID != pod.UID && m.allocations[n.pod.UID] == nil {
			use(m.expected(view, n))
		}
	}
	return view
}

// placesBefore returns the places of the node that an item of this priority with these pods has to leave to nominated pods.
func (m *reservationModel) placesBefore(node string, priority int32, own []gpu.PodUID) (places []keptShare) {
	view := &model{specs: m.specs, allocations: maps.Clone(m.allocations)}
	for _, n := range m.nominees(node) {
		if priority <= n.pod.Priority && m.allocations[n.pod.UID] == nil && !slices.Contains(own, n.pod.UID) {
			on := m.expected(view, n)
			places = append(places, keptShare{pod: n.pod, node: node, on: on})
			view.allocations["place of "+n.pod.UID] = &allocation{node, ledger.Allocation{Placement: on}}
		}
	}
	return places
}

// nominees returns the nominations to the node, those of the highest priority first, and then the largest.
func (m *reservationModel) nominees(node string) (out []nomination) {
	for _, n := range m.nominated {
		if n.node == node {
			out = append(out, n)
		}
	}
	slices.SortFunc(out, func(a, b nomination) int {
		return cmp.Or(cmp.Compare(b.pod.Priority, a.pod.Priority), cmp.Compare(b.pod.Request, a.pod.Request), cmp.Compare(a.pod.UID, b.pod.UID))
	})
	return out
}

// expected returns what the nominated pod is likely to get: cards with room, or cards that have room when pods are gone.
func (m *reservationModel) expected(view *model, n nomination) gpu.Placement {
	share, _ := each(n.pod)
	reason := view.reason(n.node, n.pod, false)
	if reason == reasons.Full || reason == reasons.Fragmented || reason == reasons.Crowded {
		later := &model{specs: view.specs, allocations: maps.Clone(view.allocations)}
		for uid, a := range m.allocations {
			if a.Node == n.node && (a.Leaving || slices.Contains(n.victims, uid)) {
				delete(later.allocations, uid)
			}
		}
		view = later
	}
	if view.accepts(n.node, n.pod) != reasons.Fits {
		return nil
	}
	return on(view.best(n.node, n.pod, false, false), share)
}

func (m *reservationModel) check(node string, pod gpu.Pod) reasons.Reason {
	if a := m.allocations[pod.UID]; a != nil && a.Node == node {
		return reasons.Fits
	} else if a != nil {
		return reasons.Elsewhere
	}
	reason := m.view(node, pod, true).reason(node, pod, false)
	if reason.Resolvable() && len(m.keptOn(node, true)) > 0 && m.seesKept(pod) && m.view(node, pod, false).reason(node, pod, false) == reasons.Fits {
		return reasons.Reserved
	}
	return reason
}

// reserver makes random operations on its own nodes and pods, beside others on the same ledger.
type reserver struct {
	*simulation
	model *reservationModel
	// alone is true for the only one that holds places and makes awaited reservations.
	alone bool
}

func newReserver(f *fixture, worker uint64, seed uint64) *reserver {
	r := &reserver{
		simulation: &simulation{random: rand.New(rand.NewPCG(seed, worker)), fixture: f, clock: at},
		model: &reservationModel{
			model: newModel(), nominated: map[gpu.PodUID]nomination{},
			binding: map[gpu.PodUID]bool{}, owner: map[gpu.PodUID]ledger.Source{},
		},
		alone: worker == 0,
	}
	for i := range 2 {
		r.nodes = append(r.nodes, fmt.Sprintf("w%d-n%d", worker, i))
	}
	for i := range 10 {
		p := r.pod(fmt.Sprintf("w%d-p%02d", worker, i))
		p.Priority = int32(r.random.IntN(3))
		r.pods = append(r.pods, p)
	}
	return r
}

// step makes one operation on the ledger and on the model, and returns its description.
func (r *reserver) step() (operation string, err error) {
	p, node := r.pods[r.random.IntN(len(r.pods))], r.nodes[r.random.IntN(len(r.nodes))]
	some := r.pods[:1+r.random.IntN(4)]
	var requests []ledger.Request
	var uids []gpu.PodUID
	for _, member := range some {
		requests, uids = append(requests, ledger.Request{Pod: member, Nodes: r.nodes}), append(uids, member.UID)
	}
	source := []ledger.Source{ledger.Planned, ledger.Granted}[r.random.IntN(2)]
	switch n := r.random.IntN(26); {
	case n < 3:
		want := r.model.check(node, p)
		got, failed := r.fixture.Reserve(node, p, placement.Binpack, at)
		if failed == nil {
			r.model.allocations[p.UID] = &allocation{node, got}
		}
		return fmt.Sprintf("Reserve(%s, %v)", node, p), differ(want, fitsIf(failed == nil, want))
	case n < 5:
		where := r.where(p)
		p.Leaving = r.random.IntN(2) == 0
		r.fixture.SetBound(node, p, where, at)
		r.setBound(node, p, where)
		return fmt.Sprintf("SetBound(%s, %v, %v)", node, p, where), nil
	case n < 6:
		released := r.fixture.Release(p.UID)
		want := r.model.isAssumed(p.UID) && !r.model.binding[p.UID]
		if want {
			r.remove(p.UID)
		}
		return fmt.Sprintf("Release(%v)", p), differ(want, released)
	case n < 8:
		r.fixture.Remove(p.UID)
		r.remove(p.UID)
		return fmt.Sprintf("Remove(%v)", p), nil
	case n < 11:
		r.fixture.Nominate(node, p, uids...)
		r.model.nominated[p.UID] = nomination{node, p, uids}
		return fmt.Sprintf("Nominate(%s, %v, %v)", node, p, uids), nil
	case n < 12:
		r.fixture.End(ledger.Nominated, string(p.UID))
		delete(r.model.nominated, p.UID)
		return fmt.Sprintf("End(Nominated, %v)", p), nil
	case n < 13:
		for i, chosen := range r.fixture.NominateAll(requests, binpack) {
			if chosen != "" {
				r.model.nominated[some[i].UID] = nomination{node: chosen, pod: some[i]}
				err = cmp.Or(err, differ(reasons.Fits, r.model.check(chosen, some[i])))
			}
		}
		return fmt.Sprintf("NominateAll(%v)", some), err
	case n < 15:
		var yielding [][]gpu.PodUID
		for _, other := range r.pods[len(some):] {
			yielding = append(yielding, []gpu.PodUID{other.UID})
		}
		places, yielded := r.fixture.ReserveAll(requests, yielding, binpack, at)
		for _, set := range yielding[:yielded] {
			for _, uid := range set {
				if r.model.isAssumed(uid) && !r.model.binding[uid] {
					r.remove(uid)
				}
			}
		}
		for i, place := range places {
			err = cmp.Or(err, differ(place.Existing, r.model.allocations[some[i].UID] != nil), differ(reasons.Fits, r.model.check(place.Node, some[i])))
			_, got, _ := r.fixture.Lookup(some[i].UID)
			r.model.allocations[some[i].UID] = &allocation{place.Node, got}
		}
		return fmt.Sprintf("ReserveAll(%v, %v): %v, %d", some, yielding, places, yielded), err
	case n < 16:
		request := ledger.Request{Pod: p, Nodes: r.nodes, Binding: r.random.IntN(2) == 0}
		moved, ok := r.fixture.Move(request, binpack, at)
		if ok {
			err = differ(true, request.Binding || !r.model.binding[p.UID])
			owner, owned := r.model.owner[p.UID]
			if r.model.isAssumed(p.UID) {
				r.remove(p.UID)
			}
			err = cmp.Or(err, differ(reasons.Fits, r.model.check(moved, p)))
			_, got, _ := r.fixture.Lookup(p.UID)
			r.model.allocations[p.UID] = &allocation{moved, got}
			if owned { // As its source does.
				r.fixture.SetSource(owner, p.UID)
				r.model.own(p.UID, owner)
			}
		}
		return fmt.Sprintf("Move(%v): %s", request, moved), err
	case n < 17 && r.alone:
		r.model.held, r.model.heldUpTo = nil, int32(r.random.IntN(3))
		for i, member := range some {
			share, _ := each(member)
			place := heldPlace{UID: member.UID, Node: r.nodes[r.random.IntN(2)], On: on([]int{r.random.IntN(3)}, share), Item: 1 + i/2}
			r.model.held = append(r.model.held, place)
		}
		r.fixture.hold(r.model.held, r.model.heldUpTo)
		return fmt.Sprintf("Hold(%v, %d)", r.model.held, r.model.heldUpTo), nil
	case n < 18 && r.alone:
		priority := int32(r.random.IntN(3))
		r.model.places = func(node string) []keptShare { return r.model.placesBefore(node, priority, uids) }
		want := r.model.await(requests, priority, at.Add(-time.Hour))
		return fmt.Sprintf("Await(%v, %d)", some, priority), differ(want, r.fixture.await(requests, priority, at.Add(-time.Hour)))
	case n < 19 && r.alone:
		r.fixture.End(ledger.Queued, testItem.ID)
		r.model.endAwaited()
		return "End(Queued)", nil
	case n < 21 && n > 18:
		r.fixture.SetSource(source, p.UID)
		r.model.own(p.UID, source)
		return fmt.Sprintf("Own(%d, %v)", source, p), nil
	case n == 21:
		owner, owned := r.model.owner[p.UID]
		if owned = owned && owner == source; owned {
			r.model.own(p.UID, ledger.Direct)
		}
		return fmt.Sprintf("ResetSource(%d, %v)", source, p), differ(owned, r.fixture.ResetSource(source, p.UID))
	case n > 21 && n < 24 && !r.model.binding[p.UID]:
		r.fixture.BeginBind(p.UID)
		r.model.binding[p.UID] = true
		return fmt.Sprintf("BeginBind(%v)", p), nil
	case n > 21 && n < 24:
		release := r.random.IntN(2) == 0
		r.fixture.EndBind(p.UID, release)
		delete(r.model.binding, p.UID)
		if r.model.ended(p.UID); release && r.model.isAssumed(p.UID) {
			r.remove(p.UID)
		}
		return fmt.Sprintf("EndBind(%v, %t)", p, release), nil
	case n < 25:
		nodeSpec := r.nodeSpec()
		r.fixture.SetNode(node, nodeSpec)
		r.model.specs[node] = nodeSpec
		r.model.presume(node)
		return fmt.Sprintf("SetNode(%s, %v)", node, nodeSpec), nil
	}
	r.fixture.DeleteNode(node)
	delete(r.model.specs, node)
	r.model.presume(node)
	return fmt.Sprintf("DeleteNode(%s)", node), nil
}

func fitsIf(fits bool, otherwise reasons.Reason) reasons.Reason {
	if fits {
		return reasons.Fits
	}
	if otherwise == reasons.Fits {
		return reasons.Full
	}
	return otherwise
}

func (r *reserver) setBound(node string, pod gpu.Pod, where gpu.Placement) {
	s := simulation{model: r.model.model, clock: at}
	s.modelSetBound(node, pod, where)
	r.model.ended(pod.UID)
}

func (r *reserver) remove(uid gpu.PodUID) {
	s := simulation{model: r.model.model}
	s.modelRemove(uid)
	r.model.ended(uid)
}

func differ[T comparable](want, got T) error {
	if want != got {
		return fmt.Errorf("want %v, got %v", want, got)
	}
	return nil
}

// verify compares what some pods see of each node, and which pods count in its capacity.
func (r *reserver) verify() error {
	for _, node := range r.nodes {
		if want, got := r.model.reservedOn(node), r.fixture.ReservedOn(node); !slices.Equal(want, got) {
			return fmt.Errorf("pods that count on %s: want %v, got %v", node, want, got)
		}
	}
	some := func() gpu.Pod { return r.pods[r.random.IntN(len(r.pods))] }
	for _, p := range []gpu.Pod{some(), some(), {UID: "unknown", Request: 4, Priority: 1}} {
		for i, reason := range r.fixture.check(p, r.nodes...) {
			if want := r.model.check(r.nodes[i], p); reason != want {
				return fmt.Errorf("%v on %s: want %q, got %q", p, r.nodes[i], want, reason)
			}
			if r.model.accepts(r.nodes[i], gpu.Pod{}) != reasons.Fits {
				continue
			}
			available, _ := r.fixture.Availability(r.nodes[i], p, nil)
			view := r.model.view(r.nodes[i], p, true)
			for _, c := range available.Cards {
				if err := differ(view.used(r.nodes[i], c.Index).memory, int64(c.Used)); err != nil {
					return fmt.Errorf("what %v sees as used of card %d of %s: %w", p, c.Index, r.nodes[i], err)
				}
			}
		}
	}
	return nil
}

// TestReservationModel compares what each pod sees after each of many random operations with a trivial model: beside allocations there are
// nominations, held places, an awaited reservation, owned places and binds whose outcome isn't known. Each worker has its own nodes, so its model is
// exact, but all of them use one ledger.
func TestReservationModel(t *testing.T) {
	seeds, steps := uint64(12), 150
	if testing.Short() {
		seeds = 4
	}
	for seed := range seeds {
		l := ledger.New()
		var working sync.WaitGroup
		for worker := range uint64(4) {
			working.Go(func() {
				r, history := newReserver(&fixture{Ledger: l, t: t}, worker, seed), []string{}
				for range steps {
					operation, err := r.step()
					history = append(history, operation)
					if err = cmp.Or(err, r.verify()); err != nil {
						t.Errorf("seed %d, worker %d, after %d steps, the last of them\n%s\n%v", seed, worker, len(history), history[max(0, len(history)-12):], err)
						return
					}
				}
			})
		}
		working.Wait()
	}
}
