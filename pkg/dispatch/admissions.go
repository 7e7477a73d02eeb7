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
	// free are the namespaces that are exempt from fair sharing. admitted are the pods that are granted or bound.
	free     map[string]bool
	admitted map[gpu.PodUID]bool
}

// setFree records whether a namespace is exempt.
func (a *admissions) setFree(namespace string, free bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	set(a.free, namespace, free)
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

// NeedsNoTurn reports whether the pod may be scheduled without a charge. It doesn't wait for a Tick in progress.
func (m *Manager) NeedsNoTurn(p gpu.Pod) bool {
	if p.Request == 0 || p.Priority >= m.PriorityCutoff {
		return true
	}
	m.admissions.mu.RLock()
	defer m.admissions.mu.RUnlock()
	return m.admissions.free[p.Namespace]
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
