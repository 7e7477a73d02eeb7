package deviceplugin

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// Values of serving.Card that aren't the index of a card.
const (
	// noCard means that the container's response named no card, or that no card was chosen for the pod.
	noCard = -1
	// unknownCard means that the container's response isn't one of this plugin.
	unknownCard = -2
)

// clockStep is how far the modification time of a file can lag behind the clock.
const clockStep = 20 * time.Millisecond

// serving is what one container was given.
type serving struct {
	// Card is the card's index, noCard or unknownCard. CardMemory is the card's total memory.
	Card       int
	CardMemory gpu.Memory
	// Request is the memory for which the container asks.
	Request gpu.Memory
	// Devices are the fake devices in the kubelet's call.
	Devices deviceSet
	// At is the time of the allocation, or the time at which the checkpoint that shows it was written.
	At time.Time
	// Booked is true once the kubelet's checkpoint has shown the serving. Lost is true if the checkpoint no longer shows
	// it: the kubelet may then call Allocate again if it has to start the container.
	Booked, Lost bool
	// Instance is set if the container runs with Card but the kubelet's checkpoint has come to name another card. It is
	// the ID of the running container. Next is the card that the checkpoint names and that the container's next start
	// gets. Both cards are held. If the checkpoint agrees, Instance is empty and Next has no meaning.
	Instance string
	Next     int
}

// runs reports whether the container that runs now with this ID is the one that was given Card.
func (s serving) runs(instance string) bool {
	return instance != "" && (s.Instance == "" || s.Instance == instance)
}

// HasCard reports whether the container was given a card. Card is then the card's index.
func (s serving) HasCard() bool { return s.Card >= 0 }

// servings holds what the containers of one pod were given, by container name. The record returns shared values, which
// are replaced and never changed.
type servings map[string]serving

// Empty reports whether all containers served so far were given no card. It is false if none was served.
func (s servings) Empty() bool {
	for _, serving := range s {
		if serving.Card != noCard {
			return false
		}
	}
	return len(s) > 0
}

// Lasting returns what the first of the pod's containers that has a card was given, and false if none has one. Init
// containers come last. They are ignored once a pod with other containers has run: all cards were given out by then, so
// another container that is missing here is a gap in the record, and the card of an init container can be a later one. A
// kubelet without its checkpoint calls Allocate again for init containers that have ended.
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

// served is the content of the record, by the UID under which the kubelet knows the pod.
type served map[gpu.PodUID]servings

// record keeps what this node's containers were given. Annotations are repaired to match it. It is rebuilt from the
// kubelet's checkpoint and corrected by it.
//
// mu guards all fields. What the methods return does not change later.
type record struct {
	mu   sync.Mutex
	pods served
	// settling is true until the checkpoint of a new kubelet has been read for the first time.
	settling bool
}

func newRecord() *record { return &record{pods: served{}} }

// Serve records what a container was given.
func (r *record) Serve(uid gpu.PodUID, container string, s serving) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.set(uid, container, s)
}

// Forget removes a pod that is gone. The kubelet's checkpoint may list the pod until the next allocation; Sync doesn't
// add it again.
func (r *record) Forget(uid gpu.PodUID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.pods, uid)
}

// knownPods reads the pods that the API server has.
type knownPods interface {
	// Exists reports whether there is an object with this UID.
	Exists(uid gpu.PodUID) bool
	// Instance returns the ID of the container that runs under this name, and "" if none runs.
	Instance(key containerKey) string
}

// Sync brings the record in line with the kubelet's checkpoint, which was written at the given time, and returns the pods
// for which something changed. Servings that are newer stay, because the checkpoint can't have them yet. A pod that
// doesn't exist and doesn't have devices that this plugin served is a leftover of the checkpoint and is ignored.
//
// The card of a running container is never replaced. If the checkpoint has named this card and later names another one,
// the kubelet had lost its checkpoint, called Allocate again for the container, and the call was matched to another
// container.
func (r *record) Sync(bookings []booking, written time.Time, pods knownPods) []gpu.PodUID {
	r.mu.Lock()
	defer r.mu.Unlock()
	// newer reports whether the checkpoint is too old to have a serving. The same devices in it belong to a pod that has
	// ended.
	newer := func(s serving) bool { return s.At.After(written.Add(clockStep)) }
	changed := map[gpu.PodUID]bool{}
	// unclaimed holds the devices of servings that the checkpoint hasn't confirmed yet.
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
			continue // The checkpoint has what the container had before.
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
				// Pod matching chose the wrong pod: the checkpoint shows which pod has these devices. This doesn't hold
				// for a serving that the checkpoint has shown once: a kubelet that has lost its checkpoint gives the
				// devices of a running container to others.
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

// Settle records that a new kubelet has started. It doesn't know what its checkpoint doesn't show. The next Sync marks
// that as lost.
func (r *record) Settle() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.settling = true
}

// Snapshot returns all servings.
func (r *record) Snapshot() served {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.pods)
}

// Pod returns what the containers of one pod were given.
func (r *record) Pod(uid gpu.PodUID) servings {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pods[uid]
}

// set replaces a serving. The caller of set or drop holds mu.
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
