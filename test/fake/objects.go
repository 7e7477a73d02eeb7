// Package fake has a fake of the calls of package apiserver, and builds the objects that an API server has.
package fake

import (
	"fmt"
	"maps"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// PodEdit changes a pod that is being built.
type PodEdit func(*corev1.Pod)

// Pod returns a pending pod that asks for GPU memory. Its UID is "uid-" and its name.
func Pod(name string, memory int64, edits ...PodEdit) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name:      "main",
			Resources: corev1.ResourceRequirements{Limits: Amount(protocol.ResourceMemory, memory)},
		}}},
		Status: corev1.PodStatus{Phase: corev1.PodPending},
	}
	return Edited(pod, edits...)
}

// Edited returns a copy of the pod with the edits.
func Edited(pod *corev1.Pod, edits ...PodEdit) *corev1.Pod {
	pod = pod.DeepCopy()
	for _, edit := range edits {
		edit(pod)
	}
	return pod
}

// Cards sets the number of cards over which the pod's request is divided.
func Cards(n int) PodEdit {
	return func(pod *corev1.Pod) { metav1.SetMetaDataLabel(&pod.ObjectMeta, protocol.LabelCount, strconv.Itoa(n)) }
}

// RDMA gives the pod the label that asks for cards near an RDMA adapter.
func RDMA(value string) PodEdit {
	return func(pod *corev1.Pod) { metav1.SetMetaDataLabel(&pod.ObjectMeta, protocol.LabelRDMA, value) }
}

// Cores makes the pod ask for computing, in percent of one card.
func Cores(percent int64) PodEdit {
	return func(pod *corev1.Pod) {
		maps.Copy(pod.Spec.Containers[0].Resources.Limits, Amount(protocol.ResourceCores, percent))
	}
}

// SharedMemory gives the first container a volume of the pod as its shared memory.
func SharedMemory(pod *corev1.Pod) {
	pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: "shm", VolumeSource: corev1.VolumeSource{
		EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory},
	}})
	pod.Spec.Containers[0].VolumeMounts = append(pod.Spec.Containers[0].VolumeMounts, corev1.VolumeMount{Name: "shm", MountPath: protocol.SharedMemory})
}

// Bound binds the pod to the node, with the annotations of these cards.
func Bound(node string, cards ...int) PodEdit {
	return func(pod *corev1.Pod) {
		On(node)(pod)
		assignment := protocol.Assignment{Request: protocol.PodRequest(pod), AssumeTime: time.Unix(1, 0)}
		for _, card := range cards {
			assignment.Cards = append(assignment.Cards, protocol.AssignedCard{Index: card})
		}
		for i := range pod.Spec.Containers {
			assignment.Containers = append(assignment.Containers, protocol.ContainerRequest(&pod.Spec.Containers[i]))
		}
		maps.Copy(annotations(pod), assignment.Annotations())
	}
}

// On binds the pod to the node, without annotations.
func On(node string) PodEdit { return func(pod *corev1.Pod) { pod.Spec.NodeName = node } }

// BoundWithoutExtender binds the pod to the node as a scheduler does that doesn't call the extender.
func BoundWithoutExtender(node string) PodEdit {
	return func(pod *corev1.Pod) {
		On(node)(pod)
		// By this record of the API server, the pod was created without spec.nodeName.
		pod.ManagedFields = []metav1.ManagedFieldsEntry{{FieldsV1: metav1.NewFieldsV1(`{"f:spec":{"f:containers":{}}}`)}}
	}
}

// Nominated sets the pod's nominated node.
func Nominated(node string) PodEdit {
	return func(pod *corev1.Pod) { pod.Status.NominatedNodeName = node }
}

// Priority sets the pod's priority.
func Priority(n int32) PodEdit { return func(pod *corev1.Pod) { pod.Spec.Priority = &n } }

// Phase sets the pod's phase.
func Phase(phase corev1.PodPhase) PodEdit { return func(pod *corev1.Pod) { pod.Status.Phase = phase } }

// Terminating marks the pod as being deleted, with a grace period that ends at the deadline.
func Terminating(deadline time.Time) PodEdit {
	return func(pod *corev1.Pod) {
		// Without a finalizer, the fake client of client-go deletes the pod at once.
		pod.DeletionTimestamp, pod.Finalizers = &metav1.Time{Time: deadline}, []string{"test/kubelet"}
	}
}

// Mirror makes the pod the mirror pod of a static pod.
func Mirror(pod *corev1.Pod) { annotations(pod)[corev1.MirrorPodAnnotationKey] = "hash" }

// Label sets the pod's label app, see Budget.
func Label(app string) PodEdit {
	return func(pod *corev1.Pod) { metav1.SetMetaDataLabel(&pod.ObjectMeta, "app", app) }
}

// Annotation sets an annotation.
func Annotation(key, value string) PodEdit {
	return func(pod *corev1.Pod) { annotations(pod)[key] = value }
}

// CPU sets the CPUs that the pod requests.
func CPU(n int64) PodEdit {
	return func(pod *corev1.Pod) {
		pod.Spec.Containers[0].Resources.Requests = Amount(corev1.ResourceCPU, n)
	}
}

// HostPort adds a host port.
func HostPort(n int32) PodEdit {
	return func(pod *corev1.Pod) {
		pod.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 80}, {HostPort: n}}
	}
}

func annotations(pod *corev1.Pod) map[string]string {
	if pod.Annotations == nil {
		pod.Annotations = map[string]string{}
	}
	return pod.Annotations
}

// Amount returns a list with one resource.
func Amount(name corev1.ResourceName, n int64) corev1.ResourceList {
	return corev1.ResourceList{name: *resource.NewQuantity(n, resource.DecimalSI)}
}

// Node returns a node with cards of the given sizes in MiB, as the device plugin reports it. It allows 8 CPUs and 100 pods.
func Node(name string, cards ...int64) *corev1.Node {
	inventory, sum := protocol.Inventory{Unit: gpu.MiB, Features: []string{protocol.FeatureCards, protocol.FeatureCores, protocol.FeatureLimits, protocol.FeatureRDMA}}, int64(0)
	for i, memory := range cards {
		inventory.Cards = append(inventory.Cards, gpu.Card{Index: i, Memory: gpu.Memory(memory), NUMANode: gpu.NoNUMANode})
		sum += memory
	}
	annotation, err := inventory.Annotation()
	if err != nil {
		panic(fmt.Sprintf("the cards of node %s: %v", name, err))
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: name, Annotations: map[string]string{protocol.AnnotationInventory: annotation},
	}}
	node.Status.Capacity = Amount(protocol.ResourceMemory, sum)
	maps.Copy(node.Status.Capacity, Amount(protocol.ResourceCount, int64(len(cards))))
	maps.Copy(node.Status.Capacity, Amount(protocol.ResourceCores, 100*int64(len(cards))))
	maps.Copy(node.Status.Capacity, Amount(corev1.ResourceCPU, 8))
	maps.Copy(node.Status.Capacity, Amount(corev1.ResourcePods, 100))
	node.Status.Allocatable = node.Status.Capacity.DeepCopy()
	return node
}

// Ledger returns a ledger with the nodes.
func Ledger(nodes ...*corev1.Node) *ledger.Ledger { return LedgerWith(nil, nodes...) }

// LedgerWith returns a ledger with the nodes that knows what they have besides GPU memory.
func LedgerWith(resources ledger.Resources, nodes ...*corev1.Node) *ledger.Ledger {
	l := ledger.NewWithResources(resources, nil)
	for _, object := range nodes {
		node := protocol.ParseNode(object)
		l.SetNode(object.Name, ledger.NodeSpec{Unit: node.Unit, Cards: node.Cards})
	}
	return l
}

// Budget returns a disruption budget for the pods with the label, see Label. It has counted the disrupted pods already.
func Budget(name, app string, allowed int32, disrupted ...string) *policyv1.PodDisruptionBudget {
	budget := &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}},
		Status:     policyv1.PodDisruptionBudgetStatus{DisruptionsAllowed: allowed, DisruptedPods: map[string]metav1.Time{}},
	}
	for _, pod := range disrupted {
		budget.Status.DisruptedPods[pod] = metav1.Now()
	}
	return budget
}

// OntoNode gives the pod a selector for the node, which has its name as the label "name".
func OntoNode(name string) func(*corev1.Pod) {
	return func(pod *corev1.Pod) { pod.Spec.NodeSelector = map[string]string{"name": name} }
}

// RequiredAffinity gives the pod a required node affinity.
func RequiredAffinity(terms ...corev1.NodeSelectorTerm) func(*corev1.Pod) {
	return func(pod *corev1.Pod) {
		pod.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: terms},
		}}
	}
}

// NodeNamed is the term for the node of that name, as the controller of DaemonSets sets it.
func NodeNamed(node string) corev1.NodeSelectorTerm {
	return corev1.NodeSelectorTerm{MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{node}}}}
}
