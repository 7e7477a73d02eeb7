package protocol

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	resourcehelper "k8s.io/component-helpers/resource"
)

// MaxSize is how much of the extender's memory the fields of a pod that it reads may take, in bytes.
const MaxSize = 16 << 10

// The memory that an element takes once it is parsed, in bytes, beside its texts.
const (
	sizeOfEntry      = 32 // of a map or list of texts
	sizeOfTerm       = 512
	sizeOfExpression = 128
	sizeOfRule       = 64 // a label of the node selector, a toleration, and the like
	sizeOfPort       = 16
	sizeOfResource   = 512 // What nodes have free is counted for each.
)

// CheckSize returns an error if the fields of the pod that the extender reads take more than MaxSize of memory. The API server accepts
// pods of more than a megabyte. Parsed, their fields take up to 20 times as much, so a few dozen of them would fill the extender's memory.
// Environment, commands and contents of volumes don't count, because the extender doesn't read them.
func CheckSize(pod *corev1.Pod) error {
	parts, total, largest := sizesOf(pod), 0, 0
	for i, part := range parts {
		total += part.size
		if part.size > parts[largest].size {
			largest = i
		}
	}
	if total <= MaxSize {
		return nil
	}
	return fmt.Errorf("the pod is too large for gpushare: of the %d KiB that labels, constraints, resources and ports of a pod can take in the "+
		"extender's memory, its %s alone would take %d KiB: use fewer of them", MaxSize>>10, parts[largest].name, (parts[largest].size+1023)>>10)
}

// part is a part of a pod with the memory that it takes.
type part struct {
	name string
	size int
}

func sizesOf(pod *corev1.Pod) [10]part {
	spec := &pod.Spec
	references, scheduling, containers := 0, len(spec.SchedulerName), 0
	if owner := metav1.GetControllerOfNoCopy(pod); owner != nil {
		references = len(owner.UID)
	}
	for _, gate := range spec.SchedulingGates {
		scheduling += sizeOfEntry + len(gate.Name)
	}
	for _, list := range [...][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range list {
			containers += sizeOfEntry + sizeOfPort*len(list[i].Ports)
		}
	}
	return [...]part{
		{"labels", mapSize(pod.Labels, sizeOfEntry)},
		{"owner references", references},
		{"node selector", mapSize(spec.NodeSelector, sizeOfRule)},
		{"affinity", affinitySize(spec.Affinity)},
		{"tolerations", rulesSize(spec.Tolerations)},
		{"topology spread constraints", rulesSize(spec.TopologySpreadConstraints)},
		{"scheduler name and scheduling gates", scheduling},
		{"resource claims and volumes", rulesSize(spec.ResourceClaims) + sizeOfEntry*len(spec.Volumes)},
		{"containers and their ports", containers},
		{"extended resources", extendedResources(spec)},
	}
}

// rulesSize returns the size of a list of rules.
func rulesSize[T any, P interface {
	*T
	Size() int
}](list []T) (size int) {
	for i := range list {
		size += sizeOfRule + P(&list[i]).Size()
	}
	return size
}

func mapSize(values map[string]string, each int) int {
	size := each * len(values)
	for key, value := range values {
		size += len(key) + len(value)
	}
	return size
}

func affinitySize(affinity *corev1.Affinity) (size int) {
	if affinity == nil {
		return 0
	}
	if affinity.NodeAffinity != nil && affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil {
		terms := affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
		for i := range terms {
			size += sizeOfTerm
			for _, list := range [...][]corev1.NodeSelectorRequirement{terms[i].MatchExpressions, terms[i].MatchFields} {
				for j := range list {
					size += sizeOfExpression + sizeOfEntry*len(list[j].Values)
				}
			}
		}
	}
	return size + affinity.Size()
}

// extendedResources returns the size of the different resources that the pod names, except those that most pods name.
func extendedResources(spec *corev1.PodSpec) (size int) {
	names := map[corev1.ResourceName]bool{}
	add := func(list corev1.ResourceList) {
		for name := range list {
			if size <= MaxSize && !slices.Contains(usualResources, name) && !names[name] {
				names[name] = true
				size += sizeOfResource + len(name)
			}
		}
	}
	add(spec.Overhead)
	if spec.Resources != nil {
		add(spec.Resources.Limits)
		add(spec.Resources.Requests)
	}
	for _, list := range [...][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range list {
			add(list[i].Resources.Limits)
			add(list[i].Resources.Requests)
		}
	}
	return size
}

// usualResources are what is known of a pod of any size.
var usualResources = []corev1.ResourceName{
	ResourceMemory, ResourceCount, ResourceCores, ResourceWholeCard, corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage,
}

// maxOutlined is how many containers an outline can have: as many as a pod can that isn't too large.
const maxOutlined = MaxSize / sizeOfEntry

// Outline returns the pod and no error if CheckSize accepts it. Otherwise it returns the error of CheckSize, and the pod without the parts
// that can be large, except annotations. What counts for cards, groups and the usual resources is left: such a pod can be on a
// node, by its spec or because an earlier version bound it. More than maxOutlined containers become one that requests the same.
func Outline(pod *corev1.Pod) (*corev1.Pod, error) {
	err := CheckSize(pod)
	if err == nil {
		return pod, nil
	}
	out := *pod
	out.Labels, out.OwnerReferences = nil, nil
	for _, key := range append(groupLabels(pod), LabelCount, LabelRDMA) {
		if value, ok := pod.Labels[key]; ok {
			metav1.SetMetaDataLabel(&out.ObjectMeta, key, value)
		}
	}
	spec := &out.Spec
	spec.NodeSelector, spec.Affinity, spec.Tolerations, spec.TopologySpreadConstraints = nil, nil, nil, nil
	spec.ResourceClaims, spec.Volumes = nil, nil
	spec.SchedulerName = Shorten(spec.SchedulerName)
	spec.SchedulingGates = spec.SchedulingGates[:min(len(spec.SchedulingGates), 2)] // No gate of such a pod is removed.
	spec.Overhead = usualOf(spec.Overhead)
	if spec.Resources != nil {
		spec.Resources = &corev1.ResourceRequirements{Limits: usualOf(spec.Resources.Limits), Requests: usualOf(spec.Resources.Requests)}
	}
	if len(spec.InitContainers)+len(spec.Containers) <= maxOutlined {
		spec.InitContainers, spec.Containers = outlines(spec.InitContainers), outlines(spec.Containers)
	} else {
		requests := resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{ExcludeOverhead: true, SkipPodLevelResources: true})
		spec.InitContainers, spec.Containers = nil, []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: usualOf(requests)}}}
	}
	out.Status.InitContainerStatuses, out.Status.ContainerStatuses = nil, nil
	return &out, err
}

// outlines returns the containers with the usual resources alone, and without ports.
func outlines(containers []corev1.Container) []corev1.Container {
	out := slices.Clone(containers)
	for i := range out {
		out[i].Ports = nil
		out[i].Resources.Limits, out[i].Resources.Requests = usualOf(out[i].Resources.Limits), usualOf(out[i].Resources.Requests)
	}
	return out
}

func usualOf(list corev1.ResourceList) corev1.ResourceList {
	var out corev1.ResourceList
	for _, name := range usualResources {
		if quantity, ok := list[name]; ok {
			if out == nil {
				out = corev1.ResourceList{}
			}
			out[name] = quantity
		}
	}
	return out
}
