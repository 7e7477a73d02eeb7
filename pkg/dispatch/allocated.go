package dispatch

import (
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// allocatedPod is what shares and evictions depend on of a pod that has memory: it is bound and hasn't ended, or it has a charge. An
// allocatedPod is never changed. A change of the pod replaces it, so a list of them can be read without the Manager's lock.
type allocatedPod struct {
	*Pod
	// counted is the amount that the queue counts for the pod, as memory of countedFor.
	counted    gpu.Memory
	countedFor string
	charged    bool
	// started is when the pod was bound, as far as this process saw it; zero if it didn't.
	started time.Time
}

// startedAt returns when the pod was bound, as far as this process knows. since is when it began to lead. The result stays the same if the
// clock is set.
func (p *allocatedPod) startedAt(since time.Time) time.Time {
	switch {
	case !p.started.IsZero():
		return p.started
	case p.Bound.IsZero():
		return since
	}
	return since.Add(-max(since.Sub(p.Bound), 0))
}

// allocatedPods are the pods that have memory. They are in a list because it is copied with the Manager's lock held.
type allocatedPods struct {
	list []*allocatedPod
	// at is the position of each pod in list.
	at map[gpu.PodUID]int
}

// snapshot returns the present pods, in no order.
func (a *allocatedPods) snapshot() []*allocatedPod { return slices.Clone(a.list) }

// set adds or replaces a pod.
func (a *allocatedPods) set(p *allocatedPod) {
	a.remove(p.UID)
	a.at[p.UID] = len(a.list)
	a.list = append(a.list, p)
}

// remove removes a pod, if it is there.
func (a *allocatedPods) remove(uid gpu.PodUID) {
	i, known := a.at[uid]
	if !known {
		return
	}
	last := len(a.list) - 1
	a.list[i] = a.list[last]
	a.at[a.list[i].UID] = i
	a.list[last] = nil
	a.list = a.list[:last]
	delete(a.at, uid)
}

// updateAllocated updates what is known of the memory of a pod.
func (m *Manager) updateAllocated(p *pod) {
	if p.Node != "" && !p.Ended || p.charged() {
		m.allocated.set(&allocatedPod{p.Pod, p.counted, p.countedFor, p.charged(), p.started})
	} else {
		m.allocated.remove(p.UID)
	}
}
