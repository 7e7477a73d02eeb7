package simkubelet

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	resourcehelper "k8s.io/component-helpers/resource"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"
)

// rejection is why the kubelet doesn't take a pod.
type rejection struct {
	reason, message string
}

// reasonUnexpected is the reason where the devices couldn't be had.
const reasonUnexpected = "UnexpectedAdmissionError"

// admit gives the pod its devices and then looks whether it fits the node, in the kubelet's order (kubelet.go,
// NewMainKubelet; cm/topologymanager/scope.go, admitPolicyNone). A pod that is rejected by the second step has had its
// Allocate already. The result is nil for a pod that is taken.
func (p *process) admit(ctx context.Context, pod *corev1.Pod) *rejection {
	if reason := pod.Annotations[AnnotationRejected]; reason != "" {
		return &rejection{reason, "the pod's annotation says so"}
	}
	for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			if err := p.devices.allocate(ctx, pod, &containers[i]); err != nil {
				return &rejection{reasonUnexpected, fmt.Sprintf("Allocate failed due to %v, which is unexpected", err)}
			}
		}
	}
	return p.fits(ctx, pod)
}

// fits is the kubelet's own check of node resources, affinity and taints (lifecycle/predicate.go).
func (p *process) fits(ctx context.Context, pod *corev1.Pod) *rejection {
	node := p.node.last()
	allocatable := node.Status.Allocatable
	if p.devices.books.hasPod(pod.UID) {
		p.devices.raise(allocatable)
	}
	used, others := corev1.ResourceList{}, 0
	for _, other := range p.activePods() {
		if other.UID == pod.UID {
			continue
		}
		others++
		for name, quantity := range requests(other) {
			sum := used[name]
			sum.Add(quantity)
			used[name] = sum
		}
	}
	if capacity := allocatable[corev1.ResourcePods]; int64(others)+1 > capacity.Value() {
		return insufficient(corev1.ResourcePods, 1, int64(others), capacity.Value())
	}
	asked := requests(pod)
	names := []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory}
	for name := range asked {
		// An extended resource that the node doesn't know is one of the cluster's, and isn't checked here.
		if _, known := allocatable[name]; known && extendedResource(name) {
			names = append(names, name)
		}
	}
	for _, name := range names {
		value := (*resource.Quantity).Value
		if name == corev1.ResourceCPU {
			value = (*resource.Quantity).MilliValue
		}
		want, taken, total := asked[name], used[name], allocatable[name]
		if w, u, t := value(&want), value(&taken), value(&total); w > 0 && w > t-u {
			return insufficient(name, w, u, t)
		}
	}

	if matches, err := nodeaffinity.GetRequiredNodeAffinity(pod).Match(node); err != nil || !matches {
		return predicate("NodeAffinity", "node(s) didn't match Pod's node affinity/selector")
	}
	_, untolerated := corev1helpers.FindMatchingUntoleratedTaint(klog.FromContext(ctx), node.Spec.Taints, pod.Spec.Tolerations,
		func(t *corev1.Taint) bool { return t.Effect == corev1.TaintEffectNoExecute }, true)
	if untolerated {
		return predicate("TaintToleration", "node(s) had taints that the pod didn't tolerate")
	}
	return nil
}

func insufficient(name corev1.ResourceName, requested, used, capacity int64) *rejection {
	return &rejection{"OutOf" + string(name), fmt.Sprintf("Node didn't have enough resource: %s, requested: %d, used: %d, capacity: %d",
		name, requested, used, capacity)}
}

func predicate(name, description string) *rejection {
	return &rejection{name, fmt.Sprintf("Predicate %s failed: %s", name, description)}
}

func requests(pod *corev1.Pod) corev1.ResourceList {
	return resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{})
}

// inOrder sorts a batch for admission: by creation time, which the API server keeps in whole seconds. Within a second
// the order is arbitrary, as the kubelet's is, or given by the seed.
func (p *process) inOrder(batch []*corev1.Pod) []*corev1.Pod {
	batch = slices.Clone(batch)
	if p.rand != nil {
		slices.SortFunc(batch, func(a, b *corev1.Pod) int { return strings.Compare(string(a.UID), string(b.UID)) })
		p.rand.Shuffle(len(batch), func(i, j int) { batch[i], batch[j] = batch[j], batch[i] })
	}
	slices.SortStableFunc(batch, func(a, b *corev1.Pod) int { return a.CreationTimestamp.Compare(b.CreationTimestamp.Time) })
	return batch
}
