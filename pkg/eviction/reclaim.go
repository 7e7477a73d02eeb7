package eviction

import (
	"context"
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
}

// NewReclaimer returns a Reclaimer.
func NewReclaimer(x *Executor) *Reclaimer {
	return &Reclaimer{evictor: x.evictor, executor: x}
}

// Reclaim evicts pods so that items of the need get room. It calls hold with the plan before the first eviction; hold returns false if the plan
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
		logger.Info("No memory reclaimed: other pods were placed on the cards before they were reserved", "items", len(plan.Served))
		return time.Time{}
	}
	until, err = r.executor.Evict(ctx, victims(plan))
	r.Reclaims.Reclaimed(resultOf(err))
	logger = logger.WithValues("victims", len(plan.Victims), "items", len(plan.Served))
	if until.IsZero() {
		logger.Error(err, "No pod evicted for tenants below their share", "result", resultOf(err))
		return until
	}
	r.report(plan)
	if err != nil {
		logger.Error(err, "Not all pods evicted for tenants below their share", "result", resultOf(err))
	} else {
		logger.Info("Reserved cards for tenants below their share, and evicted the victims")
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
	late := false
	for range maxReclaimPlans {
		plan, ok = reclaim.Choose(need, r.cluster(need))
		if !ok {
			return plan, false, err // A refusal after which there is no further plan; nil if there was none.
		}
		if placeable, failed := r.narrow(ctx, need, plan); failed != nil {
			return plan, false, failed
		} else if !placeable {
			continue
		}
		err = r.executor.DryRun(ctx, victims(plan))
		switch {
		case err == nil:
			return plan, true, nil
		case timedOut(err) && !late: // One more: if no webhook answers, each takes many times as long, and other attempts wait.
			late = true
		case !answered(err):
			return plan, false, err
		}
	}
	return plan, false, err
}

// narrow reads the pods of a plan. If one can't be placed on its node, it gets only the nodes in the need that it can use, and placeable is false.
func (r *Reclaimer) narrow(ctx context.Context, need reclaim.Need, plan reclaim.Plan) (placeable bool, err error) {
	var mu sync.Mutex
	usable := map[gpu.PodUID][]string{}
	gone := victimUIDs(plan)
	group := r.NewGroup(maxConcurrent)
	for _, served := range plan.Served {
		for i, pod := range served.Pods {
			node := served.Places[i].Node
			group.Go(func() error {
				nodes, err := r.usableNodes(ctx, pod, node, gone)
				mu.Lock()
				defer mu.Unlock()
				if !slices.Contains(nodes, node) {
					usable[pod.UID] = nodes
				}
				return err
			})
		}
	}
	if err := group.Wait(); err != nil {
		return false, err
	}
	for _, item := range need.Items {
		for i, p := range item.Pods {
			if nodes, narrower := usable[p.UID]; narrower {
				item.Pods[i].Nodes = nodes
			}
		}
	}
	return len(usable) == 0, nil
}

// victims returns the victims of a plan with the messages of their Events.
func victims(plan reclaim.Plan) (victims []Victim) {
	for _, v := range plan.Victims {
		group, pod := "", v.For.Pods[0].Pod
		if len(v.Pods) > 1 {
			group = " with its group"
		}
		victims = append(victims, Victim{
			Pods: IDs(v.Pods...), For: IDs(pod)[0], Cause: ByShare,
			Message: fmt.Sprintf("Evicted%s for pod %s: tenant %s, and tenant %s", group, pod, standing(plan, v.For.Tenant), standing(plan, v.Tenant)),
		})
	}
	return victims
}

// standing returns such as "alice has 8 of its share of 16".
func standing(plan reclaim.Plan, tenant string) string {
	return fmt.Sprintf("%s has %s", reasons.TenantName(tenant), plan.Tenants[tenant])
}

// report records Events on the pods that wait.
func (r *Reclaimer) report(plan reclaim.Plan) {
	for _, served := range plan.Served {
		n, losers := 0, map[string]bool{}
		for _, v := range plan.Victims {
			if v.For.Pods[0].UID == served.Pods[0].UID {
				n, losers[v.Tenant] = n+len(v.Pods), true
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
