package scheduling

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/queue"
)

// ReservationOptions configure awaited reservations, see package queue.
type ReservationOptions struct {
	// MaxIdle is the part of the memory up to which items behind the first may have reservations; 0 turns all reservations off.
	MaxIdle float64
	// MaxAge is how long pods may have run on reserved cards.
	MaxAge time.Duration
}

// waitingInterval is the interval between two passes.
const waitingInterval = 250 * time.Millisecond

// waiting passes what waits for memory to a queue.Reserver: groups, items of fair sharing, and single pods that kube-scheduler has rejected.
type waiting struct {
	reserver *queue.Reserver
	cache    clusterCache
	ledger   *ledger.Ledger
	groups   *groups
	fair     *fairShare
	nodes    *eligibility.Cluster
	leading  func() error
	clock    clock.WithTicker
}

// run makes passes until ctx ends.
func (w *waiting) run(ctx context.Context) error {
	defer w.reserver.Stop()
	return background.Every(ctx, w.clock, waitingInterval, func(context.Context) { w.tick() })
}

// tick makes a pass if this process is the leader, and ends all reservations if it isn't.
func (w *waiting) tick() {
	if w.leading() != nil || w.cache.Ready() != nil {
		w.reserver.Stop()
		return
	}
	if w.reserver.MaxIdle <= 0 {
		return
	}
	now := w.clock.Now()
	items := append(w.pods(now), w.groups.manager.Waiting(now)...)
	if w.fair != nil {
		items = append(items, w.fair.manager.Waiting()...)
	}
	w.reserver.Pass(items, now)
}

// podKey is equal for pods with the same requests and rank. completesGroup is ledger.Item.CompletesGroup.
type podKey struct {
	namespace      string
	shape          placement.Shape
	others         string // PodUse.OtherRequests.
	priority       int32
	completesGroup bool
}

// String returns a text that is equal for equal values, also after the constraints have been collected and made again.
func (a podKey) String() string {
	return fmt.Sprint(a.namespace, " ", a.shape.Demand, " ", a.shape.NodeResources, " ", a.others, " ", a.priority, " ", a.completesGroup, " ", a.shape.Constraints.Value())
}

// pods returns the single pods that kube-scheduler has rejected. Of pods that are alike it returns the first.
func (w *waiting) pods(now time.Time) (items []queue.Item) {
	first := map[podKey]*clustercache.PodInfo{}
	completing := map[gang.Key][]gpu.PodUID{}
	for _, pod := range w.cache.Pending() {
		if !w.mayBeItem(pod) {
			continue
		}
		key := podKey{pod.Namespace, pod.Shape(), pod.OtherRequests(), pod.Priority, w.replaces(pod, completing, now)}
		if earliest := first[key]; earliest == nil || entersBefore(pod, earliest) {
			first[key] = pod
		}
	}
	for key, pod := range first {
		shape := key
		shape.completesGroup = false // It changes with each bind of another member, and the pod's failures are remembered.
		id := ledger.PodItemID(pod.Pod)
		items = append(items, queue.Item{
			Item: ledger.Item{
				ID: id, Label: "pod " + pod.String(), CompletesGroup: key.completesGroup, Priority: pod.Priority, Entered: pod.Pending.Created,
			},
			RoomKey: key.String(),
			Profile: queue.Profile{
				Namespace: pod.Namespace, ID: id, ShapeKey: shape.String(), Size: queue.Size{Memory: pod.Request}, CompletesGroup: key.completesGroup,
			},
			ByKubeScheduler: true,
			Requests: func() []ledger.Request {
				return []ledger.Request{{Pod: pod.Pod, Nodes: w.nodes.UsableNodes(pod.Constraints)}}
			},
		})
	}
	return items
}

// mayBeItem reports whether the pod may be an item of its own. A pod with constraints that only kube-scheduler knows isn't one: it may not run even if
// its memory is free.
func (w *waiting) mayBeItem(pod *clustercache.PodInfo) bool {
	if pod.Request == 0 || !pod.Pending.Rejected || pod.Gated || pod.GatedOtherwise || pod.RequestError != "" || pod.NominatedNode != "" || pod.Constrained() {
		return false
	}
	if w.groups.memberOf(pod) != nil {
		if _, whole := w.groups.manager.Membership(pod.UID); !whole {
			return false
		}
	}
	return !w.ledger.NeedsTurn(pod.Pod)
}

// replaces reports whether the pod is a member that a running group lacks. completing has the answers for the groups that were asked about in this pass.
func (w *waiting) replaces(pod *clustercache.PodInfo, completing map[gang.Key][]gpu.PodUID, now time.Time) bool {
	member := w.groups.memberOf(pod)
	if member == nil {
		return false
	}
	if _, asked := completing[member.Gang]; !asked {
		completing[member.Gang] = w.groups.manager.Startable(member.Gang, now).Completing
	}
	return slices.Contains(completing[member.Gang], pod.UID)
}

// entersBefore orders the pods of a namespace as their items: by creation, then by name.
func entersBefore(a, b *clustercache.PodInfo) bool {
	return cmp.Or(a.Pending.Created.Compare(b.Pending.Created), cmp.Compare(a.Name, b.Name), cmp.Compare(a.UID, b.UID)) < 0
}
