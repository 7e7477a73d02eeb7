package diagnosis

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// RequestProblem returns why a pod runs, or waits, without the GPU memory that its owner seems to want; empty if nothing
// looks like a mistake. kube-scheduler and the kubelet accept such pods: a resource that no node has, the amount 0,
// gpu-count alone, or a key in a place where nothing reads it. The pod may be pending, running or ended.
func RequestProblem(pod *corev1.Pod) string {
	switch misspelled := misspelledResource(pod); {
	case misspelled != "":
		return misspelled
	case protocol.PodRequest(pod) > 0:
		return cmp.Or(misplacedCount(pod), misplacedKey(pod), uselessKey(pod))
	case names(pod, protocol.ResourceMemory):
		return fmt.Sprintf("the pod asks for 0 of %s, so it gets no card", protocol.ResourceMemory)
	}
	for _, key := range []string{protocol.LabelCount, string(protocol.ResourceCores), protocol.LabelRDMA} {
		if _, label := pod.Labels[key]; label || names(pod, corev1.ResourceName(key)) {
			return fmt.Sprintf("%s alone gives the pod no card: ask for %s", key, protocol.ResourceMemory)
		}
	}
	for _, name := range ours {
		_, label := pod.Labels[string(name)]
		if _, annotation := pod.Annotations[string(name)]; annotation || label {
			return fmt.Sprintf("%s has no effect as an annotation or label: it belongs to resources.limits of a container", name)
		}
	}
	return ""
}

// allContainers yields the pod's init containers and its containers.
func allContainers(pod *corev1.Pod) iter.Seq[*corev1.Container] {
	return func(yield func(*corev1.Container) bool) {
		for _, containers := range [...][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
			for i := range containers {
				if !yield(&containers[i]) {
					return
				}
			}
		}
	}
}

// misspelledResource returns the first resource that looks like one of ours, and is not.
func misspelledResource(pod *corev1.Pod) string {
	for container := range allContainers(pod) {
		for _, list := range [...]corev1.ResourceList{container.Resources.Limits, container.Resources.Requests} {
			for _, name := range slices.Sorted(maps.Keys(list)) {
				meant, looks := looksLikeOurs(string(name))
				switch {
				case meant != "":
					return fmt.Sprintf("container %s asks for %s, which gpushare doesn't know: write %s", container.Name, name, meant)
				case looks:
					return fmt.Sprintf("container %s asks for %s, which gpushare doesn't know", container.Name, name)
				}
			}
		}
	}
	return ""
}

// ours are our resources.
var ours = []corev1.ResourceName{protocol.ResourceMemory, protocol.ResourceCount, protocol.ResourceCores}

// looksLikeOurs reports whether the resource is not ours, but about GPUs, and in a domain that may be a misspelling of ours. meant is the resource of
// ours that its name says; empty if it says none.
func looksLikeOurs(resource string) (meant corev1.ResourceName, looks bool) {
	domain, name, _ := strings.Cut(strings.ToLower(resource), "/")
	switch {
	case slices.Contains(ours, corev1.ResourceName(resource)), !strings.HasPrefix(domain, "ali"), !strings.Contains(name, "gpu"):
		return "", false
	case strings.Contains(name, "core"):
		return protocol.ResourceCores, true
	case strings.Contains(name, "count"):
		return protocol.ResourceCount, true
	case strings.Contains(name, "mem"), name == "gpu":
		return protocol.ResourceMemory, true
	}
	return "", true
}

// limitRanger is the annotation in which the API server lists what it set from the defaults of LimitRanges (k8s.io/kubernetes
// plugin/pkg/admission/limitranger).
const limitRanger = "kubernetes.io/limit-ranger"

// names reports whether the pod's owner names the resource in a container, in any amount.
func names(pod *corev1.Pod, resource corev1.ResourceName) bool {
	if strings.Contains(pod.Annotations[limitRanger], string(resource)) {
		return false // A LimitRange does.
	}
	for container := range allContainers(pod) {
		_, limited := container.Resources.Limits[resource]
		if _, requested := container.Resources.Requests[resource]; limited || requested {
			return true
		}
	}
	return false
}

// misplacedCount reports a number of cards that is a resource of a pod that asks for GPU memory.
func misplacedCount(pod *corev1.Pod) string {
	if _, label := pod.Labels[protocol.LabelCount]; label {
		return ""
	}
	for container := range allContainers(pod) {
		if quantity := container.Resources.Limits[protocol.ResourceCount]; quantity.CmpInt64(1) > 0 {
			return fmt.Sprintf("%s is a resource of container %s, and must be a label of the pod: the pod gets one card", protocol.LabelCount, container.Name)
		}
	}
	return ""
}

// misplacedKey reports annotations that must be labels, and labels that must be annotations. Of a pod in a group, GroupOf names the group's keys.
func misplacedKey(pod *corev1.Pod) string {
	labels, annotations := []string{protocol.LabelCount, protocol.LabelRDMA}, []string{}
	if !protocol.InGroup(pod) {
		labels = append(labels, protocol.LabelGroupName, protocol.LabelGroupSize)
		annotations = append(annotations, protocol.AnnotationGroupName, protocol.AnnotationGroupSize)
	}
	for _, key := range slices.Sorted(maps.Keys(pod.Labels)) {
		if _, isLimit := protocol.LimitedContainer(key); isLimit {
			annotations = append(annotations, key)
		}
	}
	misplaced := func(keys []string, in, notIn map[string]string) int {
		return slices.IndexFunc(keys, func(key string) bool {
			_, wrong := in[key]
			_, right := notIn[key]
			return wrong && !right
		})
	}
	if i := misplaced(labels, pod.Annotations, pod.Labels); i >= 0 {
		return labels[i] + " has no effect as an annotation: it must be a label of the pod"
	}
	if i := misplaced(annotations, pod.Labels, pod.Annotations); i >= 0 {
		return annotations[i] + " has no effect as a label: it must be an annotation of the pod"
	}
	return ""
}

// uselessKey reports keys by which the pod should be in a group, and which have no effect alone.
func uselessKey(pod *corev1.Pod) string {
	if protocol.InGroup(pod) {
		return ""
	}
	if key := protocol.PodGroupLabel(pod); key != "" {
		return fmt.Sprintf("label %s names a PodGroup that gpushare doesn't read: the pod is in no group unless annotation %s says how many members it has",
			key, protocol.AnnotationGroupSize)
	}
	if _, named := pod.Annotations[protocol.AnnotationGroupLabel]; named {
		return fmt.Sprintf("annotation %s has no effect without %s: the pod is in no group", protocol.AnnotationGroupLabel, protocol.AnnotationGroupName)
	}
	return ""
}

// certainlyBytes is a request in units that must have been meant in bytes: no card has as many units.
const certainlyBytes = 100_000_000

// bytesMistake says that a request of the pod was probably meant in bytes: "2Gi" is 2147483648 units. It is empty if none was.
func bytesMistake(pod *corev1.Pod) string {
	for container := range allContainers(pod) {
		request := protocol.ContainerRequest(container)
		limit := container.Resources.Limits[protocol.ResourceMemory]
		if written := limit.String(); request >= certainlyBytes || request > 0 && strings.HasSuffix(written, "i") {
			return fmt.Sprintf("; container %s asks for %s: write a number of units, not of bytes", container.Name, written)
		}
	}
	return ""
}
