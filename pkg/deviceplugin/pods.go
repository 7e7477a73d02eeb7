package deviceplugin

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// podInfo is what the informer keeps of a pod.
type podInfo struct {
	// ObjectMeta has only what identifies the object and its version.
	metav1.ObjectMeta
	// pod is what decisions read. Its request is zero for a pod that asks for no GPU memory.
	pod allocation.Pod
	// instances are the IDs of the running containers, by container name; nil if none runs.
	instances map[string]string
	// unresolved is the kubelet's message about a container that doesn't start because the runtime doesn't find its CDI device; empty if
	// there is none.
	unresolved string
}

// unresolvable is part of the error of a container runtime that finds no CDI device of a name (tags.cncf.io/container-device-interface
// pkg/cdi/cache.go, InjectDevices). NVIDIA's runtime in CDI mode uses the same package.
const unresolvable = "unresolvable CDI devices"

func transformPod(object any) (any, error) {
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return object, nil
	}
	info := &podInfo{pod: readPod(pod)}
	info.Name, info.Namespace, info.UID, info.ResourceVersion = pod.Name, pod.Namespace, pod.UID, pod.ResourceVersion
	for _, status := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		if waiting := status.State.Waiting; waiting != nil && info.pod.Request > 0 && strings.Contains(waiting.Message, unresolvable) {
			info.unresolved = "container " + status.Name + ": " + waiting.Message
		}
		if status.State.Running == nil {
			continue
		}
		if info.instances == nil {
			info.instances = map[string]string{}
		}
		info.instances[status.Name] = status.ContainerID
	}
	return info, nil
}

func readPod(object *corev1.Pod) allocation.Pod {
	pod := allocation.Pod{
		Pod: protocol.Pod(object), Created: object.CreationTimestamp.Time, Ended: protocol.Terminal(object), Mirror: protocol.IsMirror(object),
	}
	if pod.Leaving {
		pod.LeavesBy = protocol.LeavesBy(object.DeletionTimestamp.Time, ptr.Deref(object.DeletionGracePeriodSeconds, 0))
	}
	pod.Version, _ = strconv.ParseUint(object.ResourceVersion, 10, 64) // Zero if it isn't a number; it then shows no order.
	running, mainRuns := map[string]bool{}, false
	for _, s := range slices.Concat(object.Status.InitContainerStatuses, object.Status.ContainerStatuses) {
		running[s.Name] = s.State.Running != nil
		pod.Ran = pod.Ran || s.ContainerID != ""
	}
	for i := range object.Spec.Containers {
		mainRuns = mainRuns || running[object.Spec.Containers[i].Name]
	}
	limits, _ := protocol.MemoryLimits(object) // Invalid ones count as none. The extender rejects them.
	add := func(c *corev1.Container, init bool) {
		if request := protocol.ContainerRequest(c); request > 0 {
			pod.Containers = append(pod.Containers, allocation.Container{
				Name: c.Name, Request: request, Cores: protocol.ContainerCores(c), Init: init, Running: running[c.Name] || init && mainRuns,
				SharedMemory: protocol.MountsSharedMemory(c), Limit: limits[c.Name].Bytes,
			})
		}
	}
	for i := range object.Spec.InitContainers {
		c := &object.Spec.InitContainers[i]
		add(c, c.RestartPolicy == nil || *c.RestartPolicy != corev1.ContainerRestartPolicyAlways)
	}
	for i := range object.Spec.Containers {
		add(&object.Spec.Containers[i], false)
	}
	for i := range object.Spec.Containers {
		pod.AppRequests = append(pod.AppRequests, protocol.ContainerRequest(&object.Spec.Containers[i]))
	}
	pod.Invalid = protocol.CheckRequest(object)
	readAnnotations(&pod, object)
	return pod
}

// readAnnotations reads the pod's annotations. An assignment that can't be read, or over whose cards the pod's request can't be
// divided evenly, counts as none: the plugin selects cards for the pod and reports them on the pod.
func readAnnotations(pod *allocation.Pod, object *corev1.Pod) {
	if placement, err := protocol.PodPlacement(object); err == nil {
		pod.Placement = placement
	}
	if assignment, err := protocol.ParseAssignment(object.Annotations); err == nil {
		assignment.Cards = assignment.Sorted()
		n := len(assignment.Cards)
		if n == 1 || pod.Even(n) && pod.Placement.Equal(pod.DemandOver(n).On(assignment.Indexes()...)) {
			pod.Assumed, pod.Assignment, pod.Cards = true, assignment, n
		}
	}
	pod.Assigned = object.Annotations[protocol.AnnotationAssigned] == "true"
	pod.Isolation = object.Annotations[protocol.AnnotationIsolation]
	pod.Overuse = object.Annotations[protocol.AnnotationOveruse]
	pod.LostCards = object.Annotations[protocol.AnnotationLostCards]
	_, pod.HasAssumeTime = object.Annotations[protocol.AnnotationAssumeTime]
}

// podReference returns the object to which the pod's Events are attached.
func podReference(p *allocation.Pod) *corev1.ObjectReference {
	return &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: types.UID(p.UID)}
}

// podSource provides this node's pods: from an informer, and from the API server itself if the informer isn't enough.
type podSource struct {
	client   Client
	node     string
	informer cache.SharedIndexInformer
}

const (
	uidIndex = "uid"
	// readTimeout bounds the live lists for one allocation, for which the kubelet waits.
	readTimeout = 2 * time.Second
	// listRetry is the pause after a list that failed at once, for example on a broken connection.
	listRetry = 200 * time.Millisecond
)

func newPodSource(client Client, node string) (*podSource, error) {
	informer, err := newInformer(client.Pods(metav1.NamespaceAll), &corev1.Pod{}, onNode(node), transformPod, cache.Indexers{
		uidIndex: func(object any) ([]string, error) {
			if info, ok := object.(*podInfo); ok {
				return []string{string(info.UID)}, nil
			}
			return nil, nil
		},
	})
	if err != nil {
		return nil, fmt.Errorf("setting up the informer of pods: %w", err)
	}
	return &podSource{client: client, node: node, informer: informer}, nil
}

func onNode(node string) fields.Selector { return fields.OneTermEqualSelector("spec.nodeName", node) }

// Cached returns the informer's pods that ask for GPU memory. What their fields point to is shared and must not be changed.
func (s *podSource) Cached() (pods []allocation.Pod) {
	for _, object := range s.informer.GetStore().List() {
		if info, ok := object.(*podInfo); ok && info.pod.Request > 0 {
			pods = append(pods, info.pod)
		}
	}
	return pods
}

// Read returns the pods as the API server lists them. A list that fails is repeated for readTimeout. Then Read returns the informer's pods together
// with the error.
func (s *podSource) Read(ctx context.Context) ([]allocation.Pod, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	for {
		pods, err := s.list(ctx)
		if err == nil {
			return pods, nil
		}
		select {
		case <-ctx.Done():
			return s.Cached(), err
		case <-time.After(listRetry):
		}
	}
}

func (s *podSource) list(ctx context.Context) ([]allocation.Pod, error) {
	objects, err := s.client.Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: onNode(s.node).String()})
	if err != nil {
		return nil, fmt.Errorf("listing the pods of node %s: %w", s.node, err)
	}
	var pods []allocation.Pod
	for i := range objects.Items {
		if pod := readPod(&objects.Items[i]); pod.Request > 0 {
			pods = append(pods, pod)
		}
	}
	return pods, nil
}

// ByUID returns the pod with this UID if the informer knows it and it asks for GPU memory.
func (s *podSource) ByUID(uid gpu.PodUID) (allocation.Pod, bool) {
	info, ok := s.info(uid)
	if !ok || info.pod.Request == 0 {
		return allocation.Pod{}, false
	}
	return info.pod, true
}

// Instance returns the ID of the container that runs under this name according to the informer, and "" if none runs.
func (s *podSource) Instance(key allocation.ContainerKey) string {
	if info, ok := s.info(key.UID); ok {
		return info.instances[key.Name]
	}
	return ""
}

// Exists reports whether the informer knows a pod with this UID, in any phase.
func (s *podSource) Exists(uid gpu.PodUID) bool {
	_, ok := s.info(uid)
	return ok
}

func (s *podSource) info(uid gpu.PodUID) (*podInfo, bool) {
	objects, err := s.informer.GetIndexer().ByIndex(uidIndex, string(uid))
	if err != nil || len(objects) == 0 {
		return nil, false // The index exists: newPodSource adds it.
	}
	info, ok := objects[0].(*podInfo)
	return info, ok
}
