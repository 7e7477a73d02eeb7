package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// podView is the part of a pod that matching and card selection read. The pod asks for GPU memory.
type podView struct {
	gpu.Pod
	Created time.Time
	// Version grows with each write of any pod. The last write of a pod that has not been admitted is usually its
	// Binding, so versions show the order in which pods came to the node.
	Version uint64
	// Deleting is true for a pod in its grace period. It holds its memory.
	Deleting bool
	// Terminal is true for a pod that no longer holds memory.
	Terminal bool
	// Mirror is true if the object mirrors a static pod. The kubelet knows a static pod by another UID than the object's.
	Mirror bool
	// Resized is true if the kubelet hasn't reported on the pod's latest spec, so it may be admitting the pod for a
	// resize now. ResizePending is true if the kubelet has deferred a resize, which it retries from time to time. Both
	// are false for pods of the informer: only pods that the API server listed have them.
	Resized, ResizePending bool
	// Ran is true if a container of the pod has run: the kubelet has admitted the pod, so it has allocated for all its
	// containers.
	Ran bool
	// Containers are the containers that ask for GPU memory, in the order in which the kubelet allocates for them.
	Containers []containerView
	// Assumed is true if a card was chosen for the pod. Assignment is that choice.
	Assumed    bool
	Assignment protocol.Assignment
	// Assigned is what the annotations claim. HasAssumeTime is true if the annotations have an assume time, readable or
	// not, regardless of the other annotations.
	Assigned, HasAssumeTime bool
	// Promise is the memory that the annotations name. It is empty if they name none.
	Promise gpu.Placement
}

// reference returns the object to which the pod's Events are attached.
func (p *podView) reference() *corev1.ObjectReference {
	return &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: types.UID(p.UID)}
}

// runs reports whether the container runs, according to the API server, and is not an init container.
func (p *podView) runs(container string) bool {
	return slices.ContainsFunc(p.Containers, func(c containerView) bool { return c.Name == container && c.Running && !c.Init })
}

// containerView is a container that asks for GPU memory.
type containerView struct {
	Name    string
	Request gpu.Memory
	// Init is true for an ordinary init container, which the kubelet's PodResources service doesn't list.
	Init bool
	// Running is true if the container runs now, or if it is an init container that has ended, because a container after
	// it runs.
	Running bool
}

// newPodView returns the view of a pod.
func newPodView(pod *corev1.Pod) podView {
	view := podView{
		Pod:      protocol.Pod(pod),
		Created:  pod.CreationTimestamp.Time,
		Deleting: pod.DeletionTimestamp != nil,
		Terminal: protocol.Terminal(pod),
		Resized:  resized(pod),
		// The condition is set in k8s.io/kubernetes pkg/kubelet/allocation/allocation_manager.go,
		// handlePodResourcesResize.
		ResizePending: slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodResizePending && c.Status == corev1.ConditionTrue
		}),
	}
	_, view.Mirror = pod.Annotations[corev1.MirrorPodAnnotationKey]
	view.Version, _ = strconv.ParseUint(pod.ResourceVersion, 10, 64) // Zero if it isn't a number; it then shows no order.
	running, mainRuns := map[string]bool{}, false
	for _, statuses := range [][]corev1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses} {
		for _, s := range statuses {
			running[s.Name] = s.State.Running != nil
			view.Ran = view.Ran || s.ContainerID != ""
		}
	}
	for i := range pod.Spec.Containers {
		mainRuns = mainRuns || running[pod.Spec.Containers[i].Name]
	}
	add := func(c *corev1.Container, init bool) {
		if request := protocol.ContainerRequest(c); request > 0 {
			view.Containers = append(view.Containers,
				containerView{Name: c.Name, Request: request, Init: init, Running: running[c.Name] || init && mainRuns})
		}
	}
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		add(c, c.RestartPolicy == nil || *c.RestartPolicy != corev1.ContainerRestartPolicyAlways)
	}
	for i := range pod.Spec.Containers {
		add(&pod.Spec.Containers[i], false)
	}
	// An assignment that can't be read counts as none: the plugin selects a card for the pod and reports it on the pod.
	if assignment, err := protocol.ParseAssignment(pod.Annotations); err == nil {
		view.Assumed, view.Assignment = true, assignment
	}
	view.Assigned = pod.Annotations[protocol.AnnotationAssigned] == "true"
	_, view.HasAssumeTime = pod.Annotations[protocol.AnnotationAssumeTime]
	if promise, err := protocol.PodPlacement(pod); err == nil {
		view.Promise = promise
	}
	return view
}

// resized reports whether the kubelet has not yet reported on the pod's latest spec, which may be a resize.
func resized(pod *corev1.Pod) bool {
	observed := pod.Status.ObservedGeneration // Zero if the kubelet doesn't report it.
	return observed > 0 && pod.Generation > observed
}

// podSource provides this node's pods: from an informer, and from the API server itself if the informer isn't enough.
type podSource struct {
	client   Client
	node     string
	informer cache.SharedIndexInformer
	// away is the time until which the API server counts as unreachable, in Unix nanoseconds.
	away atomic.Int64

	mu sync.Mutex
	// views caches the views of the informer's objects, which are replaced and never changed. mu guards it. Without it,
	// reading a hundred pods takes longer than the rest of an allocation.
	views map[*corev1.Pod]*podView
}

const (
	uidIndex = "uid"
	// searchTimeout bounds a live list, and the search for a pod. The kubelet waits meanwhile.
	searchTimeout = 2 * time.Second
	// searchPause is the interval at which the informer is checked for an awaited pod.
	searchPause = 10 * time.Millisecond
	// askAgain is the pause after a list that failed at once, for example on a broken connection.
	askAgain = 200 * time.Millisecond
	// awayPatience is how long Search waits for a pod if it makes no list.
	awayPatience = 500 * time.Millisecond
	// leaveAway is how long an API server that didn't answer isn't asked again. Without this pause every container of a
	// pod would wait.
	leaveAway = 2 * time.Second
)

func newPodSource(client Client, node string) (*podSource, error) {
	informer, err := newInformer(client.Pods(metav1.NamespaceAll), &corev1.Pod{}, onNode(node), client.PlainLists, slimPod, cache.Indexers{
		uidIndex: func(object any) ([]string, error) {
			pod, ok := object.(*corev1.Pod)
			if !ok {
				return nil, nil
			}
			return []string{string(pod.UID)}, nil
		},
	})
	if err != nil {
		return nil, fmt.Errorf("setting up the informer of pods: %w", err)
	}
	return &podSource{client: client, node: node, informer: informer}, nil
}

func onNode(node string) fields.Selector { return fields.OneTermEqualSelector("spec.nodeName", node) }

// Cached returns the pods that the informer knows. The data that their fields point to is shared and must not be changed.
func (s *podSource) Cached() []podView {
	s.mu.Lock()
	defer s.mu.Unlock()
	objects := s.informer.GetStore().List()
	views := make([]podView, 0, len(objects))
	known := make(map[*corev1.Pod]*podView, len(objects))
	for _, object := range objects {
		pod, ok := object.(*corev1.Pod)
		if !ok || len(pod.Spec.Containers) == 0 {
			continue
		}
		view := s.views[pod]
		if view == nil {
			read := newPodView(pod)
			view = &read
		}
		known[pod] = view
		views = append(views, *view)
	}
	s.views = known
	return views
}

var errAway = errors.New("it didn't answer a moment ago")

// Live returns the pods as the API server lists them. It fails at once if the API server counts as unreachable.
func (s *podSource) Live(ctx context.Context) ([]podView, error) {
	if s.isAway() {
		return nil, fmt.Errorf("listing the pods of node %s: %w", s.node, errAway)
	}
	bounded, cancel := context.WithTimeout(ctx, searchTimeout)
	defer cancel()
	pods, err := s.list(bounded)
	if err != nil && ctx.Err() == nil {
		s.leave()
	}
	return pods, err
}

// Search returns the pods as the API server lists them, or as the informer has them as soon as enough accepts them,
// whichever comes first: a busy API server takes longer for a list than for a watch event of a single pod. If the list
// fails, the informer may still receive the pod. Search waits for it as long as a list may take, or awayPatience if the
// API server has just failed to answer. It then returns the informer's pods together with the error.
func (s *podSource) Search(ctx context.Context, enough func([]podView) bool) ([]podView, error) {
	away, patience := s.isAway(), searchTimeout
	if away {
		patience = awayPatience
	}
	bounded, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	type list struct {
		pods []podView
		err  error
	}
	listed := make(chan list, 1)
	ask := func() {
		pods, err := s.list(bounded)
		listed <- list{pods, err}
	}
	failed := fmt.Errorf("listing the pods of node %s: %w", s.node, errAway)
	if !away {
		failed = nil
		go ask()
	}
	ticker := time.NewTicker(searchPause)
	defer ticker.Stop()
	var again <-chan time.Time
	for {
		select {
		case l := <-listed:
			if l.err == nil {
				return l.pods, nil
			}
			failed, again = l.err, time.After(askAgain)
		case <-again:
			go ask()
		case <-ticker.C:
			if pods := s.Cached(); enough(pods) {
				return pods, nil
			}
		case <-bounded.Done():
			if ctx.Err() == nil && !away {
				s.leave()
			}
			if failed == nil {
				failed = fmt.Errorf("listing the pods of node %s: %w", s.node, bounded.Err())
			}
			return s.Cached(), failed
		}
	}
}

func (s *podSource) isAway() bool { return time.Now().UnixNano() < s.away.Load() }

// leave records that the API server didn't answer.
func (s *podSource) leave() { s.away.Store(time.Now().Add(leaveAway).UnixNano()) }

func (s *podSource) list(ctx context.Context) ([]podView, error) {
	pods, err := s.client.Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: onNode(s.node).String()})
	if err != nil {
		return nil, fmt.Errorf("listing the pods of node %s: %w", s.node, err)
	}
	var views []podView
	for i := range pods.Items {
		if view := newPodView(&pods.Items[i]); view.Request > 0 {
			views = append(views, view)
		}
	}
	return views, nil
}

// ByUID returns the pod with this UID, and whether the informer knows it.
func (s *podSource) ByUID(uid gpu.PodUID) (podView, bool) {
	pod, ok := s.object(uid)
	if !ok {
		return podView{}, false
	}
	return newPodView(pod), true
}

// Instance returns the ID of the container that runs under this name according to the informer, and "" if none runs.
func (s *podSource) Instance(key containerKey) string {
	pod, ok := s.object(key.UID)
	if !ok {
		return ""
	}
	for _, status := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		if status.Name == key.Name && status.State.Running != nil {
			return status.ContainerID
		}
	}
	return ""
}

func (s *podSource) object(uid gpu.PodUID) (*corev1.Pod, bool) {
	objects, err := s.informer.GetIndexer().ByIndex(uidIndex, string(uid))
	if err != nil || len(objects) == 0 {
		return nil, false // The index exists: newPodSource adds it.
	}
	pod, ok := objects[0].(*corev1.Pod)
	return pod, ok
}

// Exists reports whether the informer knows a pod with this UID, in any phase.
func (s *podSource) Exists(uid gpu.PodUID) bool {
	keys, err := s.informer.GetIndexer().IndexKeys(uidIndex, string(uid))
	return err == nil && len(keys) > 0
}

// slimPod is the informer's transform. It keeps what newPodView reads of a pod that asks for GPU memory, and only the
// identity of any other pod. A pod without containers in the store is of the second kind.
func slimPod(object any) (any, error) {
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return object, nil
	}
	out := &corev1.Pod{}
	out.Name, out.Namespace, out.UID, out.ResourceVersion = pod.Name, pod.Namespace, pod.UID, pod.ResourceVersion
	if protocol.PodRequest(pod) == 0 {
		return out, nil
	}
	out.CreationTimestamp, out.DeletionTimestamp = pod.CreationTimestamp, pod.DeletionTimestamp
	for _, key := range []string{
		corev1.MirrorPodAnnotationKey, protocol.AnnotationIndex, protocol.AnnotationPod, protocol.AnnotationDevice,
		protocol.AnnotationAssumeTime, protocol.AnnotationAssigned, protocol.AnnotationAssignTime,
		protocol.AnnotationAllocation,
	} {
		if value, ok := pod.Annotations[key]; ok {
			metav1.SetMetaDataAnnotation(&out.ObjectMeta, key, value)
		}
	}
	out.Spec.NodeName = pod.Spec.NodeName
	out.Spec.InitContainers = slimContainers(pod.Spec.InitContainers)
	out.Spec.Containers = slimContainers(pod.Spec.Containers)
	out.Status.Phase = pod.Status.Phase
	out.Status.InitContainerStatuses = slimStatuses(pod.Status.InitContainerStatuses)
	out.Status.ContainerStatuses = slimStatuses(pod.Status.ContainerStatuses)
	return out, nil
}

// slimContainers keeps every container, because a pod's request depends on their order.
func slimContainers(containers []corev1.Container) []corev1.Container {
	out := make([]corev1.Container, len(containers))
	for i := range containers {
		c := &containers[i]
		out[i].Name, out[i].RestartPolicy = c.Name, c.RestartPolicy
		out[i].Resources.Requests = onlyMemory(c.Resources.Requests)
		out[i].Resources.Limits = onlyMemory(c.Resources.Limits)
	}
	return out
}

func onlyMemory(list corev1.ResourceList) corev1.ResourceList {
	quantity, ok := list[protocol.ResourceMemory]
	if !ok {
		return nil
	}
	return corev1.ResourceList{protocol.ResourceMemory: quantity}
}

func slimStatuses(statuses []corev1.ContainerStatus) []corev1.ContainerStatus {
	out := make([]corev1.ContainerStatus, len(statuses))
	for i := range statuses {
		out[i].Name, out[i].ContainerID = statuses[i].Name, statuses[i].ContainerID
		out[i].State.Running = statuses[i].State.Running
	}
	return out
}
