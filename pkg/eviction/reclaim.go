package eviction

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/apiserver"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reclaim"
)

// The reasons of the Events of a reclaim: EventReclaimed on the victim, EventReclaiming on the pods for which it is evicted.
const (
	EventReclaimed  = "FairShareEvicted"
	EventReclaiming = "FairShareEvicting"
)

// maxReclaimPlans limits the plans of one attempt: after each, dry runs have shown which victims can't be evicted.
const maxReclaimPlans = 3

// planLife limits the time for evictions after a plan was checked: shares and cards change meanwhile.
const planLife = time.Minute

// errOutdated is wrapped by the error of an attempt that is not made because the API server shows other pods than the cache: the watch
// may have stalled.
var errOutdated = errors.New("the cache is behind the API server")

// errEvictionLost is wrapped by the error of an eviction that may have been made.
var errEvictionLost = errors.New("the answer is lost")

// ReclaimObserver receives what metrics count. Its methods must return at once.
type ReclaimObserver interface {
	// Reclaimed reports the result of an attempt to reclaim memory that had a plan.
	Reclaimed(result string)
	// ReclaimEvicted reports how many pods an attempt has evicted, what they had, and how much of that was not needed.
	ReclaimEvicted(pods int, memory, beyond gpu.Memory)
}

// Reclaimer evicts pods of tenants above their share for pods of tenants below theirs. Package reclaim decides which; budgets hold.
// It makes one attempt at a time, and keeps nothing but the pods whose eviction was refused.
type Reclaimer struct {
	Options
	observer ReclaimObserver
	capacity func() reclaim.Capacity

	mu     sync.Mutex
	spared pauses
}

// NewReclaimer returns a Reclaimer. capacity returns a new count of what nodes have besides GPU memory.
func NewReclaimer(o Options, observer ReclaimObserver, capacity func() reclaim.Capacity) *Reclaimer {
	return &Reclaimer{Options: o, observer: observer, capacity: capacity, spared: pauses{}}
}

// Reclaim evicts pods so that units of the need get room. hold is called with the plan before the first eviction, and returns false if
// the plan is not right any more. Reclaim reports whether the places must be held now: pods were evicted, or may have been, or none
// need be.
func (r *Reclaimer) Reclaim(ctx context.Context, need reclaim.Need, hold func(reclaim.Plan) bool) (made bool) {
	logger := klog.FromContext(ctx)
	plan, ok, err := r.plan(ctx, need)
	switch {
	case err != nil:
		r.observer.Reclaimed(resultOf(err))
		logger.Error(err, "No memory reclaimed for tenants below their share", "result", resultOf(err))
		return false
	case !ok || r.Leading() != nil || !hold(plan):
		return false
	case !r.stillFits(plan):
		return false // Other pods were placed there before the places were held.
	}
	ctx, cancel := context.WithTimeout(ctx, planLife)
	defer cancel()
	pods, memory, err := r.evict(ctx, plan)
	if pods > 0 {
		r.observer.ReclaimEvicted(pods, memory, min(plan.Beyond, memory))
		logger.Info("Evicted pods for tenants below their share", "pods", pods, "memory", memory.String(), "units", len(plan.Served))
	}
	if err == nil {
		r.observer.Reclaimed(EvictedAll)
		return true
	}
	r.observer.Reclaimed(resultOf(err))
	logger.Error(err, "Not all pods evicted from which memory was to be reclaimed", "result", resultOf(err))
	return pods > 0 || errors.Is(err, errEvictionLost)
}

// plan returns a plan for pods that still wait, with victims that still run, according to live reads, of which each eviction would be
// granted.
func (r *Reclaimer) plan(ctx context.Context, need reclaim.Need) (plan reclaim.Plan, ok bool, err error) {
	if err := r.Cache.Ready(); err != nil {
		return plan, false, err
	}
	if !r.Cache.BudgetsSynced() {
		return plan, false, fmt.Errorf("%w: disruption budgets are still being listed", clustercache.ErrNotSynced)
	}
	r.mu.Lock()
	r.spared.prune(r.Clock.Now())
	r.mu.Unlock()
	need = r.withUsableNodes(need)
	for range maxReclaimPlans {
		if plan, ok = reclaim.Choose(need, r.cluster(need)); !ok {
			return plan, false, err // The refusals after which there is no plan any more.
		}
		var gone bool
		if need.Units, gone, err = r.stillWaiting(ctx, need.Units, plan); err != nil {
			return plan, false, err
		} else if gone {
			continue
		}
		if err = r.each(plan, func(_ reclaim.Eviction, pod gpu.Pod) error { return r.stillRuns(ctx, pod) }); err != nil {
			return plan, false, err
		}
		if err = r.dryRun(ctx, plan); err == nil {
			return plan, true, nil
		} else if !answered(err) {
			return plan, false, err
		}
	}
	return plan, false, err
}

// stillWaiting reads the pods of the plan, and returns the units without those of which a pod is gone or bound. gone reports whether
// there are any.
func (r *Reclaimer) stillWaiting(ctx context.Context, units []reclaim.Unit, plan reclaim.Plan) (left []reclaim.Unit, gone bool, err error) {
	var mu sync.Mutex
	lost := map[gpu.PodUID]bool{}
	group := new(errgroup.Group)
	group.SetLimit(maxConcurrent)
	for _, served := range plan.Served {
		for _, pod := range served.Pods {
			group.Go(func() error {
				live, err := r.readLive(ctx, pod.Pod)
				if err == nil && (live == nil || live.Spec.NodeName != "") {
					mu.Lock()
					defer mu.Unlock()
					lost[pod.UID] = true
				}
				return err
			})
		}
	}
	if err := group.Wait(); err != nil {
		return units, false, err
	}
	left = slices.DeleteFunc(slices.Clone(units), func(u reclaim.Unit) bool {
		return slices.ContainsFunc(u.Pods, func(p reclaim.Pod) bool { return lost[p.UID] })
	})
	return left, len(lost) > 0, nil
}

// stillRuns returns an error if the pod, which is bound according to the cache, is not.
func (r *Reclaimer) stillRuns(ctx context.Context, pod gpu.Pod) error {
	live, err := r.readLive(ctx, pod)
	if err == nil && (live == nil || live.Spec.NodeName == "") {
		return fmt.Errorf("%w: pod %s has ended or is being deleted", errOutdated, pod)
	}
	return err
}

// readLive reads a pod; nil if it is gone, has ended, or is being deleted.
func (o *Options) readLive(ctx context.Context, pod gpu.Pod) (*corev1.Pod, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	live, err := o.API.Pod(ctx, pod.Namespace, pod.Name)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("reading pod %s: %w", pod, err)
	case gpu.PodUID(live.UID) != pod.UID || live.DeletionTimestamp != nil || protocol.Terminal(live):
		return nil, nil
	}
	return live, nil
}

// dryRun asks whether each eviction of the plan would be granted. The victims for which it wouldn't are spared for a while.
func (r *Reclaimer) dryRun(ctx context.Context, plan reclaim.Plan) error {
	return r.each(plan, func(v reclaim.Eviction, pod gpu.Pod) error { return r.evictOne(ctx, plan, v, pod, true) })
}

// each calls what for each pod that is to be evicted, some at a time, and returns the first error.
func (r *Reclaimer) each(plan reclaim.Plan, what func(reclaim.Eviction, gpu.Pod) error) error {
	group := new(errgroup.Group)
	group.SetLimit(maxConcurrent)
	for _, v := range plan.Victims {
		for _, pod := range v.Pods {
			group.Go(func() error { return what(v, pod) })
		}
	}
	return group.Wait()
}

// evict makes the evictions. It returns how many were made, of which memory, and the first error.
func (r *Reclaimer) evict(ctx context.Context, plan reclaim.Plan) (pods int, memory gpu.Memory, err error) {
	var mu sync.Mutex
	evicted, tenants := map[gpu.PodUID]int{}, map[gpu.PodUID]map[string]bool{}
	err = r.each(plan, func(v reclaim.Eviction, pod gpu.Pod) error {
		if err := r.evictOne(ctx, plan, v, pod, false); err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		pods, memory = pods+1, memory.Add(pod.Request)
		beneficiary := v.For.Pods[0].UID
		if evicted[beneficiary]++; tenants[beneficiary] == nil {
			tenants[beneficiary] = map[string]bool{}
		}
		tenants[beneficiary][v.Tenant] = true
		return nil
	})
	for _, served := range plan.Served {
		if n := evicted[served.Pods[0].UID]; n > 0 {
			var losers []string
			for _, name := range slices.Sorted(maps.Keys(tenants[served.Pods[0].UID])) {
				losers = append(losers, fmt.Sprintf("%s has %s", name, plan.Tenants[name]))
			}
			for _, pod := range served.Pods {
				r.Recorder.Eventf(apiserver.Reference(pod.Pod), corev1.EventTypeNormal, EventReclaiming,
					"Evicting %d pod(s), since tenant %s has %s: tenant %s", n, served.Tenant, plan.Tenants[served.Tenant], listed(losers))
			}
		}
	}
	return pods, memory, err
}

// listed returns the first of the texts, and how many others there are: an Event's message has a limit of 1024 bytes.
func listed(texts []string) string {
	const most = 5
	if others := len(texts) - most; others > 0 {
		texts = append(slices.Clone(texts[:most]), fmt.Sprintf("and %d more", others))
	}
	return strings.Join(texts, ", ")
}

// evictOne requests one eviction. A pod that is gone is no error.
func (r *Reclaimer) evictOne(ctx context.Context, plan reclaim.Plan, v reclaim.Eviction, pod gpu.Pod, dryRun bool) error {
	if err := r.Leading(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("evicting pod %s: %w", pod, err)
	}
	gone, err := r.call(ctx, pod, dryRun)
	switch {
	case err != nil:
		if answered(err) {
			r.spare(v)
		}
		if !dryRun && apiserver.OutcomeOf(err) != apiserver.Rejected {
			err = fmt.Errorf("%w: %w", errEvictionLost, err)
		}
		return fmt.Errorf("evicting pod %s: %w", pod, err)
	case gone || dryRun:
		return nil
	}
	why := "Evicted"
	if len(v.Pods) > 1 {
		why = "Evicted with its group"
	}
	r.Recorder.Eventf(apiserver.Reference(pod), corev1.EventTypeNormal, EventReclaimed, "%s for pod %s: tenant %s has %s, and tenant %s has %s",
		why, v.For.Pods[0], v.For.Tenant, plan.Tenants[v.For.Tenant], v.Tenant, plan.Tenants[v.Tenant])
	return nil
}

// spare keeps a victim out of plans for a while.
func (r *Reclaimer) spare(v reclaim.Eviction) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, pod := range v.Pods {
		if !r.spared.has(pod.UID, r.Clock.Now()) { // Another member of its group may have been refused too.
			r.spared.extend(pod.UID, r.Clock.Now(), victimPause, longestPause)
		}
	}
}

// stillFits reports whether the places of the plan, which are held now, have room once its victims are gone.
func (r *Reclaimer) stillFits(plan reclaim.Plan) bool {
	type victim struct {
		uid gpu.PodUID
		on  gpu.Placement
	}
	victims := map[string][]victim{}
	for _, v := range plan.Victims {
		for _, pod := range v.Pods {
			if node, allocation, held := r.Ledger.Lookup(pod.UID); held {
				victims[node] = append(victims[node], victim{pod.UID, allocation.Placement})
			}
		}
	}
	state := reclaim.Cluster{Leaving: map[string][]gpu.PodUID{}, Capacity: r.capacity()}
	for _, served := range plan.Served {
		nodes := map[string][]placement.Card{} // As the unit sees them: the places of other units count as used.
		lowest := slices.MinFunc(served.Pods, byPriority).Pod
		for _, place := range served.Places {
			cards, known := nodes[place.Node]
			if !known {
				cards = r.cards(place.Node, lowest, &state)
				for _, v := range victims[place.Node] {
					if !slices.Contains(state.Leaving[place.Node], v.uid) {
						reclaim.Free(cards, v.on)
					}
				}
				nodes[place.Node] = cards
			}
			if !reclaim.Use(cards, place.On) {
				return false
			}
		}
	}
	return true
}

// cluster returns the state in which the decision is made: of the nodes that could hold one of the pods, or one that moves.
func (r *Reclaimer) cluster(need reclaim.Need) reclaim.Cluster {
	out := reclaim.Cluster{
		Cards: map[string][]placement.Card{}, Leaving: map[string][]gpu.PodUID{}, Places: map[gpu.PodUID]reclaim.Place{},
		Capacity: r.capacity(), Budgets: map[gpu.PodUID][]int{},
	}
	budgets := budgets{cache: r.Cache, namespaces: map[string][]budget{}}
	for _, v := range need.Victims {
		for _, pod := range v.Pods {
			if place, numbers, ok := r.candidate(pod, &budgets); ok {
				out.Places[pod.UID], out.Budgets[pod.UID] = place, numbers
			}
		}
	}
	out.Allowed = budgets.allowed
	var pods []reclaim.Pod
	for _, u := range need.Units {
		pods = append(pods, u.Pods...)
	}
	slices.SortStableFunc(pods, byPriority) // Pods with a higher priority see at least as much room.
	seen := map[*string]bool{}
	for _, pod := range pods {
		if len(pod.Nodes) == 0 || seen[&pod.Nodes[0]] {
			continue // Pods that are alike share the slice.
		}
		seen[&pod.Nodes[0]] = true
		for _, name := range pod.Nodes {
			if _, known := out.Cards[name]; !known {
				out.Cards[name] = r.cards(name, pod.Pod, &out)
			}
		}
	}
	for name := range need.Regions { // Pods may move there.
		if _, known := out.Cards[name]; !known && len(pods) > 0 {
			out.Cards[name] = r.cards(name, pods[0].Pod, &out)
		}
	}
	return out
}

// byPriority orders pods: that with the lowest priority first.
func byPriority(a, b reclaim.Pod) int { return cmp.Compare(a.Priority, b.Priority) }

// withUsableNodes returns the need with only those nodes of each pod on which evictions can make room for it.
func (r *Reclaimer) withUsableNodes(need reclaim.Need) reclaim.Need {
	type like struct {
		nodes  *string
		demand gpu.Demand
	}
	usable := map[like][]string{}
	need.Units = slices.Clone(need.Units)
	for i, u := range need.Units {
		need.Units[i].Pods = slices.Clone(u.Pods)
		for j, pod := range u.Pods {
			if len(pod.Nodes) == 0 {
				continue
			}
			key := like{&pod.Nodes[0], pod.Demand()}
			if _, known := usable[key]; !known {
				r.Ledger.Check(pod.Pod, pod.Nodes, func(name string, reason placement.Reason) {
					if !reason.Unresolvable() {
						usable[key] = append(usable[key], name)
					}
				})
			}
			need.Units[i].Pods[j].Nodes = usable[key]
		}
	}
	return need
}

// candidate returns where a pod is that may be evicted, and the numbers of its budgets. ok is false if its end would free nothing for
// certain, or its eviction is likely to be rejected: see Evictor.evictable.
func (r *Reclaimer) candidate(pod gpu.Pod, b *budgets) (place reclaim.Place, numbers []int, ok bool) {
	info, known := r.Cache.Pod(pod.Namespace, pod.Name)
	node, allocation, held := r.Ledger.Lookup(pod.UID)
	if !known || info.UID != pod.UID || info.Mirror || !held || !certain(&allocation) {
		return place, nil, false
	}
	numbers = b.of(info)
	r.mu.Lock()
	defer r.mu.Unlock()
	return reclaim.Place{Node: node, On: allocation.Placement}, numbers, len(numbers) < 2 && !r.spared.has(pod.UID, r.Clock.Now())
}

// cards returns the cards of a node as the pod sees them, with the pods gone that are being deleted. It returns none if the node
// doesn't share its cards.
func (r *Reclaimer) cards(name string, pod gpu.Pod, cluster *reclaim.Cluster) []placement.Card {
	available, _ := r.Ledger.Availability(name, pod)
	for i := range available.Allocations {
		a := &available.Allocations[i]
		if !a.Leaving {
			continue
		}
		delete(cluster.Places, a.UID) // A candidate that is being deleted by now would count twice.
		if info, known := r.Cache.Pod(a.Namespace, a.Name); !certain(a) || known && info.UID == a.UID && !frees(info, r.Clock.Now()) {
			continue
		}
		reclaim.Free(available.Cards, a.Placement)
		cluster.Capacity.Evict(name, a.UID)
		cluster.Leaving[name] = append(cluster.Leaving[name], a.UID)
	}
	slices.Sort(cluster.Leaving[name])
	return available.Cards
}
