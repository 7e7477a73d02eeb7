package cluster

import (
	"cmp"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// packed is a pod as the informer's cache stores it. Even an empty corev1.Pod needs more than a kilobyte, and a cluster
// has tens of thousands of pods. Most of them differ only in the fields of packed other than rest.
type packed struct {
	// ObjectMeta has no annotations.
	metav1.ObjectMeta
	node string
	// annotations are keys and values alternately.
	annotations []string
	memory      gpu.Memory
	// rest is the remainder of the pod. Many pods share it; it is never changed.
	rest *corev1.Pod
}

// pack converts a slim pod to the form that the cache stores.
func (s *slimmer) pack(pod *corev1.Pod) *packed {
	out := &packed{ObjectMeta: pod.ObjectMeta, node: pod.Spec.NodeName, memory: protocol.PodRequest(pod)}
	out.Annotations = nil
	for _, key := range slices.Sorted(maps.Keys(pod.Annotations)) {
		out.annotations = append(out.annotations, key, pod.Annotations[key])
	}
	out.annotations = slices.Clip(out.annotations)
	rest := *pod
	rest.ObjectMeta, rest.Spec.NodeName = metav1.ObjectMeta{}, ""
	if out.memory > 0 {
		setMemory(&rest, 0)
	}
	out.rest = &rest
	// Pending pods are few, and differ from each other.
	if key, err := rest.Marshal(); err == nil && out.node != "" {
		out.rest = s.rests.one(string(key), &rest)
	}
	return out
}

// podOf converts an object of the cache back to a slim pod, which the caller must not change.
func podOf(object any) (*corev1.Pod, bool) {
	p, ok := object.(*packed)
	if !ok {
		return nil, false
	}
	pod := *p.rest
	pod.ObjectMeta, pod.Spec.NodeName = p.meta(), p.node
	if p.memory > 0 {
		setMemory(&pod, p.memory)
	}
	return &pod, true
}

// meta returns the pod's metadata with its annotations.
func (p *packed) meta() metav1.ObjectMeta {
	meta := p.ObjectMeta
	if len(p.annotations) > 0 {
		meta.Annotations = make(map[string]string, len(p.annotations)/2)
	}
	for i := 0; i+1 < len(p.annotations); i += 2 {
		meta.Annotations[p.annotations[i]] = p.annotations[i+1]
	}
	return meta
}

// setMemory sets the GPU memory that a slim pod asks for. It copies the values that the pod shares with others.
func setMemory(pod *corev1.Pod, memory gpu.Memory) {
	if len(pod.Spec.Containers) > 0 {
		container := pod.Spec.Containers[0]
		container.Resources.Limits = withMemory(nil, memory)
		pod.Spec.Containers = []corev1.Container{container}
	}
	if pod.Spec.Resources != nil {
		pod.Spec.Resources = &corev1.ResourceRequirements{Requests: withMemory(pod.Spec.Resources.Requests, memory)}
	}
}

// withMemory returns a copy of the list with the given GPU memory. Zero removes the entry.
func withMemory(list corev1.ResourceList, memory gpu.Memory) corev1.ResourceList {
	out := make(corev1.ResourceList, len(list)+1)
	maps.Copy(out, list)
	delete(out, protocol.ResourceMemory)
	if memory > 0 {
		out[protocol.ResourceMemory] = *resource.NewQuantity(int64(memory), resource.DecimalSI)
	}
	return out
}

// podCache reads pods from the informer's cache.
type podCache struct{ cache.Indexer }

func (c podCache) get(namespace, name string) (*corev1.Pod, bool) {
	object, exists, err := c.GetByKey(namespace + "/" + name)
	if err != nil || !exists {
		return nil, false
	}
	return podOf(object)
}

// onNode returns the live pods that are bound to the node, and the pending pods that are nominated to it.
func (c podCache) onNode(name string) []*corev1.Pod {
	objects, _ := c.ByIndex(nodeIndex, name) // It can't fail, because the index exists.
	pods := make([]*corev1.Pod, 0, len(objects))
	for _, object := range objects {
		if pod, ok := podOf(object); ok {
			pods = append(pods, pod)
		}
	}
	return pods
}

// nodeIndex is the name of the index of pods by node, see onNode.
const nodeIndex = "node"

func indexByNode(object any) ([]string, error) {
	p, ok := object.(*packed)
	if !ok || protocol.Terminal(p.rest) {
		return nil, nil
	}
	if node := cmp.Or(p.node, p.rest.Status.NominatedNodeName); node != "" {
		return []string{node}, nil
	}
	return nil, nil
}
