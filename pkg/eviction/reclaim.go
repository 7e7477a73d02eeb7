package eviction

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/apiserver"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
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

// errOutdated means that an attempt evicted nothing because the API server shows other pods than the cache: the watch may have stalled.
var errOutdated = errors.New("the cache is behind the API server")

// errEvictionLost means that it is unknown whether an eviction was made.
var errEvictionLost = errors.New("the answer is lost")

// ReclaimObserver receives what metrics count. Its methods must return at once.
type ReclaimObserver interface {
	// Reclaimed reports the result of an attempt to reclaim memory that had a plan.
	Reclaimed(result reasons.Result)
	// ReclaimEvicted reports how many pods an attempt has evicted, what they had, and how much of that was not needed.
	ReclaimEvicted(pods int, memory, beyond gpu.Memory)
}

// Reclaimer evicts pods of tenants above their share for pods of tenants below theirs. Package reclaim decides which. Disruption budgets are
// respected. A Reclaimer makes one attempt at a time. Its only state is the pods whose eviction was refused.
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

// Reclaim evicts pods so that units of the need get room. It calls hold with the plan before the first eviction; hold returns false if the plan
// is outdated. Reclaim reports whether the places must stay held: because pods were evicted or may have been, or because no evictions were
// needed.
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
		r.observer.Reclaimed(reasons.ResultEvicted)
		return true
	}
	r.observer.Reclaimed(resultOf(err))
	logger.Error(err, "Not all pods evicted from which memory was to be reclaimed", "result", resultOf(err))
	return pods > 0 || errors.Is(err, errEvictionLost)
}

// plan returns a plan that live reads and dry runs have confirmed: its pods still wait, its victims still run, and each eviction would be
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
			return plan, false, err // A refusal after which there is no further plan; nil if there was none.
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
	group := r.NewGroup(maxConcurrent)
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

// dryRun checks whether each eviction of the plan would be granted. Victims whose eviction is refused are spared for a while.
func (r *Reclaimer) dryRun(ctx context.Context, plan reclaim.Plan) error {
	return r.each(plan, func(v reclaim.Eviction, pod gpu.Pod) error { return r.evictOne(ctx, plan, v, pod, true) })
}

// each calls what for each pod that is to be evicted, concurrently, and returns the first error.
func (r *Reclaimer) each(plan reclaim.Plan, what func(reclaim.Eviction, gpu.Pod) error) error {
	group := r.NewGroup(maxConcurrent)
	for _, v := range plan.Victims {
		for _, pod := range v.Pods {
			group.Go(func() error { return what(v, pod) })
		}
	}
	return group.Wait()
}

// evict makes the evictions. It returns the number of the evicted pods, their memory, and the first error.
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
