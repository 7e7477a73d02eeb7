package dispatch

import (
	"sync"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// TurnRules knows which pods need no turn. Its methods don't wait for a Tick in progress. If it is nil, fair sharing is off.
type TurnRules struct {
	// PriorityCutoff is the lowest priority with which pods need no turn.
	PriorityCutoff int32

	// namespaces are those that are exempt from fair sharing.
	namespaces sync.Map
}

// NewTurnRules returns the rules without exempt namespaces.
func NewTurnRules(priorityCutoff int32) *TurnRules {
	return &TurnRules{PriorityCutoff: priorityCutoff}
}

// setExempt records whether a namespace is exempt.
func (r *TurnRules) setExempt(namespace string, exempt bool) {
	if exempt {
		r.namespaces.Store(namespace, true)
	} else {
		r.namespaces.Delete(namespace)
	}
}

// NeedsTurn reports whether fair sharing decides when the pod may be scheduled. Priorities count within a tenant only, so such a pod waits for room:
// neither kube-scheduler nor fragmentation eviction evicts others for it, and no group gives way to it.
func (r *TurnRules) NeedsTurn(p gpu.Pod) bool {
	if r == nil || p.Request == 0 || p.Priority >= r.PriorityCutoff {
		return false
	}
	_, exempt := r.namespaces.Load(p.Namespace)
	return !exempt
}

// updateAdmitted records whether the pod is granted or bound. Pods that need no turn are admitted in any case.
func (m *Manager) updateAdmitted(p *pod) {
	if p.charged() || p.Node != "" {
		m.admitted.Store(p.UID, true)
	} else {
		m.admitted.Delete(p.UID)
	}
}

// IsAdmitted reports whether filter may place the pod. It doesn't wait for a Tick in progress.
func (m *Manager) IsAdmitted(p gpu.Pod) bool {
	if !m.NeedsTurn(p) {
		return true
	}
	_, admitted := m.admitted.Load(p.UID)
	return admitted
}
