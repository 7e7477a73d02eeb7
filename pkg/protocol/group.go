package protocol

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// The annotations and labels that make a pod a member of a group: all of its pods run, or none. Either pair will do; a pod
// that carries both must say the same in both. A group's name counts within its namespace, and is a valid label value in
// either.
const (
	// AnnotationGroupName and AnnotationGroupSize name the group, and say how many pods it has.
	AnnotationGroupName = "scheduling.k8s.io/group-name"
	AnnotationGroupSize = "scheduling.k8s.io/group-pod-num"
	// LabelGroupName and LabelGroupSize name the group, and say how many pods it takes at least.
	LabelGroupName = "pod-group.scheduling.sigs.k8s.io/name"
	LabelGroupSize = "pod-group.scheduling.sigs.k8s.io/min-available"
)

// The errors of a pod whose group can't be told. They are shown to users, so they are few and constant.
var (
	ErrGroupUnnamed       = errors.New("the pod gives a group's size and no name")
	ErrGroupUnsized       = errors.New("the pod names a group and gives no size")
	ErrGroupName          = errors.New("the group's name is not a valid label value: up to 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends")
	ErrGroupSize          = errors.New("the group's size is not a whole number from 1 on")
	ErrGroupContradictory = errors.New("the pod's annotations and labels disagree on its group")
)

// maxGroup bounds a group's size: nobody runs more, and sums stay within their bits.
const maxGroup = 100_000

// Group is which group a pod says that it belongs to.
type Group struct {
	Name string
	// Size is how many members must be placed together.
	Size int
}

// InGroup says whether the pod carries anything that speaks of a group.
func InGroup(pod *corev1.Pod) bool {
	for _, key := range groupAnnotations {
		if _, ok := pod.Annotations[key]; ok {
			return true
		}
	}
	for _, key := range groupLabels {
		if _, ok := pod.Labels[key]; ok {
			return true
		}
	}
	return false
}

var (
	groupAnnotations = [...]string{AnnotationGroupName, AnnotationGroupSize}
	groupLabels      = [...]string{LabelGroupName, LabelGroupSize}
)

// GroupOf returns the group of a pod of which InGroup holds. With an error it returns as much as can be told: whose name is
// known is counted as a member that can't be placed.
func GroupOf(pod *corev1.Pod) (Group, error) {
	a, errA := parseGroup(pod.Annotations, AnnotationGroupName, AnnotationGroupSize)
	b, errB := parseGroup(pod.Labels, LabelGroupName, LabelGroupSize)
	switch {
	case b == nil && errB == nil:
		return orNone(a), errA
	case a == nil && errA == nil:
		return orNone(b), errB
	case errA != nil || errB != nil:
		return Group{Name: cmp.Or(orNone(a).Name, orNone(b).Name)}, cmp.Or(errA, errB)
	case *a != *b:
		return Group{Name: a.Name}, ErrGroupContradictory
	}
	return *a, nil
}

func orNone(g *Group) Group {
	if g == nil {
		return Group{}
	}
	return *g
}

// parseGroup reads one pair; nil where it isn't there at all.
func parseGroup(from map[string]string, nameKey, sizeKey string) (*Group, error) {
	name, named := from[nameKey]
	size, sized := from[sizeKey]
	switch {
	case !named && !sized:
		return nil, nil
	case name == "":
		return nil, ErrGroupUnnamed
	case len(validation.IsValidLabelValue(name)) > 0:
		return &Group{Name: name}, ErrGroupName
	case !sized:
		return &Group{Name: name}, ErrGroupUnsized
	}
	n, err := strconv.Atoi(size)
	if err != nil || n < 1 || n > maxGroup {
		return &Group{Name: name}, ErrGroupSize
	}
	return &Group{Name: name, Size: n}, nil
}

// WholeCards returns how many whole cards the pod asks for (ResourceWholeCard).
func WholeCards(pod *corev1.Pod) int64 {
	var sum int64
	for i := range pod.Spec.Containers {
		resources := &pod.Spec.Containers[i].Resources
		quantity, ok := resources.Limits[ResourceWholeCard]
		if !ok {
			quantity = resources.Requests[ResourceWholeCard]
		}
		sum += int64(memoryOf(corev1.ResourceList{ResourceWholeCard: quantity}, ResourceWholeCard))
	}
	return sum
}

// Template tells pods apart that kube-scheduler may offer different nodes: pods of one template have the same. It looks at
// those fields of the spec that decide where a pod may go, not at names, environment or commands.
func Template(pod *corev1.Pod) string {
	spec := &pod.Spec
	shape := struct {
		Selector    map[string]string
		Affinity    *corev1.Affinity
		Tolerations []corev1.Toleration
		Spread      []corev1.TopologySpreadConstraint
		Scheduler   string
		Priority    *int32
		Overhead    corev1.ResourceList
		HostNetwork bool
		Resources   *corev1.ResourceRequirements
		Containers  []step
		Ports       []corev1.ContainerPort
		Claims      []string
		Devices     []corev1.PodResourceClaim
	}{
		Selector: spec.NodeSelector, Affinity: spec.Affinity, Tolerations: spec.Tolerations,
		Spread: spec.TopologySpreadConstraints, Scheduler: spec.SchedulerName, Priority: spec.Priority,
		Overhead: spec.Overhead, HostNetwork: spec.HostNetwork, Devices: spec.ResourceClaims, Resources: spec.Resources,
	}
	for when, containers := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range containers {
			shape.Containers = append(shape.Containers, step{when, containers[i].RestartPolicy, containers[i].Resources})
			shape.Ports = append(shape.Ports, containers[i].Ports...)
		}
	}
	for i := range spec.Volumes {
		if claim := spec.Volumes[i].PersistentVolumeClaim; claim != nil {
			shape.Claims = append(shape.Claims, claim.ClaimName)
		} else if spec.Volumes[i].Ephemeral != nil {
			shape.Claims = append(shape.Claims, pod.Name+"-"+spec.Volumes[i].Name)
		}
	}
	text, err := json.Marshal(shape)
	if err != nil {
		text = []byte(pod.UID) // Can't be, and at worst such a pod waits for its own turn.
	}
	sum := fnv.New128a()
	_, _ = sum.Write(text) // A hash never fails.
	return fmt.Sprintf("%x", sum.Sum(nil))
}

// step is what a container asks for, and when: those that run at the same time need more than those that follow each other.
type step struct {
	When    int
	Restart *corev1.ContainerRestartPolicy
	Asks    corev1.ResourceRequirements
}

// AsksCards says whether the pod asks for GPU memory or whole cards.
func AsksCards(pod *corev1.Pod) bool { return PodRequest(pod) > 0 || WholeCards(pod) > 0 }
