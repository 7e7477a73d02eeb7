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

// maxReclaimPlans limits the plans of one attempt: after each it is known of some pods or victims that they can't be part of one.
const maxReclaimPlans = 10

// ReclaimObserver receives what metrics count. Its methods must return at once.
type ReclaimObserver interface {
	// Reclaimed reports the result of an attempt to reclaim memory that had a plan.
	Reclaimed(result reasons.Result)
	// PodReclaimed counts a pod that was evicted for a tenant below its share, and what it had.
	PodReclaimed(memory gpu.Memory)
}

// Reclaimer evicts pods of tenants above their share for pods of tenants below theirs. Package reclaim decides which, the Executor evicts them.
// Disruption budgets are respected.
type Reclaimer struct {
	evictor
	executor *Executor
	reads    ReclaimAPI
}

// ReclaimAPI is the part of package apiserver that a Reclaimer uses beside API.
type ReclaimAPI interface {
	NodeAPI
	// Claim and Volume read a PersistentVolumeClaim and a PersistentVolume.
	Claim(ctx context.Context, namespace, name string) (*corev1.PersistentVolumeClaim, error)
	Volume(ctx context.Context, name string) (*corev1.PersistentVolume, error)
}

// NewReclaimer returns a Reclaimer.
func NewReclaimer(x *Executor, reads ReclaimAPI) *Reclaimer {
	return &Reclaimer{evictor: x.evictor, executor: x, reads: reads}
}

// Reclaim evicts pods so that units of the need get room. It calls hold with the plan before the first eviction; hold returns false if the plan
// is outdated. Reclaim returns until when they must stay held: zero if nothing was evicted.
func (r *Reclaimer) Reclaim(ctx context.Context, need reclaim.Need, hold func(reclaim.Plan) bool) (until time.Time) {
	logger := klog.FromContext(ctx)
	plan, ok, err := r.plan(ctx, need)
	switch {
	case err != nil:
		r.Reclaims.Reclaimed(resultOf(err))
		logger.Error(err, "No memory reclaimed for tenants below their share", "result", resultOf(err))
		return time.Time{}
	case !ok || r.Leading() != nil || !hold(plan):
		return time.Time{}
	case !r.stillFits(plan):
		r.Reclaims.Reclaimed(reasons.ResultFailed)
		logger.Info("No memory reclaimed: other pods were placed on the cards before they were reserved", "units", len(plan.Served))
		return time.Time{}
	}
	evicted, until, err := r.executor.Evict(ctx, victims(plan))
	r.report(plan, evicted)
	r.Reclaims.Reclaimed(resultOf(err))
	logger = logger.WithValues("pods", len(evicted), "units", len(plan.Served))
	switch {
	case err != nil && until.IsZero():
		logger.Error(err, "No pod evicted for tenants below their share", "result", resultOf(err))
	case err != nil:
		logger.Error(err, "Not all pods evicted for tenants below their share", "result", resultOf(err))
	case len(evicted) > 0:
		logger.Info("Evicted pods for tenants below their share")
	default:
		logger.Info("Cards reserved for tenants below their share: enough pods end already")
	}
	return until
}

// plan returns a plan that live reads and dry runs have confirmed: its pods still wait, and each eviction of a victim that still runs would be
// granted.
func (r *Reclaimer) plan(ctx context.Context, need reclaim.Need) (plan reclaim.Plan, ok bool, err error) {
	if err := r.Cache.Ready(); err != nil {
		return plan, false, err
	}
	if !r.Cache.BudgetsSynced() {
		return plan, false, fmt.Errorf("%w: disruption budgets are still being listed", clustercache.ErrNotSynced)
	}
	for range maxReclaimPlans {
		plan, ok = reclaim.Choose(need, r.cluster(need))
		if !ok {
			return plan, false, err // A refusal after which there is no further plan; nil if there was none.
		}
		excluded, failed := r.excluded(ctx, plan)
		if failed != nil {
			return plan, false, failed
		} else if len(excluded) > 0 {
			for _, u := range need.Units {
				for i, p := range u.Pods {
					if excludes, found := excluded[p.UID]; found {
						u.Pods[i].Nodes = slices.DeleteFunc(slices.Clone(p.Nodes), excludes)
					}
				}
			}
			continue
		}
		err = r.executor.DryRun(ctx, victims(plan))
		if err == nil {
			return plan, true, nil
		} else if !answered(err) {
			return plan, false, err
		}
	}
	return plan, false, err
}

// excluded returns the pods of the plan that can't be placed on their nodes, each with a function that reports whether it can't use a node.
func (r *Reclaimer) excluded(ctx context.Context, plan reclaim.Plan) (excluded map[gpu.PodUID]func(node string) bool, err error) {
	var mu sync.Mutex
	excluded = map[gpu.PodUID]func(node string) bool{}
	gone := victimUIDs(plan)
	group := r.NewGroup(maxConcurrent)
	for _, served := range plan.Served {
		for i, pod := range served.Pods {
			group.Go(func() error {
				excludes, err := r.excludes(ctx, pod.Pod, served.Places[i].Node, gone)
				mu.Lock()
				defer mu.Unlock()
				if excludes != nil {
					excluded[pod.UID] = excludes
				}
				return err
			})
		}
	}
	return excluded, group.Wait()
}

// excludes reads a pod that waits. If it can't be placed on the node, the result reports of each node whether it can't use it: of all, if it doesn't
// wait any more or lacks a volume; of those that don't reach its volumes; or of this one, for required anti-affinity or a host port.
func (r *Reclaimer) excludes(ctx context.Context, pod gpu.Pod, node string, victims map[gpu.PodUID]bool) (excludes func(node string) bool, err error) {
	all := func(string) bool { return true }
	live, err := r.readUnbound(ctx, pod)
	if errors.Is(err, errOutdated) {
		return all, nil
	}
	if err != nil {
		return nil, err
	}
	volumes, exist, err := r.volumes(ctx, live)
	if err != nil {
		return nil, err
	}
	if !exist {
		return all, nil
	}
	if r.outOfReach(volumes, node) {
		return func(name string) bool { return r.outOfReach(volumes, name) }, nil
	}
	kept, err := r.keptApart(ctx, live, node, victims)
	if kept {
		excludes = func(name string) bool { return name == node }
	}
	return excludes, err
}

// victims returns the victims of a plan with the messages of their Events.
func victims(plan reclaim.Plan) (victims []Victim) {
	for _, v := range plan.Victims {
		what := "Evicted"
		if len(v.Pods) > 1 {
			what = "Evicted with its group"
		}
		victims = append(victims, Victim{
			Pods: IDs(v.Pods...), For: IDs(v.For.Pods[0].Pod)[0], What: what, Cause: ByShare,
			Why: fmt.Sprintf(": tenant %s, and tenant %s", standing(plan, v.For.Tenant), standing(plan, v.Tenant)),
		})
	}
	return victims
}

// standing returns such as "alice has 8 of its share of 16".
func standing(plan reclaim.Plan, tenant string) string {
	return fmt.Sprintf("%s has %s", reasons.TenantName(tenant), plan.Tenants[tenant])
}

// report records Events on the pods that wait.
func (r *Reclaimer) report(plan reclaim.Plan, evicted []gpu.PodUID) {
	for _, served := range plan.Served {
		n, losers := 0, map[string]bool{}
		for _, v := range plan.Victims {
			for _, pod := range v.Pods {
				if v.For.Pods[0].UID == served.Pods[0].UID && slices.Contains(evicted, pod.UID) {
					n, losers[v.Tenant] = n+1, true
				}
			}
		}
		if n == 0 {
			continue
		}
		var texts []string
		for _, name := range slices.Sorted(maps.Keys(losers)) {
			texts = append(texts, standing(plan, name))
		}
		for _, pod := range served.Pods {
			r.Recorder.Eventf(apiserver.Reference(pod.Pod), corev1.EventTypeNormal, EventReclaiming,
				"Evicting %d pod(s), since tenant %s: tenant %s", n, standing(plan, served.Tenant), listed(texts))
		}
	}
}

// listed returns the first of the texts, and how many others there are: an Event's message has a limit of 1024 bytes.
func listed(texts []string) string {
	const most = 5
	if others := len(texts) - most; others > 0 {
		texts = append(slices.Clone(texts[:most]), fmt.Sprintf("and %d more", others))
	}
	return strings.Join(texts, ", ")
}
