package deviceplugin

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// The cards of containers that have none.
const (
	// noCard is that of a container which was told that there is none for it, and of a pod that nobody chose one for.
	noCard = -1
	// unknownCard is that of a container whose answer isn't one of ours.
	unknownCard = -2
)

// namelessFor is how long memory is held for a pod that nothing names. The kubelet's checkpoint does so at once, unless
// the kubelet turned the pod away after all.
const namelessFor = time.Minute

// clockStep is by how much the time of a file can lag behind the clock.
const clockStep = 20 * time.Millisecond

// serving is what one container was given.
type serving struct {
	// Card is the card's index, noCard or unknownCard; CardMemory is its total.
	Card       int
	CardMemory gpu.Memory
	// Request is the container's part.
	Request gpu.Memory
	// Devices is what the kubelet asked for, and Sample is one of them.
	Devices deviceSet
	Sample  string
	// At is when, or when the books were written that told of it.
	At time.Time
	// Booked says that the kubelet's checkpoint has shown it; Lost that it has ceased to, so the kubelet may ask again
	// for a container that it has to start. Freed says that it has ceased to though the kubelet had it until then: it has
	// given the devices up of its own accord.
	Booked, Lost, Freed bool
}

// HasCard says that the container was given a card, and Card is which.
func (s serving) HasCard() bool { return s.Card >= 0 }

// servings are a pod's, by container. What the record gives out is shared and never changed, but replaced.
type servings map[string]serving

// Empty says that all containers served so far were told that there is no card for them.
func (s servings) Empty() bool {
	for _, serving := range s {
		if serving.Card != noCard {
			return false
		}
	}
	return len(s) > 0
}

// Lasting returns what one of the pod's containers was given that has a card, in their order, and false if none has. Init
// containers come last, and have no say once one of a pod with others has run: all was given out by then, so what isn't
// here of the others is a gap, and an init container's card can be one of later. A kubelet without books asks anew for those
// that have ended.
func (s servings) Lasting(pod *podView) (given serving, ok bool) {
	lasting := slices.ContainsFunc(pod.Containers, func(c containerView) bool { return !c.Init })
	for _, init := range []bool{false, true} {
		if init && lasting && pod.Ran {
			break
		}
		for _, c := range pod.Containers {
			if serving, served := s[c.Name]; c.Init == init && served && serving.HasCard() {
				return serving, true
			}
		}
	}
	return serving{}, false
}

// served is what the record holds, by the UID that the kubelet knows the pod by.
type served map[gpu.PodUID]servings

// record keeps what this node's containers were given: the truth to which annotations are held. It is rebuilt from,
// and corrected by, the kubelet's checkpoint.
//
// It locks itself; what leaves it stays as it was.
type record struct {
	mu   sync.Mutex
	pods served
	// nameless were served before anything told which pod they are: static pods, until the checkpoint names them.
	nameless []serving
	// rebuilt says that books have been read since the plugin's start.
	rebuilt bool
	// settling says that a new kubelet's books are to be read for the first time.
	settling bool
}

func newRecord() *record { return &record{pods: served{}} }

// Serve notes what a container was given.
func (r *record) Serve(uid gpu.PodUID, container string, s serving) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.set(uid, container, s)
}

// ServeNameless notes what a container was given whose pod isn't known.
func (r *record) ServeNameless(s serving) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.nameless = append(r.nameless, s)
}

// Forget drops a pod that is gone. The kubelet's checkpoint may list it until the next allocation, which Sync knows.
func (r *record) Forget(uid gpu.PodUID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.pods, uid)
}

// Sync brings the record in line with the kubelet's books, as they were written at that time, and returns the pods for
// which something changed. What was served since isn't in the books yet and stays. exists says whether there is an
// object for the pod: one that neither exists nor was served by us is a leftover. Only at the start it may be a static
// pod as well, which was served just before and whose mirror hasn't come: that is held until collect knows better.
func (r *record) Sync(bookings []booking, written time.Time, exists func(gpu.PodUID) bool, now time.Time) []gpu.PodUID {
	r.mu.Lock()
	defer r.mu.Unlock()
	// newer says that the books can't have a serving yet: the same devices there are those of a pod that has ended.
	newer := func(s serving) bool { return s.At.After(written.Add(clockStep)) }
	changed := map[gpu.PodUID]bool{}
	owner := map[deviceSet]gpu.PodUID{}
	booked := map[gpu.PodUID]map[string]bool{}
	for _, b := range bookings {
		owner[b.Devices] = b.UID
		if booked[b.UID] == nil {
			booked[b.UID] = map[string]bool{}
		}
		booked[b.UID][b.Container] = true

		known, ok := r.pods[b.UID][b.Container]
		if ok && newer(known) {
			continue // What they have of this container is what it had before.
		}
		nameless, named := r.name(b.Devices, newer)
		if !named && !ok && !exists(b.UID) && (r.rebuilt || !ofStaticPod(b.UID)) {
			continue
		}
		truth := serving{Card: unknownCard, Request: b.Request, Devices: b.Devices, Sample: b.Sample, At: written, Booked: true}
		if assignment, err := protocol.ParseAssignment(b.Env); err == nil {
			truth.Card, truth.CardMemory = assignment.Card, assignment.CardMemory
		} else if b.Env[protocol.AnnotationIndex] == noIndex {
			truth.Card = noCard
		}
		switch {
		case ok && known.Card == truth.Card && known.Devices == truth.Devices:
			truth.At = known.At
		case named:
			truth.At = nameless.At // By the file's time it could be before what was served before it.
			changed[b.UID] = true
		default:
			changed[b.UID] = true
		}
		r.set(b.UID, b.Container, truth)
	}
	for uid, containers := range r.pods {
		for name, s := range containers {
			switch {
			case booked[uid][name]:
			case !s.Booked && owner[s.Devices] != "" && owner[s.Devices] != uid && !newer(s):
				// We took one pod for another; the kubelet knows whose devices these are. Of what the books have once shown that
				// isn't so: a kubelet that has lost them gives the devices of a container that runs on to others.
				r.drop(uid, name)
				changed[uid] = true
			case !s.Booked && !r.settling:
			case !exists(uid):
				r.drop(uid, name)
			default:
				s.Freed = s.Freed || !s.Lost && !r.settling && !written.IsZero()
				s.Booked, s.Lost = true, true
				r.set(uid, name, s)
			}
		}
	}
	r.settling, r.rebuilt = false, r.rebuilt || !written.IsZero()
	r.nameless = slices.DeleteFunc(r.nameless, func(s serving) bool { return now.Sub(s.At) > namelessFor })
	return slices.Sorted(maps.Keys(changed))
}

// Settle says that a new kubelet has started: what its checkpoint doesn't show, it doesn't know. The next Sync marks
// that as lost.
func (r *record) Settle() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.settling = true
}

// Snapshot returns all that was served, and what was served to pods not known yet.
func (r *record) Snapshot() (served, []serving) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.pods), slices.Clone(r.nameless)
}

// Pod returns what one pod was given.
func (r *record) Pod(uid gpu.PodUID) servings {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pods[uid]
}

// set, drop and name are called with the lock held.
func (r *record) set(uid gpu.PodUID, container string, s serving) {
	if before, ok := r.pods[uid][container]; ok && before == s {
		return
	}
	changed := make(servings, len(r.pods[uid])+1)
	maps.Copy(changed, r.pods[uid])
	changed[container] = s
	r.pods[uid] = changed
}

func (r *record) drop(uid gpu.PodUID, container string) {
	rest := maps.Clone(r.pods[uid])
	delete(rest, container)
	if r.pods[uid] = rest; len(rest) == 0 {
		delete(r.pods, uid)
	}
}

// name takes out the nameless serving of these devices, if there is one: from then on it has a name.
func (r *record) name(devices deviceSet, newer func(serving) bool) (s serving, ok bool) {
	i := slices.IndexFunc(r.nameless, func(s serving) bool { return s.Devices == devices && !newer(s) })
	if i < 0 {
		return serving{}, false
	}
	s = r.nameless[i]
	r.nameless = slices.Delete(r.nameless, i, i+1)
	return s, true
}
