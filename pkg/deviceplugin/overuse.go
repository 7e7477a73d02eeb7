package deviceplugin

import (
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
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
	// annotate is called for each pod whose annotation may have to change.
	annotate func(gpu.PodUID)
	tracker  *usage.Overuse

	// mu guards the fields below.
	mu sync.Mutex
	// reports are the reports of the last measurement; nil before the first one.
	reports map[gpu.PodUID]protocol.Overuse
	// unlimited are the pods of which a container runs without its annotated limit. Only Update uses it.
	unlimited sets.Set[gpu.PodUID]
}

// Annotation returns the value of the pod's annotation, empty for a pod without over-use. measured is false if nothing is known.
func (w *overuseWatch) Annotation(uid gpu.PodUID) (value string, measured bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if report, over := w.reports[uid]; over {
		value = report.Annotation()
	}
	return value, w.reports != nil
}

// known returns what is known about the node's pods and cards. promised is Update's argument.
func (w *overuseWatch) known(now time.Time, promised map[int]gpu.Memory) usage.Known {
	known, unit := usage.Known{Pods: map[gpu.PodUID]usage.KnownPod{}, Cards: map[int]usage.KnownCard{}}, w.cards.Get().Unit
	for _, card := range w.cards.Get().All {
		known.Cards[card.Index] = usage.KnownCard{Memory: unit.Bytes(card.Memory), Promised: unit.Bytes(promised[card.Index])}
	}
	for _, pod := range w.pods.Cached() {
		k := usage.KnownPod{Leaving: pod.Leaving, EndsSoon: pod.Leaving && !protocol.Overdue(pod.LeavesBy, now)}
		k.Annotated, _ = protocol.ParseOveruse(pod.Overuse) // An invalid one doesn't count.
		if !pod.Ended {
			k.Held = w.memoryGiven(&pod)
		}
		known.Pods[pod.UID] = k
	}
	return known
}

// memoryGiven returns what the pod's containers were given of each card, in bytes. Init containers that have ended have a record too, so it is at most the
// pod's share of the card. The share counts if it isn't known what each container was given.
func (w *overuseWatch) memoryGiven(pod *allocation.Pod) map[int]uint64 {
	held, unit, record := map[int]uint64{}, w.cards.Get().Unit, w.record.Pod(pod.UID)
	share := unit.Bytes(pod.Demand().Memory)
	for _, given := range record {
		for _, part := range given.Cards {
			held[part.Card] = min(held[part.Card]+unit.Bytes(part.Memory), share)
		}
	}
	if pod.Assumed && !record.Complete(pod) {
		for _, card := range pod.Assignment.Indexes() {
			held[card] = share
		}
	}
	return held
}

// Update finds the pods that use more than they may, and those that borrow memory of a card that is low on it. promised is what is promised of
// each card to pods. Pods that request no memory are not reported: measured use shows them.
// Nor are pods of which it is not known what each container was given, because the kubelet has lost its checkpoint: such a container seems to
// request nothing of the card that it uses.
func (w *overuseWatch) Update(measured protocol.Usage, promised map[int]gpu.Memory) {
	w.reportUnlimited()
	reports := w.tracker.Update(measured, w.known(measured.Time, promised))
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
			text, sum := "the pod %s", report.Sum()
			if sum.ForLowCard() {
				text += "; its card is low on free memory, which other pods request"
			}
			w.events.Eventf(podReference(&pod), corev1.EventTypeWarning, eventOveruse, text, sum)
		}
		w.annotate(uid) // The annotator writes only what differs.
	}
	for uid := range before {
		if _, still := reports[uid]; !still {
			w.annotate(uid)
		}
	}
	if before == nil { // Annotations of a former plugin may be out of date.
		for _, pod := range w.pods.Cached() {
			if pod.Overuse != "" {
				w.annotate(pod.UID)
			}
		}
	}
}

// reportUnlimited sends an Event for each pod of which a container has an annotated limit above its request and runs without one: what it uses
// above its request counts as over-use. Its pod was matched by order among pods with different limits, the record is lost, or the annotation, the
// isolation mode or the plugin was another one when it started.
func (w *overuseWatch) reportUnlimited() {
	unlimited := sets.New[gpu.PodUID]()
	for _, pod := range w.pods.Cached() {
		given := w.record.Pod(pod.UID)
		i := slices.IndexFunc(pod.Containers, func(c allocation.Container) bool {
			return c.Running && !c.Init && c.Limit > w.cards.Get().Unit.Bytes(c.Request) && given[c.Name].Allowed == 0
		})
		if i < 0 {
			continue
		}
		if unlimited.Insert(pod.UID); !w.unlimited.Has(pod.UID) {
			w.events.Eventf(podReference(&pod), corev1.EventTypeWarning, eventLimitNotInForce,
				"container %s runs without the annotated limit above its request; what it uses above its request counts as over-use", pod.Containers[i].Name)
		}
	}
	w.unlimited = unlimited
}
