package deviceplugin

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	events "k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// annotator updates the pods' annotations to what their containers got. It compares the annotations with the record and doesn't
// depend on single events: a pod with correct annotations causes no write, a missed event does no harm, and an unreachable API
// server delays the write without blocking an allocation.
type annotator struct {
	client  Client
	pods    *podSource
	record  *allocation.Record
	events  events.EventRecorder
	metrics *metrics
	cards   *cardState
	// limits is what is known about the limits of pods.
	limits *limitWatch
	// overuse is what is known about pods that use more than they request.
	overuse *overuseWatch
	queue   annotationQueue
}

const patchTimeout = 10 * time.Second

// reportedFailures is the number of failures, one after the other, after which an Event reports that the API server refuses a write. By then some
// tenths of a second have passed, and a right that an upgrade has just given is mostly in force.
const reportedFailures = 4

// annotationQueue has the pods whose annotations may have to change.
type annotationQueue = workqueue.TypedRateLimitingInterface[gpu.PodUID]

// newAnnotationQueue returns an empty queue. A failed write is repeated after a pause.
func newAnnotationQueue() annotationQueue {
	return workqueue.NewTypedRateLimitingQueue(
		workqueue.NewTypedItemExponentialFailureRateLimiter[gpu.PodUID](100*time.Millisecond, 30*time.Second))
}

// Watch registers the event handlers for pods.
func (a *annotator) Watch() error {
	_, err := a.pods.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: a.enqueue,
		UpdateFunc: func(before, object any) {
			a.reportUnresolved(before, object)
			a.enqueue(object)
		},
		DeleteFunc: func(object any) {
			if last, ok := object.(cache.DeletedFinalStateUnknown); ok {
				object = last.Obj
			}
			if info, ok := object.(*podInfo); ok {
				a.record.Remove(info.pod.UID)
			}
		},
	})
	if err != nil {
		return fmt.Errorf("watching the pods: %w", err)
	}
	return nil
}

// reportUnresolved sends an Event when a container begins to wait for a CDI device that the runtime doesn't find: the kubelet's message names
// no remedy.
func (a *annotator) reportUnresolved(before, object any) {
	was, known := before.(*podInfo)
	info, ok := object.(*podInfo)
	if ok && info.unresolved != "" && (!known || was.unresolved == "") {
		a.events.Eventf(podReference(&info.pod), corev1.EventTypeWarning, eventNoDevice, "%s: the container runtime adds cards by CDI and has no such "+
			"device: compare nvidia-ctk cdi list, on the node, with the device plugin's --visible-devices", info.unresolved)
	}
}

func (a *annotator) enqueue(object any) {
	if info, ok := object.(*podInfo); ok && info.pod.Request > 0 {
		a.queue.Add(info.pod.UID)
	}
}

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
			klog.FromContext(ctx).Error(err, "Could not write a pod's annotations, trying again", "uid", uid)
			a.queue.AddRateLimited(uid)
			a.reportRefused(uid, err)
		}
		a.queue.Done(uid)
	}
}

// reportRefused sends an Event once the API server has refused a pod's annotations several times: the pod runs, and nothing else shows users that the
// plugin has no right to write them.
func (a *annotator) reportRefused(uid gpu.PodUID, err error) {
	pod, known := a.pods.ByUID(uid)
	if refused := apierrors.IsForbidden(err) || apierrors.IsInvalid(err); known && refused && a.queue.NumRequeues(uid) == reportedFailures {
		a.events.Eventf(podReference(&pod), corev1.EventTypeWarning, eventNotRecorded,
			"the API server refuses the annotations by which the device plugin reports what the pod's containers got (its ServiceAccount needs the right, "+
				"and the guard and other policies must allow it): %v", err)
	}
}

// addFound adds the changes of annotations that report what the plugin has found: of limits, of use, and of cards that are gone.
func (a *annotator) addFound(pod *allocation.Pod, annotations map[string]any) map[string]any {
	if pod.Ended {
		return annotations
	}
	added := map[string]any{}
	if isolation, ok := a.limits.Isolation(pod.UID); ok && isolation.String() != pod.Isolation {
		added[protocol.AnnotationIsolation] = isolation.String()
	}
	if overuse, measured := a.overuse.Annotation(pod.UID); measured {
		addChange(added, protocol.AnnotationOveruse, pod.Overuse, overuse)
	}
	if lost, known := lostCards(a.record.Pod(pod.UID), a.cards.Get().All); known {
		addChange(added, protocol.AnnotationLostCards, pod.LostCards, lost)
	}
	maps.Copy(added, annotations)
	return added
}

// addChange adds the change of an annotation from one value to another. An empty value means that the pod doesn't have the annotation.
func addChange(changes map[string]any, key, from, to string) {
	switch {
	case from == to:
	case to == "":
		changes[key] = nil
	default:
		changes[key] = to
	}
}

// write brings a pod's annotations in line with the record. The event handler enqueues a pod that the informer doesn't know.
func (a *annotator) write(ctx context.Context, uid gpu.PodUID) error {
	pod, ok := a.pods.ByUID(uid)
	if !ok {
		return nil
	}
	annotations, repair := allocation.DueAnnotations(&pod, a.record.Pod(uid))
	annotations = a.addFound(&pod, annotations)
	if len(annotations) == 0 {
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
	if lost, ok := annotations[protocol.AnnotationLostCards].(string); ok {
		a.events.Eventf(podReference(&pod), corev1.EventTypeWarning, eventLost,
			"the node doesn't have the pod's card %s any more, so its containers can't start again: delete the pod", lost)
	}
	if repair {
		a.metrics.repairs.Inc()
		cards, was := annotations[protocol.AnnotationIndex], pod.Assignment.Annotations()[protocol.AnnotationIndex]
		a.events.Eventf(podReference(&pod), corev1.EventTypeWarning, eventRepaired,
			"the annotations named card %s, the containers got card %v", was, cards)
		klog.FromContext(ctx).Info("Repaired annotations", "pod", klog.KRef(pod.Namespace, pod.Name), "cards", cards, "was", was)
	}
	return nil
}
