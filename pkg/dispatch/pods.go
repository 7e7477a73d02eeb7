package dispatch

import (
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
)

// Pod is a pod that asks for GPU memory, or has the gate.
type Pod struct {
	gpu.Pod
	Created time.Time
	// Node is the node that the pod is bound to; empty if it isn't bound.
	Node string
	// Bound is when it was bound, according to the extender that did it; zero if that is unknown.
	Bound time.Time
	Ended bool
	// Gated is true if the pod has the gate of fair sharing, GatedOtherwise if it has others.
	Gated, GatedOtherwise bool
	// Invalid is true if no node can give the pod what it asks for. It gets no turn.
	Invalid bool
	// Group is the pod's group; zero if it has none.
	Group gang.Key
	// Constraints are equal for pods that can use the same nodes; pods without Constraints can use all nodes. RoomKey is equal for
	// unbound pods that fit the same free resources. A bound pod has no RoomKey, and keeps its
	// Constraints.
	Constraints, RoomKey unique.Handle[string]
}

// awaitsBind reports whether the pod could still be bound.
func (p *Pod) awaitsBind() bool { return p.Node == "" && !p.Ended && !p.Leaving }

// pod is a Pod with the state that a Manager keeps of it.
type pod struct {
	*Pod // Never changed, only replaced.
	account
	// item is the item in which the pod waits; nil if it doesn't.
	item *item
	// expires is when the pod's charge ends if it isn't bound before; zero if it has none.
	expires time.Time
	// grant is the grant of the pod's item, if the pod has or had a charge. failedAt is when a charge last ended without a bind.
	grant    *grant
	failedAt time.Time
	// provisioning is since when the gate is open for an autoscaler; zero if it isn't.
	provisioning time.Time
	// gate is how far this process is with opening the pod's gate. If that has failed, it is not tried again before gateRetry.
	gate      gateState
	gateRetry time.Time
}

// maxRequest bounds what is counted for a pod, so that sums over pods are exact: a user can bind a pod with any request to a node by
// spec.nodeName. More fits no card.
const maxRequest = fairshare.MaxGuaranteed

// SetPod adds or updates a pod, as the watch reports it.
func (m *Manager) SetPod(next Pod) {
	next.Request = min(next.Request, maxRequest)
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.pods[next.UID]
	switch {
	case p == nil:
		p = &pod{Pod: &Pod{}}
		m.pods[next.UID] = p
		if m.inNamespace[next.Namespace] == nil {
			m.inNamespace[next.Namespace] = map[gpu.PodUID]*pod{}
		}
		m.inNamespace[next.Namespace][next.UID] = p
	case *p.Pod == next:
		return // Something else changed, such as a condition.
	default:
		m.withdraw(p)
	}
	// A place suits the request that the pod had before. Users can change its number of cards, and its node selector while it is gated.
	asksElse := next.Demand() != p.Demand() || next.Constraints != p.Constraints
	ran := p.Node != ""
	p.Pod = &next
	if asksElse || !p.awaitsBind() {
		m.endCharge(p, p.Node == "" && !p.awaitsBind()) // A change by its user is no failure.
	}
	if p.Node != "" && !ran { // Before the first Tick as leader, now is zero.
		p.started = m.now
	}
	m.updateAdmitted(p)
	m.refresh(p)
}

// RemovePod removes a pod that was deleted. It does nothing for other pods.
func (m *Manager) RemovePod(uid gpu.PodUID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.pods[uid]
	if p == nil {
		return
	}
	m.withdraw(p)
	m.endCharge(p, true)
	tenant := p.countedFor
	m.count(p, 0)
	delete(m.gated, uid)
	delete(m.pods, uid)
	delete(m.inNamespace[p.Namespace], uid)
	if len(m.inNamespace[p.Namespace]) == 0 {
		delete(m.inNamespace, p.Namespace)
	}
	delete(m.allocated, uid)
	m.admitted.Delete(uid)
	if _, known := m.namespaces[p.Namespace]; !known {
		m.setTerms(tenant) // The last pod of a namespace that is gone already.
	}
	m.changed = true
}

// refresh updates what depends on the state of a pod: the memory that it has and that the queue counts for it, whether its gate is to be opened,
// and the item in which it waits. The pod must be in no item.
func (m *Manager) refresh(p *pod) {
	amount := gpu.Memory(0)
	if p.Node != "" && !p.Ended || p.charged() {
		amount = p.Request
	}
	m.count(p, amount)
	m.updateAllocated(p)
	m.refreshGate(p)
	if m.awaitsTurn(p) {
		m.enlist(p)
	}
	m.changed = true
}

// awaitsTurn reports whether the pod waits for its turn.
func (m *Manager) awaitsTurn(p *pod) bool {
	_, known := m.namespaces[p.Namespace]
	return known && p.awaitsBind() && !p.charged() && !p.GatedOtherwise && !p.Invalid && m.NeedsTurn(p.Pod.Pod)
}

// count makes the queue count the amount for the pod, as memory of its tenant. If the namespace is deleted already, the tenant is the one
// that it had before.
func (m *Manager) count(p *pod, amount gpu.Memory) {
	ns, known := m.namespaces[p.Namespace]
	if !known && p.counted > 0 {
		ns.Tenant = p.countedFor
	}
	if ns.Exempt {
		amount = 0
	}
	if p.counted == amount && (amount == 0 || p.countedFor == ns.Tenant) {
		return
	}
	if p.counted > 0 {
		m.queue.Release(p.countedFor, p.counted)
		if m.leading && known && !ns.Exempt && amount == 0 && p.Node != "" {
			m.ended = append(m.ended, &kept{p.countedFor, p.Pod, m.now.Add(keepFor)})
		}
	}
	p.counted, p.countedFor = amount, ns.Tenant
	if amount > 0 {
		m.queue.Charge(ns.Tenant, amount)
	}
}

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
