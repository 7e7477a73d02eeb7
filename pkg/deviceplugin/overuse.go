package deviceplugin

import (
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	events "k8s.io/client-go/tools/record"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/usage"
)

// overuseWatch reports pods that request GPU memory and use more than that. It has no right to evict them: the extender decides.
type overuseWatch struct {
	pods    *podSource
	cards   *cardState
	record  *allocation.Record
	events  events.EventRecorder
	metrics *metrics
	// changed is called for each pod whose annotation may have to change.
	changed func(gpu.PodUID)
	tracker *usage.Overuse

	// mu guards the fields below.
	mu sync.Mutex
	// reports are those of the last measurement; nil before the first one.
	reports map[gpu.PodUID]protocol.Overuse
	// promised is Check's argument, as last known. Only Check uses it and the next field.
	promised map[int]gpu.Memory
	// unlimited are the pods of which a container runs without its annotated limit.
	unlimited map[gpu.PodUID]bool
}

// Annotation returns the value of the pod's annotation, empty for a pod without over-use. measured is false if nothing is known.
func (w *overuseWatch) Annotation(uid gpu.PodUID) (value string, measured bool, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	report, over := w.reports[uid]
	if !over {
		return "", w.reports != nil, nil
	}
	value, err = report.Annotation()
	return value, true, err
}

// Annotated implements usage.OverusePods.
func (w *overuseWatch) Annotated(uid gpu.PodUID) *protocol.Overuse {
	pod, _ := w.pods.ByUID(uid)
	overuse, _ := protocol.ParseOveruse(map[string]string{protocol.AnnotationOveruse: pod.Overuse}) // An invalid one doesn't count.
	return overuse
}

// Held implements usage.OverusePods. Init containers that have ended have a record too, so it is at most the pod's share of
// the card. The share counts if it isn't known what each container was given.
func (w *overuseWatch) Held(uid gpu.PodUID, card int) uint64 {
	pod, _ := w.pods.ByUID(uid)
	record := w.record.Pod(uid)
	if pod.Assumed && !record.Complete(&pod) && slices.Contains(pod.Assignment.Indexes(), card) {
		return w.cards.Unit().Bytes(pod.Demand().Memory)
	}
	var held gpu.Memory
	for _, given := range record {
		for _, share := range given.Cards {
			if share.Card == card {
				held = held.Add(share.Memory)
			}
		}
	}
	return w.cards.Unit().Bytes(min(held, pod.Demand().Memory))
}

// Leaving implements usage.OverusePods.
func (w *overuseWatch) Leaving(uid gpu.PodUID, now time.Time) (leaving, soon bool) {
	pod, _ := w.pods.ByUID(uid)
	return pod.Leaving, pod.Leaving && !protocol.Overdue(pod.LeavesBy, now)
}

// Promised implements usage.OverusePods.
func (w *overuseWatch) Promised(index int) (memory, promised uint64) {
	unit := w.cards.Unit()
	for _, card := range w.cards.All() {
		if card.Index == index {
			memory = unit.Bytes(card.Memory)
		}
	}
	return memory, unit.Bytes(w.promised[index])
}

// Ending implements usage.OverusePods.
func (w *overuseWatch) Ending(card int) (sum uint64) {
	for _, pod := range w.pods.Cached() {
		if pod.Leaving && !pod.Terminal { // Nothing is promised to one that has ended.
			sum += w.Held(pod.UID, card)
		}
	}
	return sum
}

// Check finds the pods that use more than they may, and those that borrow memory of a card that is low on it. promised is what is promised of
// each card to pods; nil if it isn't known now: then the last one counts. Pods that request no memory are not reported: measured use shows them. Nor are
// pods of which it is not known what each container was given, because the kubelet has lost its checkpoint: such a container seems to
// request nothing of the card that it uses.
func (w *overuseWatch) Check(measured protocol.Usage, promised map[int]gpu.Memory) {
	if promised != nil {
		w.promised = promised
	}
	w.reportUnlimited()
	reports := w.tracker.Update(measured, w)
	maps.DeleteFunc(reports, func(uid gpu.PodUID, _ protocol.Overuse) bool {
		pod, requests := w.pods.ByUID(uid)
		return !requests || !w.record.Pod(uid).Complete(&pod)
	})
	w.mu.Lock()
	before := w.reports
	w.reports = reports
	w.mu.Unlock()
	w.metrics.overuse.Set(float64(len(reports)))
	for uid, report := range reports {
		pod, _ := w.pods.ByUID(uid)
		if _, known := before[uid]; !known && pod.Overuse == "" {
			w.events.Event(podReference(&pod), corev1.EventTypeWarning, eventOveruse, overuseText(report))
		}
		if before[uid].At != report.At {
			w.changed(uid)
		}
	}
	for uid := range before {
		if _, still := reports[uid]; !still {
			w.changed(uid)
		}
	}
	if before == nil { // Annotations of a former plugin may be out of date.
		for _, pod := range w.pods.Cached() {
			if pod.Overuse != "" {
				w.changed(pod.UID)
			}
		}
	}
}

// overuseText describes a report for the pod's owner.
func overuseText(report protocol.Overuse) string {
	sum := report.Sum()
	text := "the pod " + sum.String()
	if sum.ForLowCard() {
		text += "; its card is low on free memory, which other pods request"
	}
	return text
}

// reportUnlimited sends an Event for each pod of which a container has an annotated limit above its request and runs without one: what it uses
// above its request counts as over-use. Its pod was matched by order among pods with different limits, the record is lost, or the annotation, the
// isolation mode or the plugin was another one when it started.
func (w *overuseWatch) reportUnlimited() {
	unlimited := map[gpu.PodUID]bool{}
	for _, pod := range w.pods.Cached() {
		given := w.record.Pod(pod.UID)
		for _, c := range pod.Containers {
			if !c.Running || c.Init || c.Limit <= w.cards.Unit().Bytes(c.Request) || given[c.Name].Allowed > 0 {
				continue
			}
			if !w.unlimited[pod.UID] && !unlimited[pod.UID] {
				w.events.Eventf(podReference(&pod), corev1.EventTypeWarning, eventLimitNotInForce,
					"container %s runs without the annotated limit above its request; what it uses above its request counts as over-use", c.Name)
			}
			unlimited[pod.UID] = true
		}
	}
	w.unlimited = unlimited
}
