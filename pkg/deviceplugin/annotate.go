package deviceplugin

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	events "k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// annotator updates the pods' annotations to what their containers got. It compares the annotations with the record and doesn't
// depend on single events: a pod with correct annotations causes no write, a missed event does no harm, and an unreachable API
// server delays the write without blocking an allocation.
type annotator struct {
	client  Client
	pods    *podSource
	record  *record
	events  events.EventRecorder
	metrics *metrics
	queue   workqueue.TypedRateLimitingInterface[gpu.PodUID]
}

// patchTimeout bounds one patch request.
const patchTimeout = 10 * time.Second

func newAnnotator(client Client, pods *podSource, record *record, recorder events.EventRecorder, m *metrics) *annotator {
	return &annotator{
		client: client, pods: pods, record: record, events: recorder, metrics: m,
		queue: workqueue.NewTypedRateLimitingQueue(
			workqueue.NewTypedItemExponentialFailureRateLimiter[gpu.PodUID](100*time.Millisecond, 30*time.Second)),
	}
}

// Watch registers the event handlers for pods.
func (a *annotator) Watch() error {
	_, err := a.pods.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    a.enqueue,
		UpdateFunc: func(_, object any) { a.enqueue(object) },
		DeleteFunc: func(object any) {
			if last, ok := object.(cache.DeletedFinalStateUnknown); ok {
				object = last.Obj
			}
			if pod, ok := object.(*corev1.Pod); ok {
				a.record.Forget(gpu.PodUID(pod.UID))
			}
		},
	})
	if err != nil {
		return fmt.Errorf("following the pods: %w", err)
	}
	return nil
}

func (a *annotator) enqueue(object any) {
	if pod, ok := object.(*corev1.Pod); ok && len(pod.Spec.Containers) > 0 {
		a.queue.Add(gpu.PodUID(pod.UID))
	}
}

// Notify enqueues a pod of which a container got a card or the record changed.
func (a *annotator) Notify(uid gpu.PodUID) { a.queue.Add(uid) }

// Run processes the queue until the context ends.
func (a *annotator) Run(ctx context.Context) error {
	defer context.AfterFunc(ctx, a.queue.ShutDown)()
	for {
		uid, shutdown := a.queue.Get()
		if shutdown {
			return nil
		}
		if err := a.write(ctx, uid); err == nil {
			a.queue.Forget(uid)
		} else if ctx.Err() == nil {
			a.metrics.annotationErrors.Inc()
			klog.FromContext(ctx).Info("A pod's annotations can't be written now: they follow later", "uid", uid, "reason", err.Error())
			a.queue.AddRateLimited(uid)
		}
		a.queue.Done(uid)
	}
}

// write brings the annotations of one pod in line with the record. A pod that the informer doesn't know yet is enqueued again
// by the event handler.
func (a *annotator) write(ctx context.Context, uid gpu.PodUID) error {
	pod, ok := a.pods.ByUID(uid)
	if !ok {
		return nil
	}
	annotations, repair := due(&pod, a.record.Pod(uid))
	if annotations == nil {
		return nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": pod.UID, "annotations": annotations}})
	if err != nil {
		return fmt.Errorf("writing the patch of pod %s: %w", pod.Pod, err)
	}
	ctx, cancel := context.WithTimeout(ctx, patchTimeout)
	defer cancel()
	_, err = a.client.Pods(pod.Namespace).
		Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	switch {
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return nil // The pod is deleted, or another pod has its name now.
	case err != nil:
		return fmt.Errorf("annotating pod %s: %w", pod.Pod, err)
	}
	if repair {
		a.metrics.repairs.Inc()
		card := annotations[protocol.AnnotationIndex]
		a.events.Eventf(pod.reference(), corev1.EventTypeWarning, eventRepaired,
			"the annotations named card %d, the containers got card %v", pod.Assignment.Card, card)
		klog.FromContext(ctx).Info("Repaired annotations", "pod", klog.KRef(pod.Namespace, pod.Name), "card", card, "was", pod.Assignment.Card)
	}
	return nil
}

// due returns the changes to a pod's annotations: a new value, or nil for an annotation to remove. It returns nil if the
// annotations are correct. repair is true if they named another card than the one that the containers got. An existing assume
// time is never overwritten, whatever its value.
func due(pod *podView, given servings) (annotations map[string]any, repair bool) {
	if pod.Terminal {
		return nil, false
	}
	truth, has := given.Lasting(pod)
	whole, at := true, time.Time{}
	for _, container := range pod.Containers {
		s, ok := given[container.Name]
		if !ok || !s.HasCard() {
			whole = false
			continue
		}
		if s.At.After(at) {
			at = s.At
		}
	}
	annotations = map[string]any{}
	repair = has && pod.Assumed && pod.Assignment.Card != truth.Card
	if has && (!pod.Assumed || repair) {
		right := protocol.Assignment{Card: truth.Card, Request: pod.Request, CardMemory: truth.CardMemory, AssumeTime: truth.At}
		for key, value := range right.Annotations() {
			annotations[key] = value
		}
		if pod.HasAssumeTime {
			delete(annotations, protocol.AnnotationAssumeTime)
		}
		if pod.Assigned {
			delete(annotations, protocol.AnnotationAssigned)
		}
	}
	switch {
	case whole && !pod.Assigned:
		for key, value := range protocol.AssignedAnnotations(at) {
			annotations[key] = value
		}
	case !whole && pod.Assigned && !pod.Ran:
		// An allocation for another pod was matched to this one, or the annotation was forged. If the pod has run, the
		// annotation stays: the record can be less complete than the annotations.
		annotations[protocol.AnnotationAssigned], annotations[protocol.AnnotationAssignTime] = "false", nil
	}
	if len(annotations) == 0 {
		return nil, false
	}
	return annotations, repair
}
