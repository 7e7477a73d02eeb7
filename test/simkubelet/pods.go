package simkubelet

import (
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

func terminal(phase corev1.PodPhase) bool {
	return phase == corev1.PodSucceeded || phase == corev1.PodFailed
}

// pods are the pods that the kubelet knows, in any state (pod/pod_manager.go): from the start of admission until the
// object is deleted. The stored pods are never modified.
type pods struct {
	mu    sync.RWMutex
	byUID map[types.UID]*corev1.Pod
}

func (p *pods) set(pod *corev1.Pod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.byUID[pod.UID] = pod
}

func (p *pods) remove(uid types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.byUID, uid)
}

// get returns the pod, or nil if it isn't known.
func (p *pods) get(uid types.UID) *corev1.Pod {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.byUID[uid]
}

func (p *pods) list() []*corev1.Pod {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return slices.Collect(maps.Values(p.byUID))
}
