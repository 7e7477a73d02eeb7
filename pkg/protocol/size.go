package protocol

import (
	"fmt"
	"iter"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
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
	if size > MaxSize {
		return size
	}
	return size + affinity.Size()
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
	for _, key := range append(groupLabels(pod), LabelCount, LabelRDMA) {
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
	outlineOfContainers(spec)
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

// maxOutlined is how many containers with GPU memory an outline keeps apart. No card takes as many (isolation.Backend, MaxContainers).
const maxOutlined = 64

// outlineOfContainers sets the containers of an outline: with only the usual resources and, since there can be thousands, merged if they are many.
// Together they request the same as before.
func outlineOfContainers(spec *corev1.PodSpec) {
	var steps, sidecars, running mergedContainers
	var beside corev1.ResourceList
	for i := range spec.InitContainers {
		container := &spec.InitContainers[i]
		if isSidecar(container) {
			sidecars.add(container)
			beside = addRequests(beside, container)
		} else {
			steps.addStep(container, beside)
		}
	}
	for i := range spec.Containers {
		running.add(&spec.Containers[i])
	}
	spec.InitContainers, spec.Containers = append(steps.list(), sidecars.list()...), running.list()
}

// mergedContainers are containers of one kind. The first with GPU memory that run at the same time are kept apart, the others are merged.
type mergedContainers struct {
	apart []corev1.Container
	rest  corev1.Container
}

func (m *mergedContainers) add(container *corev1.Container) {
	if len(m.apart) < maxOutlined && requestOf(container, ResourceMemory) > 0 {
		outline := *container
		outline.Resources.Limits, outline.Resources.Requests = usualOf(outline.Resources.Limits), usualOf(outline.Resources.Requests)
		m.apart = append(m.apart, outline)
		return
	}
	m.rest.RestartPolicy = container.RestartPolicy
	m.rest.Resources.Requests = addRequests(m.rest.Resources.Requests, container)
	m.keepMounts(container)
}

// addStep adds a step of initialization, beside which sidecars run with these requests. The merged step runs before all sidecars.
func (m *mergedContainers) addStep(container *corev1.Container, beside corev1.ResourceList) {
	largest := &m.rest.Resources.Requests
	for name, quantity := range usualRequests(container) {
		total := beside[name].DeepCopy()
		total.Add(quantity)
		if *largest == nil || total.Cmp((*largest)[name]) >= 0 {
			*largest = set(*largest, name, total)
		}
	}
	m.keepMounts(container)
}

// keepMounts keeps what Pod reads of the container's volumes.
func (m *mergedContainers) keepMounts(container *corev1.Container) {
	if MountsSharedMemory(container) && requestOf(container, ResourceMemory) > 0 {
		m.rest.VolumeMounts = container.VolumeMounts
	}
}

func (m *mergedContainers) list() []corev1.Container {
	if m.rest.Resources.Requests == nil {
		return m.apart
	}
	return append(m.apart, m.rest)
}

// addRequests adds what the container requests of the usual resources to the sum, which can be nil.
func addRequests(sum corev1.ResourceList, container *corev1.Container) corev1.ResourceList {
	for name, quantity := range usualRequests(container) {
		total := sum[name]
		total.Add(quantity)
		sum = set(sum, name, total)
	}
	return sum
}

// usualRequests are the container's requests of the usual resources. By the API server's defaults, a limit without a request is one.
func usualRequests(container *corev1.Container) iter.Seq2[corev1.ResourceName, resource.Quantity] {
	limits, requests := container.Resources.Limits, container.Resources.Requests
	return func(yield func(corev1.ResourceName, resource.Quantity) bool) {
		for name, quantity := range requests {
			if usual(name) && !yield(name, quantity) {
				return
			}
		}
		for name, quantity := range limits {
			if _, requested := requests[name]; !requested && usual(name) && !yield(name, quantity) {
				return
			}
		}
	}
}

// set sets an amount in the list, which can be nil.
func set(list corev1.ResourceList, name corev1.ResourceName, quantity resource.Quantity) corev1.ResourceList {
	if list == nil {
		list = corev1.ResourceList{}
	}
	list[name] = quantity
	return list
}

func usualOf(list corev1.ResourceList) corev1.ResourceList {
	var out corev1.ResourceList
	for _, name := range usualResources {
		if quantity, ok := list[name]; ok {
			out = set(out, name, quantity)
		}
	}
	return out
}
