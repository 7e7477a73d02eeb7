package allocation

import (
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// NoCard is the index in the response to a container that was given no card.
const NoCard = -1

// clockStep is how far the modification time of a file can lag behind the clock.
const clockStep = 20 * time.Millisecond

// Allocation is what one container was given.
type Allocation struct {
	// Cards are the container's shares of its cards, ordered by index; empty if it was given none. CardMemory is the total memory of
	// each of them.
	Cards      gpu.Placement
	CardMemory []gpu.Memory
	// UUIDs are the cards as the container's environment names them. They are known once the kubelet's checkpoint has shown the allocation,
	// unless the environment names cards by index.
	UUIDs []string
	// Unknown is true if the container's response in the checkpoint isn't one of this plugin. Cards is empty then.
	Unknown bool
	// Mode is the isolation mode that enforces the container's share; empty if none does. Limit is the limit in bytes on each of its cards that the
	// driver can be asked for; 0 if there is none.
	Mode  string
	Limit uint64
	// Allowed is how much of each of its cards the container may use, in bytes, if that is more than it requests; else 0.
	Allowed uint64
	// Adapters is what the container was given of the node's RDMA adapters.
	Adapters Adapters
	// Devices are the fake devices in the kubelet's call.
	Devices DeviceSet
	// At is the time of the allocation, or if only the checkpoint shows it, the time at which the checkpoint was written.
	At time.Time
	// Confirmed is true once the kubelet's checkpoint has shown the allocation. Lost is true if the checkpoint no longer shows
	// it: the kubelet may then call Allocate again if it has to start the container.
	Confirmed, Lost bool
	// Instance is set if the container runs with Cards and Limit but the kubelet's checkpoint has come to name others. It is the ID of
	// the running container. Next and NextLimit are what the checkpoint names and the container's next start gets. All of these cards
	// are held. If the checkpoint agrees, Instance is empty and both have no meaning.
	Instance  string
	Next      gpu.Placement
	NextLimit uint64
}

// Give returns the allocation of a container's request, divided evenly over cards that are ordered by index.
func Give(c Container, cards []gpu.Card) Allocation {
	share := c.Share(len(cards))
	var a Allocation
	for _, card := range cards {
		a.Cards = append(a.Cards, gpu.Share{Card: card.Index, Memory: share.Memory, Cores: share.Cores, Containers: share.Containers})
		a.CardMemory = append(a.CardMemory, card.Memory)
	}
	return a
}

// HasCard reports whether the container was given a card.
func (a Allocation) HasCard() bool { return len(a.Cards) > 0 }

// sameAnswer reports whether both were given the same cards with the same limits.
func (a Allocation) sameAnswer(b Allocation) bool {
	return a.Unknown == b.Unknown && slices.Equal(a.Cards.Cards(), b.Cards.Cards()) && a.Limit == b.Limit && a.Allowed == b.Allowed
}

// PodAllocations is what a pod's containers were given, by name. The record replaces these values and never changes them.
type PodAllocations map[string]Allocation

// withoutCard reports whether containers were served and none was given a card.
func (g PodAllocations) withoutCard() bool {
	for _, a := range g {
		if a.HasCard() || a.Unknown {
			return false
		}
	}
	return len(g) > 0
}

// Complete reports whether it is known what each of the pod's containers was given.
func (g PodAllocations) Complete(pod *Pod) bool {
	return !slices.ContainsFunc(pod.Containers, func(c Container) bool {
		a, served := g[c.Name]
		return !served || a.Unknown
	})
}

// Allocations is the content of the record, by the UID under which the kubelet knows the pod.
type Allocations map[gpu.PodUID]PodAllocations

// Entry is a container's entry in the kubelet's checkpoint: the cards in the plugin's response, and the fake devices.
type Entry struct {
	ContainerKey
	Allocation
}

// KnownPods reads the pods that the API server has.
type KnownPods interface {
	Exists(uid gpu.PodUID) bool
	// Instance returns the ID of the container that runs under this name, and "" if none runs.
	Instance(key ContainerKey) string
}

// Record keeps what this node's containers were given. Annotations are repaired to match it. It is rebuilt from the kubelet's
// checkpoint and corrected by it.
//
// mu guards all fields. What the methods return does not change later.
type Record struct {
	mu   sync.Mutex
	pods Allocations
	// newKubelet is true until the checkpoint of a new kubelet has been read for the first time.
	newKubelet bool
}

// NewRecord returns a record with these allocations.
func NewRecord(pods Allocations) *Record { return &Record{pods: maps.Clone(pods)} }

// Add records what a container was given.
func (r *Record) Add(key ContainerKey, a Allocation) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.set(key, a)
}

// Remove removes a deleted pod. The kubelet's checkpoint may list the pod until the next allocation; Sync doesn't add it again.
func (r *Record) Remove(uid gpu.PodUID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.pods, uid)
}

// KubeletStarted records that a new kubelet has started. The next Sync marks as lost what its checkpoint doesn't show.
func (r *Record) KubeletStarted() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.newKubelet = true
}

// Snapshot returns all allocations.
func (r *Record) Snapshot() Allocations {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.pods)
}

// Pod returns what the containers of one pod were given.
func (r *Record) Pod(uid gpu.PodUID) PodAllocations {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pods[uid]
}

// Sync brings the record in line with the kubelet's checkpoint, which was written at the given time, and returns the pods for
// which something changed. Newer allocations stay, because the checkpoint can't have them yet. A pod that doesn't exist and
// doesn't have devices that this plugin served is a leftover of the checkpoint and is ignored. The cards of a running
// container are never replaced (keepsCards).
func (r *Record) Sync(entries []Entry, written time.Time, pods KnownPods) []gpu.PodUID {
	r.mu.Lock()
	defer r.mu.Unlock()
	// newer reports whether the checkpoint is too old to have an allocation. The same devices in it belong to a pod that has
	// ended.
	newer := func(a Allocation) bool { return a.At.After(written.Add(clockStep)) }
	changed := map[gpu.PodUID]bool{}
	unconfirmed := map[DeviceSet]bool{}
	for _, containers := range r.pods {
		for _, a := range containers {
			if !a.Confirmed && !newer(a) {
				unconfirmed[a.Devices] = true
			}
		}
	}
	owner := map[DeviceSet]gpu.PodUID{}
	listed := map[ContainerKey]bool{}
	for _, e := range entries {
		owner[e.Devices], listed[e.ContainerKey] = e.UID, true
		known, ok := r.pods[e.UID][e.Name]
		if ok && newer(known) {
			continue // The checkpoint has what the container had before.
		}
		if !ok && !unconfirmed[e.Devices] && !pods.Exists(e.UID) {
			continue
		}
		a := e.Allocation
		a.At, a.Confirmed = written, true
		instance := pods.Instance(e.ContainerKey)
		switch {
		case ok && known.sameAnswer(a) && known.Devices == a.Devices:
			a.At = known.At
		case known.keepsCards(a, instance):
			a = known.withNext(a, instance)
		default:
			changed[e.UID] = true
		}
		r.set(e.ContainerKey, a)
	}
	for uid, containers := range r.pods {
		for name, a := range containers {
			key := ContainerKey{uid, name}
			switch {
			case listed[key]:
			case !a.Confirmed && owner[a.Devices] != "" && owner[a.Devices] != uid && !newer(a):
				// Pod matching found the wrong pod: the checkpoint shows which pod has these devices. This doesn't hold for an
				// allocation that the checkpoint has shown once: a kubelet that has lost its checkpoint gives the devices of a
				// running container to others.
				r.drop(key)
				changed[uid] = true
			case !a.Confirmed && !r.newKubelet:
			case !pods.Exists(uid):
				r.drop(key)
			default:
				r.set(key, a.lose())
			}
		}
	}
	r.newKubelet = false
	return slices.Sorted(maps.Keys(changed))
}

// set replaces an allocation. The caller of set or drop holds mu.
func (r *Record) set(key ContainerKey, a Allocation) {
	if before, ok := r.pods[key.UID][key.Name]; ok && reflect.DeepEqual(before, a) {
		return
	}
	containers := make(PodAllocations, len(r.pods[key.UID])+1)
	maps.Copy(containers, r.pods[key.UID])
	containers[key.Name] = a
	if r.pods == nil {
		r.pods = Allocations{}
	}
	r.pods[key.UID] = containers
}

func (r *Record) drop(key ContainerKey) {
	containers := maps.Clone(r.pods[key.UID])
	delete(containers, key.Name)
	r.pods[key.UID] = containers
	if len(containers) == 0 {
		delete(r.pods, key.UID)
	}
}
