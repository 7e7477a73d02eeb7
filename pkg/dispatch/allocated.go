package dispatch

import (
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// allocatedPod is what shares and evictions depend on of a pod that has memory: it is bound and hasn't ended, or it has a charge. An
// allocatedPod is never changed. A change of the pod replaces it, so a list of them can be read without the Manager's lock.
type allocatedPod struct {
	*Pod
	account
}

// account is what is counted for a pod.
type account struct {
	// counted is the amount that the queue counts for the pod, as memory of countedFor.
	counted    gpu.Memory
	countedFor string
	// started is when the pod was bound, if that happened while this process led; otherwise zero.
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

// updateAllocated updates what is known of the memory of a pod.
func (m *Manager) updateAllocated(p *pod) {
	if p.Node != "" && !p.Ended || p.charged() {
		m.allocated[p.UID] = &allocatedPod{p.Pod, p.account}
	} else {
		delete(m.allocated, p.UID)
	}
}
