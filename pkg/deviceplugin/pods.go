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

// podView is what deciding needs to know of a pod that asks for GPU memory.
type podView struct {
	gpu.Pod
	Created time.Time
	// Version grows with each write of any pod. Until a pod has been admitted its last write mostly is the one that bound
	// it, so versions tell in which order pods came to the node.
	Version uint64
	// Deleting pods run through their grace period, and hold their memory.
	Deleting bool
	// Terminal pods hold nothing any more.
	Terminal bool
	// Mirror says that the object stands for a static pod, which the kubelet doesn't know by the object's UID.
	Mirror bool
	// Resized reports that the kubelet hasn't reported on the pod's latest spec, so it may be admitting the pod for a resize
	// now; ResizePending that it has deferred a resize, which it tries again from time to time. Both are false for pods of
	// the informer: they are only known of pods that the API server listed.
	Resized, ResizePending bool
	// Ran says that a container of the pod has run: the kubelet has admitted it, and so has allocated for all of it.
	Ran bool
	// Containers are those that ask for GPU memory, in the order in which the kubelet allocates for them.
	Containers []containerView
	// Assumed says that Assignment is what somebody chose for the pod.
	Assumed    bool
	Assignment protocol.Assignment
	// Assigned is what the annotations claim, and HasAssumeTime whether they name a time, legible or not, whatever else
	// stands there.
	Assigned, HasAssumeTime bool
	// Promise is the memory that the annotations speak of, empty where they don't.
	Promise gpu.Placement
}

// reference returns what events are attached to.
func (p *podView) reference() *corev1.ObjectReference {
	return &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: types.UID(p.UID)}
}

// runs reports whether the API server calls a container running that isn't an init container.
func (p *podView) runs(container string) bool {
	return slices.ContainsFunc(p.Containers, func(c containerView) bool { return c.Name == container && c.Running && !c.Init })
}

// containerView is a container that asks for GPU memory.
type containerView struct {
	Name    string
	Request gpu.Memory
	// Init says that it is an ordinary init container, which the kubelet's PodResources leaves out.
	Init bool
	// Running says that it runs now, or is an init container whose turn is over, since what comes after it runs.
	Running bool
}

// newPodView reads a pod.
func newPodView(pod *corev1.Pod) podView {
	view := podView{
		Pod:      protocol.Pod(pod),
		Created:  pod.CreationTimestamp.Time,
		Deleting: pod.DeletionTimestamp != nil,
		Terminal: protocol.Terminal(pod),
		Resized:  resized(pod),
		// k8s.io/kubernetes pkg/kubelet/allocation/allocation_manager.go, handlePodResourcesResize.
		ResizePending: slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodResizePending && c.Status == corev1.ConditionTrue
		}),
	}
	_, view.Mirror = pod.Annotations[corev1.MirrorPodAnnotationKey]
	view.Version, _ = strconv.ParseUint(pod.ResourceVersion, 10, 64) // Zero where it is no number: then it tells nothing.
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
	// An assignment that can't be read is nobody's: the pod is given a card here, and told so.
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

// resized reports whether the kubelet has yet to report on the pod's latest spec, which may be a resize.
func resized(pod *corev1.Pod) bool {
	observed := pod.Status.ObservedGeneration // Zero where the kubelet doesn't report it.
	return observed > 0 && pod.Generation > observed
}

// podSource knows this node's pods: from an informer, and from the API server itself where that isn't enough.
type podSource struct {
	client   Client
	node     string
	informer cache.SharedIndexInformer
	// away is until when the API server counts as gone, in Unix nanoseconds.
	away atomic.Int64

	mu sync.Mutex
	// views are those of the informer's objects, which are replaced and never changed. To read a hundred pods anew takes
	// longer than all the rest of an allocation.
	views map[*corev1.Pod]*podView
}

const (
	uidIndex = "uid"
	// searchTimeout bounds a live list, and the wait for a pod, during which the kubelet waits.
	searchTimeout = 2 * time.Second
	// searchPause is how often a pod that is waited for is looked for.
	searchPause = 10 * time.Millisecond
	// askAgain is the pause after a list that failed at once, as over a connection that had broken.
	askAgain = 200 * time.Millisecond
	// awayPatience is how long a pod is waited for whose list isn't asked for.
	awayPatience = 500 * time.Millisecond
	// leaveAway is how long an API server that didn't answer isn't asked again: every container of a pod would wait.
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

// Cached returns the pods that the informer knows. What their fields point to is shared, and not to be changed.
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

// Live asks the API server for the pods.
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

// Search returns the pods as the API server lists them, or as the informer has them as soon as that is enough, whichever
// comes first: a busy API server's list takes longer than its word of a single pod. Where it can't be asked the informer
// may still get what is on its way, and is given as long as a list may take, or awayPatience where the API server has just
// been waited for in vain; the error then comes with what the informer has.
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

// leave notes that the API server didn't answer.
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

// ByUID returns the pod of this UID, if the informer knows it.
func (s *podSource) ByUID(uid gpu.PodUID) (podView, bool) {
	pod, ok := s.object(uid)
	if !ok {
		return podView{}, false
	}
	return newPodView(pod), true
}

// Instance returns the ID of the container that runs under this name as the informer knows it, and "" if none does.
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
		return nil, false // There is such an index: newPodSource made it.
	}
	pod, ok := objects[0].(*corev1.Pod)
	return pod, ok
}

// Exists says whether the informer knows a pod of this UID, in whatever phase.
func (s *podSource) Exists(uid gpu.PodUID) bool {
	keys, err := s.informer.GetIndexer().IndexKeys(uidIndex, string(uid))
	return err == nil && len(keys) > 0
}

// slimPod is the informer's transform: of pods that ask for no GPU memory the identity stays, of others what newPodView
// reads. Pods without containers in the store are such.
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

// slimContainers keeps every container, since a pod's request depends on their order.
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
