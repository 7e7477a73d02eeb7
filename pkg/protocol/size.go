package protocol

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
		if total += part.size; part.size > parts[largest].size {
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
	references, scheduling, containers, resources := 0, len(spec.SchedulerName), 0, 0
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
	if containers <= MaxSize {
		resources = extendedResources(spec)
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
		{"extended resources", resources},
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
	if size > MaxSize {
		return size
	}
	for key, value := range values {
		size += len(key) + len(value)
	}
	return size
}

func affinitySize(affinity *corev1.Affinity) int {
	size := affinity.Size()
	if affinity == nil || affinity.NodeAffinity == nil || affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return size
	}
	terms := affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	for i := range terms {
		size += sizeOfTerm
		for _, list := range [...][]corev1.NodeSelectorRequirement{terms[i].MatchExpressions, terms[i].MatchFields} {
			for j := range list {
				size += sizeOfExpression + sizeOfEntry*len(list[j].Values)
			}
		}
	}
	return size
}

// extendedResources returns the size of the different resources that the pod names, except those that most pods name.
func extendedResources(spec *corev1.PodSpec) int {
	names := map[corev1.ResourceName]bool{}
	size := 0
	add := func(list corev1.ResourceList) {
		for name := range list {
			if size > MaxSize {
				return
			}
			if !usual(name) && !names[name] {
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
var usualResources = [...]corev1.ResourceName{
	ResourceMemory, ResourceCount, ResourceCores, ResourceWholeCard, corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage,
}

func usual(name corev1.ResourceName) bool { return slices.Contains(usualResources[:], name) }

// Outline returns the pod and no error if CheckSize accepts it. Otherwise it returns the error of CheckSize, and the pod without the parts
// that can be large, except containers and annotations. What counts for cards, groups and the usual resources is left: such a pod can be on a
// node, by its spec or because an earlier version bound it.
func Outline(pod *corev1.Pod) (*corev1.Pod, error) {
	err := CheckSize(pod)
	if err == nil {
		return pod, nil
	}
	out := *pod
	out.Labels, out.OwnerReferences = nil, nil
	for _, key := range [...]string{LabelCount, LabelGroupName, LabelGroupSize} {
		if value, ok := pod.Labels[key]; ok {
			metav1.SetMetaDataLabel(&out.ObjectMeta, key, value)
		}
	}
	spec := &out.Spec
	spec.NodeSelector, spec.Affinity, spec.Tolerations, spec.TopologySpreadConstraints = nil, nil, nil, nil
	spec.ResourceClaims, spec.Volumes = nil, nil
	spec.SchedulerName = Shorten(spec.SchedulerName)
	spec.SchedulingGates = outlineOfGates(spec.SchedulingGates)
	spec.Overhead = usualOf(spec.Overhead)
	if spec.Resources != nil {
		spec.Resources = &corev1.ResourceRequirements{Limits: usualOf(spec.Resources.Limits), Requests: usualOf(spec.Resources.Requests)}
	}
	spec.InitContainers, spec.Containers = outlineOfContainers(spec.InitContainers), outlineOfContainers(spec.Containers)
	out.Status.InitContainerStatuses, out.Status.ContainerStatuses = nil, nil
	return &out, err
}

// outlineOfGates returns the gate of fair shares and the first of the others.
func outlineOfGates(gates []corev1.PodSchedulingGate) (out []corev1.PodSchedulingGate) {
	ours := func(gate corev1.PodSchedulingGate) bool { return gate.Name == GateFairShare }
	others := func(gate corev1.PodSchedulingGate) bool { return !ours(gate) }
	for _, is := range [...]func(corev1.PodSchedulingGate) bool{ours, others} {
		if i := slices.IndexFunc(gates, is); i >= 0 {
			out = append(out, gates[i])
		}
	}
	return out
}

// outlineOfContainers returns the containers with only the usual resources.
func outlineOfContainers(containers []corev1.Container) []corev1.Container {
	unusual := func(c corev1.Container) bool {
		for _, list := range [...]corev1.ResourceList{c.Resources.Limits, c.Resources.Requests} {
			for name := range list {
				if !usual(name) {
					return true
				}
			}
		}
		return false
	}
	if !slices.ContainsFunc(containers, unusual) {
		return containers // There can be thousands.
	}
	out := slices.Clone(containers)
	for i := range out {
		resources := &out[i].Resources
		resources.Limits, resources.Requests = usualOf(resources.Limits), usualOf(resources.Requests)
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
