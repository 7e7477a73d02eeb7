package queue

import (
	"maps"
	"sync"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Profile is what Failures knows of an item that is to be placed.
type Profile struct {
	Namespace string
	// ID identifies the item in its namespace.
	ID string
	// ShapeKey is equal for items that ask for the same and can use the same nodes.
	ShapeKey string
	Size     Size
	// CompletesGroup is ledger.Item.CompletesGroup.
	CompletesGroup bool
}

// Size is how much an item asks for. Of whole cards, it has only the number.
type Size struct {
	Memory gpu.Memory
	Cards  int
}

// covers reports whether s is as large as o.
func (s Size) covers(o Size) bool { return s.Memory >= o.Memory && s.Cards >= o.Cards }

func (s Size) max(o Size) Size { return Size{max(s.Memory, o.Memory), max(s.Cards, o.Cards)} }

// Failures remembers failures: an item was placed, and didn't arrive in time. It bounds the memory that broken and hostile items keep from others.
//
//   - A shape pauses after each failure, for longer each time, until an item of this shape arrives. A controller that makes a pod again, or a run
//     that starts again, continues where the former one was.
//   - After failures in a row, items of the namespace are placed one at a time, after a delay that grows with each failure. Small items that arrive
//     don't prove that large ones would. So this ends when an item as large as those that failed arrives. Before, only items no larger than one
//     that has arrived since are placed without this delay.
//   - A shape that has failed waits twice as long for this as one that hasn't. In between an item of the latter can get an awaited reservation, and
//     doesn't wait for others while it has that. Otherwise pods that are never bound would take the
//     memory reserved for larger items each time, and these would get none.
//
// Items that were placed before the latest failure are no further failure in the row: kube-scheduler may have stopped for a while. Losing memory to
// another item, or with a card or node, is no failure, nor is anything while kube-scheduler is away.
//
// The zero value remembers nothing. Its methods may be called concurrently.
type Failures struct {
	mu sync.Mutex
	// namespaces have the failures of the last hour, and those of items that wait since.
	namespaces map[string]*namespaceFailures
	// forgot is when forget last looked for failures that are too old.
	forgot time.Time
	// seen is when kube-scheduler last tried to place a pod. Before that it was away from awaySince to awayUntil.
	seen, awaySince, awayUntil time.Time
}

// namespaceFailures are the failures of a namespace.
type namespaceFailures struct {
	// streak has the failures of all shapes, and largest is the size of what failed. Both begin again when an item as large arrives.
	streak  streak
	largest Size
	// proven is the size up to which items have arrived since. Nothing of this size has failed since then.
	proven Size
	// placed is the ID of the item that is placed, of those that are placed one at a time; empty if none is.
	placed string
	// shapes has the streak of each shape. It ends when an item of this shape arrives. After failures in a row few are added in an hour, and then forgotten.
	shapes map[string]*streak
}

// streak is failures without an arrival between them, with the pause after the latest one.
type streak struct {
	pause
	count int
	// waited is when an item of the shape waited last.
	waited time.Time
	// placed is when the item was placed whose failure was counted last.
	placed time.Time
}

const (
	// minPause is the pause after the first failure, and LongestPause the longest.
	minPause = time.Second
	// forgetAfter is how long after its latest failure a namespace or a shape is forgotten. A shape isn't while an item of it waits, which can be for
	// longer if there is no room.
	forgetAfter = time.Hour
)

// add counts a failure of an item that was placed at that time.
func (s *streak) add(placed, now time.Time) {
	if s.count > 0 && placed.Before(s.began()) {
		s.until = now.Add(s.length)
		return
	}
	s.count++
	s.placed = placed
	s.pause = s.next(now, minPause, LongestPause)
}

// oneAtATime reports whether the item is one of those that are placed one at a time.
func (n *namespaceFailures) oneAtATime(i Profile) bool {
	return n.streak.count > 0 && !i.CompletesGroup && !n.proven.covers(i.Size)
}

// HasFailuresIn reports whether anything of the namespace has failed.
func (f *Failures) HasFailuresIn(namespace string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.namespaces[namespace] != nil
}

// PauseUntil records that the item waits, so that the failures of its shape aren't forgotten. It returns when to ask again; until then the item must not
// be placed. A past time means now. behind is true if the reason is another item's failure. A broken item only pauses: what is bound of a broken run is
// evicted soon, and a run that goes on holds its memory anyway. reserved is true if the item has an awaited reservation.
func (f *Failures) PauseUntil(i Profile, reserved bool, now time.Time) (until time.Time, behind bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.forget(now) // Before the item counts as one that has waited.
	n := f.namespaces[i.Namespace]
	if n == nil {
		return time.Time{}, false
	}
	shape := n.shapes[i.ShapeKey]
	if shape != nil {
		until, shape.waited = shape.until, now
	}
	var next time.Time
	switch {
	case !n.oneAtATime(i), reserved && shape == nil:
	case n.placed == "" && shape != nil:
		next = n.streak.until.Add(n.streak.length)
	case n.placed == "":
		next = n.streak.until
	case n.placed != i.ID:
		next = now.Add(minPause)
	}
	if !next.After(until) {
		return until, false
	}
	return next, shape == nil || n.placed != ""
}

// CountOf returns how often items of this shape have failed since one arrived, and when the latest one did.
func (f *Failures) CountOf(i Profile) (failures int, latest time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n := f.namespaces[i.Namespace]; n != nil && n.shapes[i.ShapeKey] != nil {
		return n.shapes[i.ShapeKey].count, n.shapes[i.ShapeKey].began()
	}
	return 0, time.Time{}
}

// Placed records that memory is reserved for the item, a group or one of fair sharing. Failed, Arrived or Ended must follow. Single pods don't
// count: Options.MaxIdle limits how much is reserved for them.
func (f *Failures) Placed(i Profile) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n := f.namespaces[i.Namespace]; n != nil && n.placed == "" && n.oneAtATime(i) {
		n.placed = i.ID
	}
}

// Ended records that the item has no memory reserved any more, and is neither bound nor has failed.
func (f *Failures) Ended(i Profile) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n := f.namespaces[i.Namespace]; n != nil && n.placed == i.ID {
		n.placed = ""
	}
}

// Arrived records that the item is bound.
func (f *Failures) Arrived(i Profile) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := f.namespaces[i.Namespace]
	if n == nil {
		return
	}
	delete(n.shapes, i.ShapeKey)
	if n.placed == i.ID {
		n.placed = ""
	}
	if i.Size.covers(n.largest) {
		n.streak, n.largest, n.proven, n.placed = streak{}, Size{}, Size{}, ""
	} else {
		n.proven = n.proven.max(i.Size)
	}
	if n.streak.count == 0 && len(n.shapes) == 0 {
		delete(f.namespaces, i.Namespace)
	}
}

// Failed records that the item, which was placed at that time, hasn't arrived.
func (f *Failures) Failed(i Profile, placed, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.forget(now)
	n := f.namespaces[i.Namespace]
	if n == nil {
		if f.namespaces == nil {
			f.namespaces = map[string]*namespaceFailures{}
		}
		n = &namespaceFailures{shapes: map[string]*streak{}}
		f.namespaces[i.Namespace] = n
	}
	n.streak.add(placed, now)
	n.largest = n.largest.max(i.Size)
	if n.proven.covers(i.Size) {
		n.proven = Size{}
	}
	if n.placed == i.ID {
		n.placed = ""
	}
	if n.shapes[i.ShapeKey] == nil {
		n.shapes[i.ShapeKey] = &streak{}
	}
	n.shapes[i.ShapeKey].add(placed, now)
}

// forget drops failures that are too old, once a minute at most.
func (f *Failures) forget(now time.Time) {
	if now.Sub(f.forgot) < time.Minute {
		return
	}
	f.forgot = now
	for name, n := range f.namespaces {
		for key, shape := range n.shapes {
			if now.Sub(shape.began()) > forgetAfter && now.Sub(shape.waited) > forgetAfter {
				delete(n.shapes, key)
			}
		}
		if n.placed == "" && now.Sub(n.streak.began()) > forgetAfter && len(n.shapes) == 0 {
			delete(f.namespaces, name)
		}
	}
}

// SchedulerSeen records that kube-scheduler tries to place a pod of the namespace. If it had tried none for long, it was probably away, and the failures of
// what was placed meanwhile are forgotten: no item could arrive. Each namespace's are forgotten only when one of its pods is tried. Otherwise they would be
// forgotten too where all pods that wait are gated, and kube-scheduler has nothing to try but a pod that other plugins reject on all nodes.
func (f *Failures) SchedulerSeen(namespace string, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if now.Sub(f.seen) > KubeSchedulerRetries {
		f.awaySince, f.awayUntil = f.seen, now
	}
	f.seen = now
	n := f.namespaces[namespace]
	if n == nil {
		return
	}
	whileAway := func(s *streak) bool { return s.placed.After(f.awaySince) && s.placed.Before(f.awayUntil) }
	maps.DeleteFunc(n.shapes, func(_ string, s *streak) bool { return whileAway(s) })
	if whileAway(&n.streak) {
		n.streak, n.largest, n.proven = streak{}, Size{}, Size{}
	}
	if n.streak.count == 0 && len(n.shapes) == 0 {
		delete(f.namespaces, namespace)
	}
}

// Clear forgets all failures, at the begin of a term as leader.
func (f *Failures) Clear() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.namespaces = nil
}
