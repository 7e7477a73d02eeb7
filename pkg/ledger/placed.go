package ledger

import (
	"slices"
	"sync"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Own records that the source keeps the pod's assumed allocation until Disown. If until isn't zero, the reservation is due then. Own does nothing
// if the pod has no such allocation. It is called again after a Move.
func (l *Ledger) Own(source Source, uid gpu.PodUID, until time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r := l.reservations.placed[uid]; r != nil {
		l.own(r, uid, source)
		if !until.IsZero() {
			r.Until = until
		}
	}
}

// Disown undoes Own. It reports whether the source had the reservation.
func (l *Ledger) Disown(source Source, uid gpu.PodUID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.reservations.placed[uid]
	if r == nil || r.Source != source {
		return false
	}
	l.own(r, uid, Direct)
	return true
}

// Owns reports whether the source keeps the pod's assumed allocation, and no bind of the pod has begun.
func (l *Ledger) Owns(source Source, uid gpu.PodUID) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	r := l.reservations.placed[uid]
	return r != nil && r.Source == source && !r.Binding
}

// own sets the source of a placed reservation.
func (l *Ledger) own(r *Reservation, uid gpu.PodUID, source Source) {
	for i := range r.Places {
		l.uncount(r.Source, r.Places[i].Node, func(counted gpu.PodUID) bool { return counted == uid })
	}
	r.Source, r.Places = source, nil
	if a := l.allocation(uid); a != nil && source != Direct {
		r.Places = []Place{{Pod: a.Pod, Node: l.nodeOf[uid], On: a.Placement}}
		l.count(source, &r.Places[0])
	}
}

// Due returns the pods whose reservations are due, each of them once; if all is true, those that will be due later too.
func (l *Ledger) Due(now time.Time, all bool) (due []gpu.PodUID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for uid, r := range l.reservations.placed {
		if !r.Until.IsZero() && (all || !now.Before(r.Until)) {
			r.Until = time.Time{}
			due = append(due, uid)
		}
	}
	return due
}

// BeginBind records that a bind of the pod begins. Until EndBind, its allocation is moved by this bind alone, and not released.
func (l *Ledger) BeginBind(uid gpu.PodUID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.placedFor(uid).Binding = true
}

// EndBind records that no write of the bind can take effect any more, or that the watch has reported the pod. If release is true, EndBind releases
// an assumed allocation. Otherwise it stays with its source.
func (l *Ledger) EndBind(uid gpu.PodUID, release bool) {
	l.edit(func(e *edit) {
		l.placedFor(uid).Binding = false
		if a := l.allocation(uid); a == nil || a.State != Assumed {
			l.endPlaced(uid)
		} else if release {
			e.drop(uid)
		}
	})
}

// placedFor returns the reservation that the pod's allocation belongs to.
func (l *Ledger) placedFor(uid gpu.PodUID) *Reservation {
	r := l.reservations.placed[uid]
	if r == nil {
		r = &Reservation{}
		l.reservations.placed[uid] = r
	}
	return r
}

// endPlaced ends the pod's reservation, unless a bind has begun.
func (l *Ledger) endPlaced(uid gpu.PodUID) {
	if r := l.reservations.placed[uid]; r != nil && !r.Binding {
		l.own(r, uid, Direct)
		delete(l.reservations.placed, uid)
	}
}

// isBinding reports whether a bind of the pod has begun. The caller holds the lock.
func (l *Ledger) isBinding(uid gpu.PodUID) bool {
	r := l.reservations.placed[uid]
	return r != nil && r.Binding
}

// CountedOn returns the pods whose reservations count in the capacity of the node: those of plans and of fair sharing, and if withReclaimed is
// true those for which reclaim frees memory there. A Capacity may call it.
func (l *Ledger) CountedOn(node string, withReclaimed bool) (uids []gpu.PodUID) {
	c := l.reservations.counted
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, pod := range c.on[node] {
		if withReclaimed || pod.source != Reclaimed {
			uids = append(uids, pod.uid)
		}
	}
	slices.Sort(uids)
	return uids
}

// countedPods are the pods that count in the capacity of nodes. mu guards on. No other lock is taken while mu is held.
type countedPods struct {
	mu sync.Mutex
	on map[string][]countedPod
}

type countedPod struct {
	uid    gpu.PodUID
	source Source
}

// counted reports whether pods with reservations of the source are counted pods.
func (s Source) counted() bool { return s == Planned || s == Granted || s == Reclaimed }

// count adds a place to the counted pods, if those of its source count.
func (l *Ledger) count(source Source, place *Place) {
	if source.counted() {
		l.reservations.counted.add(place.Node, countedPod{place.Pod.UID, source})
		l.setCounted(place.Node, true)
	}
}

// uncount removes those of the source's counted pods on the node for which ends returns true.
func (l *Ledger) uncount(source Source, name string, ends func(gpu.PodUID) bool) {
	if source.counted() {
		any := l.reservations.counted.remove(name, func(pod countedPod) bool { return pod.source == source && ends(pod.uid) })
		l.setCounted(name, any)
	}
}

func (l *Ledger) setCounted(name string, planned bool) {
	if n := l.nodes[name]; n != nil {
		n.hasCounted = planned
	}
}

// any reports whether pods count on the node.
func (c *countedPods) any(node string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.on[node]) > 0
}

func (c *countedPods) add(node string, pod countedPod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.on[node] = append(c.on[node], pod)
}

// remove removes the pods of the node for which ends returns true, and reports whether others are left.
func (c *countedPods) remove(node string, ends func(countedPod) bool) (any bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	on := slices.DeleteFunc(c.on[node], ends)
	if len(on) == 0 {
		delete(c.on, node)
		return false
	}
	c.on[node] = on
	return true
}
