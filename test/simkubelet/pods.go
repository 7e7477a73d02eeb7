package simkubelet

import (
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

func terminal(phase corev1.PodPhase) bool {
	return phase == corev1.PodSucceeded || phase == corev1.PodFailed
}

func fullName(pod *corev1.Pod) types.NamespacedName {
	return types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
}

// pods are those that the kubelet has taken up, in whatever state (pod/pod_manager.go). A pod is in here from the moment
// that its admission begins until its object is gone. Pods in here are never written to.
type pods struct {
	mu     sync.RWMutex
	byUID  map[types.UID]*corev1.Pod
	byName map[types.NamespacedName]*corev1.Pod
}

func newPods() *pods {
	return &pods{byUID: map[types.UID]*corev1.Pod{}, byName: map[types.NamespacedName]*corev1.Pod{}}
}

func (p *pods) set(pod *corev1.Pod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.byUID[pod.UID] = pod
	p.byName[fullName(pod)] = pod
}

func (p *pods) remove(pod *corev1.Pod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.byUID, pod.UID)
	delete(p.byName, fullName(pod))
}

func (p *pods) get(uid types.UID) (*corev1.Pod, bool) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	pod, ok := p.byUID[uid]
	return pod, ok
}

func (p *pods) named(name types.NamespacedName) (*corev1.Pod, bool) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	pod, ok := p.byName[name]
	return pod, ok
}

func (p *pods) list() []*corev1.Pod {
	p.mu.RLock()
	defer p.mu.RUnlock()
	out := make([]*corev1.Pod, 0, len(p.byUID))
	for _, pod := range p.byUID {
		out = append(out, pod)
	}
	return out
}
