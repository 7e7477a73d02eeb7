package ledger

import "github.com/gpushare/gpushare/pkg/gpu"

// SetSource records that the source keeps the pod's assumed allocation until ResetSource. It does nothing if the pod has no such allocation.
func (l *Ledger) SetSource(source Source, uid gpu.PodUID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r := l.reservations.placed[uid]; r != nil {
		r.Source = source
	}
}

// ResetSource undoes SetSource. It reports whether the source had the reservation.
func (l *Ledger) ResetSource(source Source, uid gpu.PodUID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.reservations.placed[uid]
	if r == nil || r.Source != source {
		return false
	}
	r.Source = Direct
	return true
}

// HasSource reports whether the source keeps the pod's assumed allocation, and no bind of the pod has begun.
func (l *Ledger) HasSource(source Source, uid gpu.PodUID) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	r := l.reservations.placed[uid]
	return r != nil && r.Source == source && !r.Binding
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
		delete(l.reservations.placed, uid)
	}
}

// isBinding reports whether a bind of the pod has begun. The caller holds the lock.
func (l *Ledger) isBinding(uid gpu.PodUID) bool {
	r := l.reservations.placed[uid]
	return r != nil && r.Binding
}
