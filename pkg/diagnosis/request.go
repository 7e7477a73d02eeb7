package diagnosis

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// RequestProblem returns why a pod runs, or waits, without the GPU memory that its owner seems to want; empty if nothing
// looks like a mistake. kube-scheduler and the kubelet accept such pods: a resource that no node has, the amount 0,
// gpu-count alone, or a key in a place where nothing reads it. The pod may be pending, running or ended.
func RequestProblem(pod *corev1.Pod) string {
	if problem := misspelledResource(pod); problem != "" {
		return problem
	}
	switch memory := protocol.PodRequest(pod); {
	case memory > 0:
		return cmp.Or(misplacedCount(pod), misplacedKey(pod), misplacedGroup(pod))
	case names(pod, protocol.ResourceMemory):
		return fmt.Sprintf("the pod asks for 0 of %s, so it gets no card", protocol.ResourceMemory)
	case names(pod, protocol.ResourceCount):
		return fmt.Sprintf("%s alone reserves neither memory nor a card: ask for %s", protocol.ResourceCount, protocol.ResourceMemory)
	case names(pod, protocol.ResourceCores):
		return fmt.Sprintf("%s alone gives the pod no card: ask for %s too", protocol.ResourceCores, protocol.ResourceMemory)
	}
	return cmp.Or(fractionOfKAI(pod), misplacedRequest(pod))
}

// misplacedKey reports labels that must be annotations and annotations that must be labels, apart from those of groups.
func misplacedKey(pod *corev1.Pod) string {
	if _, annotation := pod.Annotations[protocol.LabelRDMA]; annotation && pod.Labels[protocol.LabelRDMA] == "" {
		return fmt.Sprintf("%s is an annotation of the pod, and must be a label of the pod: the pod gets no adapter", protocol.LabelRDMA)
	}
	for _, key := range slices.Sorted(maps.Keys(pod.Labels)) {
		_, isLimit := protocol.LimitedContainer(key)
		if _, annotated := pod.Annotations[key]; isLimit && !annotated {
			return key + " is a label of the pod, and must be an annotation: it limits no container"
		}
	}
	return ""
}

// foreignResources are resources of other systems that share GPUs, by which one asks here. Their schedulers serve them.
var foreignResources = map[string]struct {
	scheduler string
	ours      corev1.ResourceName
}{
	"nvidia.com/gpumem":            {"hami-scheduler", protocol.ResourceMemory},
	"nvidia.com/gpumem-percentage": {"hami-scheduler", protocol.ResourceMemory},
	"nvidia.com/gpucores":          {"hami-scheduler", protocol.ResourceCores},
	"volcano.sh/vgpu-memory":       {"volcano", protocol.ResourceMemory},
	"volcano.sh/vgpu-cores":        {"volcano", protocol.ResourceCores},
	"volcano.sh/gpu-memory":        {"volcano", protocol.ResourceMemory},
	"tencent.com/vcuda-memory":     {"", protocol.ResourceMemory},
	"tencent.com/vcuda-core":       {"", protocol.ResourceCores},
}

// inUnits says what an amount of memory counts, because other systems count MiB or percent.
const inUnits = ", a number of units of GPU memory (GiB, unless the administrator configured another unit)"

// fractionOfKAI reports the annotations by which one asks KAI Scheduler for a part of a card, on a pod of another scheduler.
func fractionOfKAI(pod *corev1.Pod) string {
	for _, key := range []string{"gpu-fraction", "gpu-memory"} {
		if _, has := pod.Annotations[key]; has && pod.Spec.SchedulerName != "kai-scheduler" {
			return fmt.Sprintf("the annotation %s is of KAI Scheduler, and gpushare doesn't read it: ask for %s in resources.limits of a container%s",
				key, protocol.ResourceMemory, inUnits)
		}
	}
	return ""
}

// OffersWholeCards reports whether one of the nodes offers whole cards (nvidia.com/gpu, for example).
func OffersWholeCards(nodes []*corev1.Node) bool {
	return slices.ContainsFunc(nodes, func(node *corev1.Node) bool { return len(protocol.WholeCardResources(node.Status.Capacity)) > 0 })
}

// UnservedRequest returns the request problem of a pending pod that asks for whole cards by a resource of NVIDIA's device plugin, as long as no
// node offers whole cards (protocol.WholeCardResources). It is empty if the pod asks for none, or for GPU memory too.
func UnservedRequest(pod *corev1.Pod) (problem string) {
	if pod.Spec.NodeName != "" || protocol.Terminal(pod) || protocol.PodRequest(pod) > 0 {
		return ""
	}
	var resource corev1.ResourceName
	for i := range pod.Spec.Containers {
		for name := range pod.Spec.Containers[i].Resources.Limits {
			if protocol.IsWholeCard(name) && (resource == "" || name < resource) {
				resource, problem = name, fmt.Sprintf("container %s asks for %s, and no node offers whole cards: for a part of a card that nodes share, ask for %s",
					pod.Spec.Containers[i].Name, name, protocol.ResourceMemory)
			}
		}
	}
	return problem
}

// misspelledResource returns the first resource that looks like one of ours, and is not.
func misspelledResource(pod *corev1.Pod) string {
	for _, containers := range [...][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			var unknown []string
			for _, list := range [...]corev1.ResourceList{containers[i].Resources.Limits, containers[i].Resources.Requests} {
				for name := range list {
					foreign, known := foreignResources[string(name)]
					if _, looks := looksLikeOurs(string(name)); looks || known && pod.Spec.SchedulerName != foreign.scheduler {
						unknown = append(unknown, string(name))
					}
				}
			}
			if len(unknown) > 0 {
				name := slices.Min(unknown)
				text := fmt.Sprintf("container %s asks for %s, which gpushare doesn't know", containers[i].Name, name)
				foreign := foreignResources[name].ours
				nearest, _ := looksLikeOurs(name)
				if meant := cmp.Or(foreign, nearest); meant != "" {
					text += ": write " + string(meant)
				}
				if foreign == protocol.ResourceMemory {
					text += inUnits
				}
				return text
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
	for _, containers := range [...][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			_, limited := containers[i].Resources.Limits[resource]
			if _, requested := containers[i].Resources.Requests[resource]; limited || requested {
				return true
			}
		}
	}
	return false
}

// misplacedRequest reports a resource of ours that is an annotation or a label of a pod that asks for none, and labels that say more about a request.
func misplacedRequest(pod *corev1.Pod) string {
	if _, label := pod.Labels[protocol.LabelCount]; label {
		return fmt.Sprintf("the label %s alone reserves nothing: ask for %s", protocol.LabelCount, protocol.ResourceMemory)
	}
	if _, label := pod.Labels[protocol.LabelRDMA]; label {
		return fmt.Sprintf("the label %s alone gives the pod neither a card nor an adapter: ask for %s", protocol.LabelRDMA, protocol.ResourceMemory)
	}
	for _, name := range ours {
		if kind := kindOf(pod, string(name)); kind != "" {
			return fmt.Sprintf("%s is %s of the pod, where it has no effect: it belongs to resources.limits of a container", name, kind)
		}
	}
	return ""
}

// misplacedCount reports a number of cards that is not a label of a pod that asks for GPU memory.
func misplacedCount(pod *corev1.Pod) string {
	if _, label := pod.Labels[protocol.LabelCount]; label {
		return ""
	}
	kind := ""
	if _, annotation := pod.Annotations[protocol.LabelCount]; annotation {
		kind = "an annotation of the pod"
	}
	for i := range pod.Spec.Containers {
		quantity := pod.Spec.Containers[i].Resources.Limits[protocol.ResourceCount]
		if quantity.CmpInt64(1) > 0 {
			kind = "a resource of container " + pod.Spec.Containers[i].Name
		}
	}
	if kind == "" {
		return ""
	}
	return fmt.Sprintf("%s is %s, and must be a label of the pod: the pod gets one card", protocol.LabelCount, kind)
}

// misplacedGroup reports keys by which the pod should be in a group, but which don't put it into one: annotations that are labels, labels that
// are annotations, and keys that have no effect alone.
func misplacedGroup(pod *corev1.Pod) string {
	if protocol.InGroup(pod) {
		return "" // GroupOf names the key.
	}
	for _, key := range []string{protocol.AnnotationGroupName, protocol.AnnotationGroupSize} {
		if _, label := pod.Labels[key]; label {
			return key + " is a label of the pod, and must be an annotation: the pod is in no group"
		}
	}
	for _, key := range []string{protocol.LabelGroupName, protocol.LabelGroupSize} {
		if _, annotation := pod.Annotations[key]; annotation {
			return key + " is an annotation of the pod, and must be a label: the pod is in no group"
		}
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

// kindOf returns "an annotation" or "a label" if the pod has one with the key, else an empty string.
func kindOf(pod *corev1.Pod, key string) string {
	if _, annotation := pod.Annotations[key]; annotation {
		return "an annotation"
	}
	if _, label := pod.Labels[key]; label {
		return "a label"
	}
	return ""
}

// containerRequest is the request of a container.
type containerRequest struct {
	container string
	amount    gpu.Memory
	// written is the amount as the API server stores it, such as "2Gi".
	written string
	// init is true for an init container that ends before other containers start.
	init bool
}

// amounts returns the requests of the pod's containers in words, if several ask for GPU memory at the same time and the pod
// for their sum, and the largest request of any container.
func amounts(pod *corev1.Pod) (asks string, largest containerRequest) {
	var parts []string
	var sum gpu.Memory
	add := func(container *corev1.Container, runs bool) {
		request := protocol.ContainerRequest(container)
		if request == 0 {
			return
		}
		if request > largest.amount {
			quantity, limited := container.Resources.Limits[protocol.ResourceMemory]
			if !limited {
				quantity = container.Resources.Requests[protocol.ResourceMemory]
			}
			largest = containerRequest{container.Name, request, quantity.String(), !runs}
		}
		if runs {
			parts = append(parts, fmt.Sprintf("%s (%s)", container.Name, request))
			sum = sum.Add(request)
		}
	}
	for i := range pod.Spec.Containers {
		add(&pod.Spec.Containers[i], true)
	}
	for i := range pod.Spec.InitContainers {
		policy := pod.Spec.InitContainers[i].RestartPolicy // Of a sidecar, which keeps running.
		add(&pod.Spec.InitContainers[i], policy != nil && *policy == corev1.ContainerRestartPolicyAlways)
	}
	if n := len(parts); n > 1 && sum == protocol.PodRequest(pod) {
		asks = strings.Join(parts[:n-1], ", ") + " and " + parts[n-1]
		if n > maxNames {
			asks = fmt.Sprint(n)
		}
	}
	return asks, largest
}
