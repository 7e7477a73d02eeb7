package protocol

import (
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// The annotations and labels that make a pod a member of a gang. Either pair is enough; if a pod has both, they must
// agree. The gang's name is unique within a namespace, and must be a valid label value in both pairs.
const (
	// AnnotationGroupName and AnnotationGroupSize are the gang's name and its number of pods.
	AnnotationGroupName = "scheduling.k8s.io/group-name"
	AnnotationGroupSize = "scheduling.k8s.io/group-pod-num"
	// LabelGroupName and LabelGroupSize are the gang's name and its minimum number of pods.
	LabelGroupName = "pod-group.scheduling.sigs.k8s.io/name"
	LabelGroupSize = "pod-group.scheduling.sigs.k8s.io/min-available"
	// AnnotationGroupLabel is the key of a label of the pod. A slash and the value of this label complete the name of the pod's gang, so that
	// pods of one template can be in different gangs.
	AnnotationGroupLabel = "gpushare.aliyun.com/group-name-label"
)

// schedulerPlugins are the labels by which scheduler-plugins and the schedulers that follow it assign pods to a PodGroup of their own
// (kubernetes-sigs/scheduler-plugins apis/scheduling/v1alpha1/types.go, and its versions before v0.24). The extender doesn't read such a
// PodGroup. Its name is the gang's if the pod says the gang's size and no other name.
var schedulerPlugins = [...]string{"scheduling.x-k8s.io/pod-group", "pod-group.scheduling.sigs.k8s.io"}

// What a LeaderWorkerSet adds to its pods (sigs.k8s.io/lws api/leaderworkerset/v1/leaderworkerset_types.go): the replica, which is the same
// after the replica was created again, and how many pods the replica has.
const (
	labelReplicaKey       = "leaderworkerset.sigs.k8s.io/group-key"
	annotationReplicaSize = "leaderworkerset.sigs.k8s.io/size"
)

// labelJobSet is the label of a JobSet's pods that names the JobSet (sigs.k8s.io/jobset api/jobset/v1alpha2/jobset_types.go).
const labelJobSet = "jobset.sigs.k8s.io/jobset-name"

// JobSetOf returns the name of the JobSet that the pod is of; empty if it is of none.
func JobSetOf(pod *corev1.Pod) string { return pod.Labels[labelJobSet] }

// The errors of a pod with an invalid group. GroupOf adds the key and its value. The texts are shown to users.
var (
	ErrGroupUnnamed = errors.New("the pod has a group size and no group name")
	ErrGroupUnsized = errors.New("the pod has a group name and no group size")
	ErrGroupName    = errors.New("the group's name is not a valid label value: up to 63 letters, digits, '-', '_' and '.', " +
		"with a letter or digit at both ends")
	ErrGroupSize          = errors.New("the group's size is not a positive integer up to 100000")
	ErrGroupContradictory = errors.New("the pod's annotations and labels disagree on its group")
	ErrGroupLabel         = errors.New("the pod lacks the label that completes the name of its group")
)

// maxGroup is the largest accepted group size. It keeps sums over a gang far from overflow.
const maxGroup = 100_000

// Group is the group that a pod's annotations or labels name.
type Group struct {
	// Name contains a slash if the value of a label completes it.
	Name string
	// Size is the number of members that must be bound together.
	Size int
	// LeaderWorkerSet is true if the pod is of a LeaderWorkerSet.
	LeaderWorkerSet bool
}

// InGroup reports whether the pod has any of the group annotations or labels, valid or not.
func InGroup(pod *corev1.Pod) bool {
	return hasAny(pod.Annotations, AnnotationGroupName, AnnotationGroupSize) || hasAny(pod.Labels, LabelGroupName, LabelGroupSize)
}

func hasAny(from map[string]string, a, b string) bool {
	_, hasA := from[a]
	_, hasB := from[b]
	return hasA || hasB
}

// GroupOf returns the group of a pod for which InGroup is true. On an error it still returns the name if that is known, so
// that the pod counts as a member that can't be placed.
func GroupOf(pod *corev1.Pod) (Group, error) {
	group, err := namedGroup(pod)
	if group.Name == "" || errors.Is(err, ErrGroupName) {
		return group, err
	}
	label, named := pod.Annotations[AnnotationGroupLabel]
	group.LeaderWorkerSet = pod.Labels[labelReplicaKey] != ""
	switch {
	case !named && group.LeaderWorkerSet && !severalReplicas(pod, group.Size):
		label = labelReplicaKey
	case !named:
		return group, err
	case pod.Labels[label] == "":
		return Group{Name: group.Name}, cmp.Or(err, fmt.Errorf("%w: annotation %s is %.70q", ErrGroupLabel, AnnotationGroupLabel, label))
	}
	group.Name += "/" + pod.Labels[label]
	return group, err
}

// severalReplicas reports whether a group with this number of members consists of several replicas of the pod's LeaderWorkerSet: one replica
// has fewer pods.
func severalReplicas(pod *corev1.Pod, members int) bool {
	size, err := strconv.Atoi(pod.Annotations[annotationReplicaSize])
	return err == nil && members > size
}

// namedGroup returns the group with the name that the pod's template gives it.
func namedGroup(pod *corev1.Pod) (Group, error) {
	annotations := groupKeys{"annotation", AnnotationGroupName, AnnotationGroupSize, pod.Annotations, pod.Labels, ""}
	labels := groupKeys{"label", LabelGroupName, LabelGroupSize, pod.Labels, pod.Annotations, ""}
	if _, named := pod.Annotations[AnnotationGroupName]; !named && pod.Labels[LabelGroupName] == "" {
		name := pod.Labels[PodGroupLabel(pod)]
		annotations.otherName, labels.otherName = name, name
	}
	a, errA := annotations.parse()
	b, errB := labels.parse()
	group := Group{Name: cmp.Or(a.Name, b.Name)}
	podGroup := otherPodGroup(pod, group.Name)
	switch {
	case errA != nil || errB != nil:
		return group, cmp.Or(errA, errB)
	case annotations.given() && labels.given() && a != b:
		return group, fmt.Errorf("%w: annotations say %q of %d, labels say %q of %d", ErrGroupContradictory, a.Name, a.Size, b.Name, b.Size)
	case podGroup != "" && group.Name != "":
		return group, fmt.Errorf("%w: the group is %q, and label %s is %.70q", ErrGroupContradictory, group.Name, podGroup, pod.Labels[podGroup])
	case annotations.given():
		return a, nil
	}
	return b, nil
}

// PodGroupLabel returns the key of the label that assigns the pod to a PodGroup of scheduler-plugins; empty if there is none.
func PodGroupLabel(pod *corev1.Pod) string {
	for _, key := range schedulerPlugins {
		if pod.Labels[key] != "" {
			return key
		}
	}
	return ""
}

// otherPodGroup returns the key of a label that assigns the pod to a PodGroup of scheduler-plugins of another name; empty if there is none.
func otherPodGroup(pod *corev1.Pod, name string) string {
	for _, key := range schedulerPlugins {
		if pod.Labels[key] != "" && pod.Labels[key] != name {
			return key
		}
	}
	return ""
}

// groupLabels returns the keys of the pod's labels that GroupOf and JobSetOf read.
func groupLabels(pod *corev1.Pod) []string {
	return append([]string{LabelGroupName, LabelGroupSize, labelReplicaKey, labelJobSet, pod.Annotations[AnnotationGroupLabel]}, schedulerPlugins[:]...)
}

// PodGroupName returns the name of the PodGroup to which spec.schedulingGroup assigns the pod: its native group. It is empty if
// there is none.
func PodGroupName(pod *corev1.Pod) string {
	if pod.Spec.SchedulingGroup == nil || pod.Spec.SchedulingGroup.PodGroupName == nil {
		return ""
	}
	return *pod.Spec.SchedulingGroup.PodGroupName
}

// The errors of a PodGroup whose pods can't be placed. The texts are shown to users.
var (
	ErrPodGroupPolicy    = errors.New("its policy is neither gang nor basic")
	ErrPodGroupMinCount  = errors.New("its minCount is not a positive integer up to 100000")
	ErrPodGroupComposite = errors.New("it is part of a CompositePodGroup, which gpushare doesn't support")
	ErrPodGroupTopology  = errors.New("it has topology constraints, which gpushare doesn't support")
)

// ParsePodGroup returns how many pods of the PodGroup must be bound together. alone is true if they are placed like pods without a
// group.
func ParsePodGroup(group *schedulingv1beta1.PodGroup) (size int, alone bool, err error) {
	spec := &group.Spec
	switch gang := spec.SchedulingPolicy.Gang; {
	case spec.ParentCompositePodGroupName != nil:
		return 0, false, ErrPodGroupComposite
	case spec.SchedulingConstraints != nil && len(spec.SchedulingConstraints.Topology) > 0:
		return 0, false, ErrPodGroupTopology
	case spec.SchedulingPolicy.Basic != nil:
		return 0, true, nil
	case gang == nil:
		return 0, false, ErrPodGroupPolicy
	case gang.MinCount < 1 || gang.MinCount > maxGroup:
		return 0, false, ErrPodGroupMinCount
	default:
		return int(gang.MinCount), false, nil
	}
}

// DisruptedTogether reports whether the pods of the PodGroup may only be disrupted together (spec.disruptionMode).
func DisruptedTogether(group *schedulingv1beta1.PodGroup) bool {
	return group.Spec.DisruptionMode != nil && group.Spec.DisruptionMode.All != nil
}

// groupKeys is one of the two pairs of keys that name a group, with the map in which it counts.
type groupKeys struct {
	kind       string
	name, size string
	from       map[string]string
	// elsewhere is the map in which the pair doesn't count.
	elsewhere map[string]string
	// otherName is the group's name if the pair has only a size; empty if nothing else names the group.
	otherName string
}

// given reports whether the pod has a key of the pair.
func (k groupKeys) given() bool { return hasAny(k.from, k.name, k.size) }

// parse returns no group and no error if the pod has neither key.
func (k groupKeys) parse() (Group, error) {
	name, size := cmp.Or(k.from[k.name], k.otherName), k.from[k.size]
	switch _, sized := k.from[k.size]; {
	case !k.given():
		return Group{}, nil
	case name == "":
		return Group{}, fmt.Errorf("%w: %s", ErrGroupUnnamed, k.missing(k.name))
	case len(name) > validation.LabelValueMaxLength || len(validation.IsValidLabelValue(name)) > 0: // The latter matches a text of any length.
		return Group{Name: Shorten(name)}, fmt.Errorf("%w: %s %s is %.70q", ErrGroupName, k.kind, k.name, name)
	case !sized:
		return Group{Name: name}, fmt.Errorf("%w: %s", ErrGroupUnsized, k.missing(k.size))
	}
	n, err := strconv.Atoi(size)
	if err != nil || n < 1 || n > maxGroup {
		return Group{Name: name}, fmt.Errorf("%w: %s %s is %.32q", ErrGroupSize, k.kind, k.size, size)
	}
	return Group{Name: name, Size: n}, nil
}

// missing describes a missing key.
func (k groupKeys) missing(key string) string {
	if _, misplaced := k.elsewhere[key]; misplaced {
		return fmt.Sprintf("%s must be %s %s of the pod", key, map[string]string{"annotation": "an", "label": "a"}[k.kind], k.kind)
	}
	return fmt.Sprintf("%s %s is missing", k.kind, key)
}

// TemplateHash returns a hash over the fields of the spec that determine a pod's candidate nodes. kube-scheduler offers
// pods with equal hashes the same nodes. Names, environment and commands are not part of it.
func TemplateHash(pod *corev1.Pod) string { return hashOf(pod, claims(pod)) }

// ShapeHash is TemplateHash without the names of the pod's volumes, in which the pods of a StatefulSet differ.
func ShapeHash(pod *corev1.Pod) string { return hashOf(pod, nil) }

// claims returns the names of the claims of the pod's volumes.
func claims(pod *corev1.Pod) (names []string) {
	for i := range pod.Spec.Volumes {
		if claim := pod.Spec.Volumes[i].PersistentVolumeClaim; claim != nil {
			names = append(names, claim.ClaimName)
		} else if pod.Spec.Volumes[i].Ephemeral != nil {
			names = append(names, pod.Name+"-"+pod.Spec.Volumes[i].Name)
		}
	}
	return names
}

func hashOf(pod *corev1.Pod, claims []string) string {
	spec := &pod.Spec
	shape := corev1.PodSpec{
		NodeSelector: spec.NodeSelector, Affinity: spec.Affinity, Tolerations: spec.Tolerations,
		TopologySpreadConstraints: spec.TopologySpreadConstraints, SchedulerName: spec.SchedulerName, Priority: spec.Priority,
		Overhead: spec.Overhead, HostNetwork: spec.HostNetwork, ResourceClaims: spec.ResourceClaims, Resources: spec.Resources,
		InitContainers: shapes(spec.InitContainers), Containers: shapes(spec.Containers),
	}
	for _, claim := range claims {
		shape.Volumes = append(shape.Volumes, corev1.Volume{Name: claim})
	}
	text, err := shape.Marshal()
	if err != nil {
		text = []byte(pod.UID) // Unreachable; the pod would be treated as the only one of its template.
	}
	sum := fnv.New128a()
	_, _ = sum.Write(text) // hash.Hash.Write never returns an error.
	return fmt.Sprintf("%x", sum.Sum(nil))
}

// shapes returns what of the containers matters to kube-scheduler.
func shapes(containers []corev1.Container) []corev1.Container {
	out := make([]corev1.Container, len(containers))
	for i, c := range containers {
		out[i] = corev1.Container{RestartPolicy: c.RestartPolicy, Resources: c.Resources, Ports: c.Ports}
	}
	return out
}
