package simkubelet

import (
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// The annotations by which the kubelet tells static pods and their mirrors (pkg/kubelet/types/pod_update.go).
const (
	annotationMirror = "kubernetes.io/config.mirror"
	annotationSource = "kubernetes.io/config.source"
	annotationHash   = "kubernetes.io/config.hash"

	sourceAPI  = "api"
	sourceFile = "file"
)

func isMirror(pod *corev1.Pod) bool {
	_, ok := pod.Annotations[annotationMirror]
	return ok
}

func isStatic(pod *corev1.Pod) bool {
	return !isMirror(pod) && pod.Annotations[annotationSource] == sourceFile
}

func terminal(phase corev1.PodPhase) bool {
	return phase == corev1.PodSucceeded || phase == corev1.PodFailed
}

func fullName(pod *corev1.Pod) types.NamespacedName {
	return types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
}

// pods are those that the kubelet has taken up, in whatever state (pod/pod_manager.go). A pod is in here from the moment
// that its admission begins until its object is gone. Pods in here are never written to.
type pods struct {
	mu      sync.RWMutex
	byUID   map[types.UID]*corev1.Pod
	byName  map[types.NamespacedName]*corev1.Pod
	mirrors map[types.NamespacedName]*corev1.Pod
}

func newPods() *pods {
	return &pods{
		byUID:   map[types.UID]*corev1.Pod{},
		byName:  map[types.NamespacedName]*corev1.Pod{},
		mirrors: map[types.NamespacedName]*corev1.Pod{},
	}
}

func (p *pods) set(pod *corev1.Pod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if isMirror(pod) {
		p.mirrors[fullName(pod)] = pod
		return
	}
	p.byUID[pod.UID] = pod
	p.byName[fullName(pod)] = pod
}

func (p *pods) remove(pod *corev1.Pod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if isMirror(pod) {
		delete(p.mirrors, fullName(pod))
		return
	}
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

func (p *pods) mirror(name types.NamespacedName) (*corev1.Pod, bool) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	pod, ok := p.mirrors[name]
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
