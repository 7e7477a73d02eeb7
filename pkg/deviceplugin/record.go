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

// clockStep is by how much the time of a file can lag behind the clock.
const clockStep = 20 * time.Millisecond

// serving is what one container was given.
type serving struct {
	// Card is the card's index, noCard or unknownCard; CardMemory is its total.
	Card       int
	CardMemory gpu.Memory
	// Request is the container's part.
	Request gpu.Memory
	// Devices is what the kubelet asked for.
	Devices deviceSet
	// At is when, or when the books were written that told of it.
	At time.Time
	// Booked says that the kubelet's checkpoint has shown it; Lost that it has ceased to, so the kubelet may ask again
	// for a container that it has to start.
	Booked, Lost bool
	// Instance is the ID of the container that runs with Card although the kubelet's checkpoint has come to name the card
	// Next, which its next start gets: both are held. It is empty, and Next means nothing, where they agree.
	Instance string
	Next     int
}

// runs reports whether the container that runs now, which has this ID, is the one that was given Card.
func (s serving) runs(instance string) bool {
	return instance != "" && (s.Instance == "" || s.Instance == instance)
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

// Forget drops a pod that is gone. The kubelet's checkpoint may list it until the next allocation, which Sync knows.
func (r *record) Forget(uid gpu.PodUID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.pods, uid)
}

// knownPods tells of the pods that the API server has.
type knownPods interface {
	// Exists reports whether there is an object of this UID.
	Exists(uid gpu.PodUID) bool
	// Instance returns the ID of the container that runs under this name, and "" if none does.
	Instance(key containerKey) string
}

// Sync brings the record in line with the kubelet's books, as they were written at that time, and returns the pods for
// which something changed. What was served since isn't in the books yet and stays. A pod that neither exists nor has
// what we served is a leftover.
//
// The card of a container that runs is never replaced: books that name another one after they had named it are those of
// a kubelet that lost them, asked again, and was taken to ask for another container.
func (r *record) Sync(bookings []booking, written time.Time, pods knownPods) []gpu.PodUID {
	r.mu.Lock()
	defer r.mu.Unlock()
	// newer says that the books can't have a serving yet: the same devices there are those of a pod that has ended.
	newer := func(s serving) bool { return s.At.After(written.Add(clockStep)) }
	changed := map[gpu.PodUID]bool{}
	// unclaimed are the devices of servings that the books haven't confirmed yet.
	unclaimed := map[deviceSet]bool{}
	for _, containers := range r.pods {
		for _, s := range containers {
			if !s.Booked && !newer(s) {
				unclaimed[s.Devices] = true
			}
		}
	}
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
		if !ok && !unclaimed[b.Devices] && !pods.Exists(b.UID) {
			continue
		}
		truth := serving{Card: unknownCard, Request: b.Request, Devices: b.Devices, At: written, Booked: true}
		if assignment, err := protocol.ParseAssignment(b.Env); err == nil {
			truth.Card, truth.CardMemory = assignment.Card, assignment.CardMemory
		} else if b.Env[protocol.AnnotationIndex] == noIndex {
			truth.Card = noCard
		}
		switch {
		case ok && known.Card == truth.Card && known.Devices == truth.Devices:
			truth.At = known.At
		case known.Booked && known.HasCard() && known.Card != truth.Card && known.runs(pods.Instance(containerKey{b.UID, b.Container})):
			known.Instance, known.Next = pods.Instance(containerKey{b.UID, b.Container}), truth.Card
			known.Devices, known.Lost = truth.Devices, false
			truth = known
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
			case !pods.Exists(uid):
				r.drop(uid, name)
			default:
				s.Booked, s.Lost = true, true
				r.set(uid, name, s)
			}
		}
	}
	r.settling = false
	return slices.Sorted(maps.Keys(changed))
}

// Settle says that a new kubelet has started: what its checkpoint doesn't show, it doesn't know. The next Sync marks
// that as lost.
func (r *record) Settle() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.settling = true
}

// Snapshot returns all that was served.
func (r *record) Snapshot() served {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.pods)
}

// Pod returns what one pod was given.
func (r *record) Pod(uid gpu.PodUID) servings {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pods[uid]
}

// set and drop are called with the lock held.
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
