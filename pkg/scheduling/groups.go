package scheduling

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/apiserver"
	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/binding"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/pkg/requeue"
	"github.com/gpushare/gpushare/pkg/sampling"
)

// GangOptions configure gangs: groups of pods that are bound all together or not at all.
type GangOptions struct {
	// Hold is how long a member's bind call is held at most; 0 disables gangs. The sum of Hold and BindTimeout must be
	// less than kube-scheduler's httpTimeout.
	Hold time.Duration
	// Patience is how long a plan's reservations last while members are missing, and how long a run may stay broken. Without gangs too, it is how long
	// the place of a pod whose turn by fair sharing has come lasts.
	Patience time.Duration
	// OnFailure is what happens to the bound members of a run that is still broken after Patience.
	OnFailure gang.FailurePolicy
	// Native makes the pods of a PodGroup (spec.schedulingGroup) a gang, if the API server has PodGroups. Otherwise they are treated
	// like pods without a group.
	Native bool
	// Observer receives the events of gangs, for metrics.
	Observer gang.Observer
	// Answering returns why this process no longer answers kube-scheduler, or nil if it does. If it doesn't, no further
	// members arrive, and held binds would only delay the processes that wait for them. It is nil if there is only one
	// extender.
	Answering func() error
}

const (
	// tickInterval is the interval between two calls of the Tick of groups and fair sharing. It is also the pause between attempts to bind
	// a member whose barrier has opened.
	tickInterval = 100 * time.Millisecond
	// deletedDelay is how long the rejection of held binds is delayed after a member of the gang was deleted.
	// kube-scheduler may have deleted the member itself, as a victim of a preemptor. When the members with rejected binds leave its
	// cache, it retries the preemptor. But if its own watch hasn't reported the deletion by then, it skips the preemptor, which then waits
	// for minutes (k8s.io/kubernetes pkg/scheduler/framework/preemption/executor.go, isRunningPreemption).
	deletedDelay = time.Second
)

// groups connects a gang.Manager to the cluster: it passes in the events and the time, and performs the Effects. If Hold is 0, the Manager has no
// members, and pods of gangs are treated like any other pod.
type groups struct {
	GangOptions
	// nominator nominates members whose places are outside the sample of a filter call.
	nominator *sampling.Nominator
	manager   *gang.Manager
	cache     clusterCache
	binder    *binding.Binder
	requeue   *requeue.Requeuer
	evictor   interface{ Evict(pods []gpu.Pod) }
	verifier  interface{ Verify(pods []gpu.Pod) }
	recorder  record.EventRecorder
	leading   func() error
	// bindTimeout limits the binds of a gang's members, from the moment in which its barrier opens.
	bindTimeout time.Duration
	clock       clock.WithTicker
	// native is true once it is known that the API server has PodGroups, if GangOptions.Native is.
	native atomic.Bool
}

// memberOf returns the pod as a member of its gang; nil for a pod that is treated like one without a group.
func (g *groups) memberOf(pod *clustercache.PodInfo) *gang.Member {
	if g.Hold == 0 || pod.Member == nil || pod.Member.Gang.Native && !g.native.Load() {
		return nil
	}
	return pod.Member
}

// filter answers a filter call for a member of a gang. decided is false if the pod is to be placed like any single pod.
func (g *groups) filter(pod *clustercache.PodInfo, nodes []string) (result FilterResult, decided bool) {
	if g.memberOf(pod) == nil {
		return FilterResult{}, false
	}
	uid := pod.UID
	answer := gang.FilterResult{Reason: reasons.GroupUnknown} // The pending pods are requeued after the cache sync.
	if g.cache.Ready() == nil {
		answer = g.manager.Filter(uid, nodes, g.nominator.Offered(pod, nodes), g.clock.Now())
		g.act()
		if answer.Outside == "" {
			g.nominator.Passed(uid)
		} else {
			g.nominator.RequestNode(uid, answer.Outside)
		}
		if answer.Alone {
			return FilterResult{}, false
		}
		g.requeue.ForgetRejection(uid) // The manager requeues the pod.
	}
	result = FilterResult{Nodes: nodes, Message: answer.Reason.Text()}
	allowed := answer.Nodes // In the order of nodes; these can be thousands.
	for i, name := range nodes {
		if len(allowed) > 0 && name == allowed[0] {
			result.Passed, allowed = append(result.Passed, placement.Candidate{Node: i}), allowed[1:]
		}
	}
	if len(result.Passed) == 0 {
		g.nominator.Rejected(uid, nodes)
	}
	return result, true
}

// incomplete reports whether the pod is a member of a gang that isn't known to be whole.
func (g *groups) incomplete(pod *clustercache.PodInfo) bool {
	if g.memberOf(pod) == nil {
		return false
	}
	_, whole := g.manager.Membership(pod.UID)
	return !whole
}

// isPending reports whether the pod is a member of a gang that isn't whole, and isn't bound. kube-scheduler counts it on its node while its bind is held.
func (g *groups) isPending(uid gpu.PodUID) bool {
	pod, pending := g.cache.PendingPod(uid)
	return pending && g.incomplete(pod)
}

// permit is what a bind needs.
type permit struct {
	// gang is granted by the pod's gang; nil for a pod without one.
	gang *gang.Permit
	// deadline is when the bind must have ended.
	deadline time.Time
}

// membership returns what the Binding records about the gang.
func (p permit) membership() binding.Membership {
	if p.gang == nil {
		return binding.Membership{}
	}
	return binding.Membership{Run: p.gang.Run, Whole: p.gang.MarkWhole}
}

// awaitPermit holds a member's bind call until the permit of its gang is decided. The caller of a permit must call end.
func (g *groups) awaitPermit(ctx context.Context, uid gpu.PodUID, node string) (permit, error) {
	requested, err := g.arrive(ctx, uid, node)
	if err != nil {
		return permit{}, err
	}
	select {
	case <-requested.Decided:
	case <-ctx.Done():
		if g.manager.CancelPermit(uid, requested, g.clock.Now()) {
			return permit{}, fmt.Errorf("kube-scheduler gave the call up: %w", ctx.Err())
		}
		<-requested.Decided // The permit was granted meanwhile.
	}
	return g.outcome(requested)
}

// arrive requests the permit for a member's bind call. First it confirms the node, so that the check of the member's place includes the binds
// of former leaders there.
func (g *groups) arrive(ctx context.Context, uid gpu.PodUID, node string) (*gang.Permit, error) {
	ctx, cancel := context.WithTimeout(ctx, g.bindTimeout)
	defer cancel()
	if err := g.binder.ConfirmNode(ctx, node); err != nil {
		return nil, err
	}
	defer g.act()
	return g.manager.RequestPermit(uid, node, g.clock.Now()), nil
}

// outcome returns the permit, or why it was rejected.
func (g *groups) outcome(requested *gang.Permit) (permit, error) {
	if rejection := requested.Rejection; rejection != nil {
		if *rejection == reasons.GroupDeleted {
			<-g.clock.After(min(deletedDelay, g.bindTimeout))
		}
		return permit{}, *rejection
	}
	deadline := requested.OpenedAt.Add(g.bindTimeout)
	if enough := g.clock.Now().Add(g.bindTimeout / 2); enough.After(deadline) {
		deadline = enough // The last member waited long for the others, because the answer to one of their binds was lost.
	}
	return permit{requested, deadline}, nil
}

// end ends a bind's claim, and records the outcome of a permitted bind. err is nil if the pod is bound.
//
// Otherwise end gives up the plan's reservation, while the claim lasts: as soon as the manager learns that the bind has failed, a new plan can
// reserve another place for the pod. If no write of the pod is open then, the bind has failed.
func (g *groups) end(claim *binding.Claim, uid gpu.PodUID, node string, p permit, err error) {
	if p.gang != nil && err != nil {
		claim.Abandon()
	}
	noWrite := claim.End()
	switch {
	case p.gang == nil:
	case err == nil:
		g.manager.Bound(uid, node, p.gang, g.clock.Now())
		g.act()
	case noWrite:
		g.notBound(uid)
	}
}

// inFlight records that a permitted bind wasn't made because another bind of the pod is in flight. When that one ends, notBound or a bound pod
// follows, unless it has ended already.
func (g *groups) inFlight(uid gpu.PodUID, p permit) {
	if p.gang != nil && g.binder.Release(uid) {
		g.notBound(uid)
	}
}

// notBound records that a bind has failed for certain.
func (g *groups) notBound(uid gpu.PodUID) {
	g.manager.NotBound(uid, g.clock.Now())
	g.act()
}

// confirmed passes the state of a pod that a live read found to the manager.
func (g *groups) confirmed(pod *clustercache.PodInfo) {
	if m := g.memberOf(pod); m != nil {
		g.manager.Confirmed(*m, g.clock.Now())
		g.act()
	}
}

// confirmedGone passes to the manager that a live read found no such pod.
func (g *groups) confirmedGone(uid gpu.PodUID) {
	g.manager.ConfirmedGone(uid, g.clock.Now())
	g.act()
}

// updated passes the state of a pod to the manager, or removes it if it no longer names a group. old is nil for a new pod.
func (g *groups) updated(old, pod *clustercache.PodInfo) {
	if m := g.memberOf(pod); m != nil {
		g.manager.SetMember(*m, g.clock.Now())
	} else if old != nil {
		g.deleted(old)
	}
}

// deleted removes the pod from the manager.
func (g *groups) deleted(pod *clustercache.PodInfo) {
	if g.memberOf(pod) != nil {
		g.manager.RemoveMember(pod.UID, g.clock.Now())
	}
}

// PodGroupsServed implements clustercache.PodGroupHandler.
func (g *groups) PodGroupsServed() {
	g.manager.ServePodGroups()
	g.native.Store(true)
}

// PodGroupUpdated implements clustercache.PodGroupHandler.
func (g *groups) PodGroupUpdated(group *schedulingv1beta1.PodGroup) {
	key, podGroup := clustercache.PodGroupOf(group)
	g.manager.SetPodGroup(key, podGroup, g.clock.Now())
}

// PodGroupDeleted implements clustercache.PodGroupHandler.
func (g *groups) PodGroupDeleted(namespace, name string) {
	g.manager.RemovePodGroup(gang.Key{Namespace: namespace, Name: name, Native: true}, g.clock.Now())
}

// run calls the manager's Tick until ctx ends, and starts and stops leading with the term.
func (g *groups) run(ctx context.Context) error {
	defer func() { g.manager.StopLeading(g.clock.Now()) }()
	return background.Every(ctx, g.clock, tickInterval, func(context.Context) { g.tick() })
}

// tick calls the manager's Tick if this process is the leader. An extender without replicas leads once its cache is synced.
func (g *groups) tick() {
	now := g.clock.Now()
	if g.leading() == nil && (g.Answering == nil || g.Answering() == nil) && g.cache.Ready() == nil {
		g.manager.StartLeading(now)
		g.manager.Tick(now)
	} else {
		g.manager.StopLeading(now)
	}
	g.act()
}

// act performs the manager's Effects, if this process is the leader. If it isn't, the Effects wait, because the Lease may still be renewed in time.
func (g *groups) act() {
	if g.leading() != nil {
		return
	}
	effects := g.manager.TakeEffects()
	if effects.Requeue {
		g.requeue.RequeueAll("")
	}
	if len(effects.RequeueAbove) > 0 {
		g.requeue.Preemptible(slices.Min(effects.RequeueAbove))
	}
	for _, notice := range effects.Events {
		kind := corev1.EventTypeNormal
		if notice.Warning {
			kind = corev1.EventTypeWarning
		}
		g.recorder.Event(apiserver.Reference(notice.Pod), kind, notice.Reason, notice.Text)
	}
	if len(effects.Verify) > 0 {
		g.verifier.Verify(effects.Verify)
	}
	if len(effects.Evict) > 0 {
		g.evictor.Evict(effects.Evict)
	}
}
