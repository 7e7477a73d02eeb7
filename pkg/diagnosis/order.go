package diagnosis

import (
	"fmt"
	"slices"
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Position is where a pending pod is in the queue. The members of a group have one position. All views show it in the words of String: Ahead and
// Since.
type Position struct {
	// Ahead is how many pods and groups come before the pod, of those that wait for memory and have equal constraints: those of higher priority,
	// and older ones of the same priority. What failed lately comes later than this says, and the replacement that a running group lacks comes
	// sooner: only the leader knows them. It is only valid if Queued is true.
	Ahead int
	// Queued is true if the pod waits for memory. A pod that waits for its turn has another order, see reasons.Turn.
	Queued bool
	// Since is since when the pod or its group waits: the creation of the pod, or of the last pod that its group needs, or of its oldest one if
	// pods are missing. It is zero if that is unknown of its group.
	Since time.Time
}

// String returns the position in words; empty if nothing is ahead.
//
// The views that are read on demand show it. It is neither in Events nor in the condition PodScheduled: a pod that is bound changes the position of
// all behind it, so each bind would cost writes, and a changed condition makes kube-scheduler retry the pod.
func (p Position) String() string {
	switch {
	case !p.Queued || p.Ahead == 0:
		return ""
	case p.Ahead == 1:
		return "1 pod or group is ahead of it"
	}
	return fmt.Sprintf("%d pods or groups are ahead of it", p.Ahead)
}

// setPositions sets the positions of the pods, whose diagnoses are all. waits are what their groups wait for.
func (d *Diagnoser) setPositions(all []Diagnosis, pods []*Pod, waits []*GroupWait) {
	items := map[string]*ledger.Item{}
	queues := map[unique.Handle[string]][]*ledger.Item{} // By Pod.Constraints.
	itemOf := make([]*ledger.Item, len(pods))            // nil for a pod that isn't queued.
	for i, pod := range pods {
		position := &all[i].Position
		*position = Position{Since: pod.Created, Queued: !d.podsOnly && queued(all[i].Reason, pod, waits[i])}
		if waits[i] != nil {
			position.Since = waits[i].Since
		}
		if position.Queued {
			itemOf[i] = addTo(items, pod, waits[i])
			queues[pod.Constraints] = append(queues[pod.Constraints], itemOf[i])
		}
	}
	for constraints, queue := range queues {
		slices.SortFunc(queue, (*ledger.Item).Compare)
		queues[constraints] = slices.Compact(queue) // Each member has added its group.
	}
	for i, pod := range pods {
		if itemOf[i] != nil {
			all[i].Position.Ahead, _ = slices.BinarySearchFunc(queues[pod.Constraints], itemOf[i], (*ledger.Item).Compare)
		}
	}
}

// addTo returns the pod's item, which it adds to the items by their IDs. It is a ledger.Item as far as the pods of the API server show it.
func addTo(items map[string]*ledger.Item, pod *Pod, wait *GroupWait) *ledger.Item {
	id := ledger.PodItemID(pod.Pod)
	if wait != nil {
		id = fmt.Sprint("group ", wait.Native, " ", wait.Group)
	}
	item := items[id]
	if item == nil {
		item = &ledger.Item{ID: id, CompletesGroup: wait != nil && wait.Reason.Broken(), Priority: pod.Priority, Entered: pod.Created}
		items[id] = item
	}
	item.Priority = min(item.Priority, pod.Priority)
	if pod.Created.Before(item.Entered) {
		item.Entered = pod.Created
	}
	return item
}

// queued reports whether a pod with this reason waits for memory: it runs as soon as it gets some.
func queued(reason reasons.Reason, pod *Pod, wait *GroupWait) bool {
	switch reason {
	case reasons.ReservedForOther, reasons.KeptForNominated, reasons.FailedCard, reasons.WaitsForTermination, reasons.Crowded, reasons.Fragmented, reasons.Full:
		return true
	case reasons.WaitsForGroup:
		return wait != nil && !wait.Reason.Incomplete()
	case reasons.OtherConstraint: // The queue also counts CPU and other resources.
		return reasons.LacksResources(pod.Message)
	}
	return false
}
