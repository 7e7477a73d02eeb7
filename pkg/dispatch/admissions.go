package dispatch

import (
	"sync"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// admissions decide whether filter may place a pod. mu guards the fields below it. Filter calls take mu and not the Manager's lock, so
// they don't wait for a round or for the search for victims, which take long in a large cluster. No other lock is taken while mu is
// held.
type admissions struct {
	mu sync.RWMutex
	// admitted are the pods that are granted or bound.
	admitted map[gpu.PodUID]bool
}

// Exempt knows which pods need no turn. Its methods don't wait for a Tick in progress. mu guards namespaces. No other lock is taken while
// mu is held. If it is nil, fair sharing is off.
type Exempt struct {
	// PriorityCutoff is the lowest priority with which pods need no turn.
	PriorityCutoff int32

	mu sync.RWMutex
	// namespaces are those that are exempt from fair sharing.
	namespaces map[string]bool
}

// NewExempt returns an Exempt without exempt namespaces.
func NewExempt(priorityCutoff int32) *Exempt {
	return &Exempt{PriorityCutoff: priorityCutoff, namespaces: map[string]bool{}}
}

// set records whether a namespace is exempt.
func (e *Exempt) set(namespace string, exempt bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	set(e.namespaces, namespace, exempt)
}

// NeedsNoTurn reports whether the pod may be scheduled without a charge.
func (e *Exempt) NeedsNoTurn(p gpu.Pod) bool {
	if e == nil || p.Request == 0 || p.Priority >= e.PriorityCutoff {
		return true
	}
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.namespaces[p.Namespace]
}

// update records whether the pod is granted or bound. Pods that need no turn are admitted in any case.
func (a *admissions) update(p *pod) {
	a.mu.Lock()
	defer a.mu.Unlock()
	set(a.admitted, p.UID, p.charged() || p.Node != "")
}

// remove forgets a pod that was deleted.
func (a *admissions) remove(uid gpu.PodUID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.admitted, uid)
}

func set[K comparable](keys map[K]bool, key K, in bool) {
	if in {
		keys[key] = true
	} else {
		delete(keys, key)
	}
}

// Admit reports whether filter may place the pod. It doesn't wait for a Tick in progress.
func (m *Manager) Admit(p gpu.Pod) bool {
	if m.NeedsNoTurn(p) {
		return true
	}
	m.admissions.mu.RLock()
	defer m.admissions.mu.RUnlock()
	return m.admissions.admitted[p.UID]
}
