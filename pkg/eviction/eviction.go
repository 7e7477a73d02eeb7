// Package eviction evicts pods, and finds out what an eviction would free. Besides this package only kube-scheduler evicts pods, for a preemption.
//
// Pods are evicted for five reasons:
//
//   - For a pod that only fragmentation keeps pending. Preemptors.Rejected notes it, and freeCards chooses the victims (fragmentation.go).
//     Its place is kept as a nomination in the ledger. If that was of no use (Preemptors.update), the pod pauses.
//   - For a pod that preempts. kube-scheduler finds it and evicts the victims, Scheduler.Preempt chooses them (preemption.Choose). Preemptors keep
//     its place (preemptions.go). If that was of no use (Preemptors.update), kube-scheduler tries other nodes.
//   - For a tenant below its share. Package dispatch finds it, package reclaim chooses the victims (reclaim.go). The ledger keeps its places as a
//     hold. If they were of no use (endLateHolds in dispatch), its tenant's items of that kind pause.
//   - For a broken group. Package gang finds it and chooses its bound members, and MemberEvictor evicts them. No place is kept.
//   - For the other pods of a card that is short of memory. OveruseEvictor finds the card, and evicts pods above their limits, then pods that borrow.
//     No place is kept.
//
// Executor makes the evictions for pods that wait; DryRun asks first whether all of them would be granted. A new leader evicts the rest of groups.
// Survey collects the input for package preemption.
package eviction

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// maxConcurrent limits the concurrent calls of MemberEvictor, and those for the victims of one plan.
const maxConcurrent = 16

// API is the part of package apiserver that evicts.
type API interface {
	// Evict requests the eviction of a pod, with its own grace period if grace is nil, else with this one, in seconds. A dry run only checks
	// whether the eviction would be granted.
	Evict(ctx context.Context, pod gpu.Pod, grace *int64, dryRun bool) error
	// Pod reads a pod, PodsOn lists the pods of a node, Claim and Volume read a PersistentVolumeClaim and a PersistentVolume.
	Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error)
	PodsOn(ctx context.Context, node string) ([]corev1.Pod, error)
	Claim(ctx context.Context, namespace, name string) (*corev1.PersistentVolumeClaim, error)
	Volume(ctx context.Context, name string) (*corev1.PersistentVolume, error)
	// ConfigMap reads a ConfigMap, CreateConfigMap creates an empty one, and PatchConfigMap sets data if it still has the resource version.
	ConfigMap(ctx context.Context, namespace, name string) (*corev1.ConfigMap, error)
	CreateConfigMap(ctx context.Context, namespace, name string) (*corev1.ConfigMap, error)
	PatchConfigMap(ctx context.Context, namespace, name, version string, data map[string]string) (*corev1.ConfigMap, error)
}

// Cache is the part of package clustercache that evictions use.
type Cache interface {
	Ready() error
	BudgetsSynced() bool
	Pod(namespace, name string) (*clustercache.PodInfo, bool)
	PodsOn(node string) []*clustercache.PodInfo
	Node(name string) (*corev1.Node, bool)
	Budgets(namespace string) []*policyv1.PodDisruptionBudget
	MayOveruse() []*clustercache.PodInfo
}

// Observer receives what metrics count. Its methods must return at once.
type Observer interface {
	// Evicted reports the result of the evictions for a pod.
	Evicted(result reasons.Result)
	// EvictionRecordFailed counts failures of an Executor's record. Until it is read, the Executor evicts nothing. If it can't be written, no group is
	// evicted. One that can't be parsed is ignored.
	EvictionRecordFailed()
	// OveruserEvicted reports the result of the eviction of a pod that uses more than it requests.
	OveruserEvicted(result reasons.Result)
	// APIWrite counts the evictions ("eviction").
	APIWrite(kind string)
}

// Options are what the types of this package share that evict pods, or have them evicted.
type Options struct {
	API    API
	Ledger *ledger.Ledger
	Cache  Cache
	// OnlyFinish is true if no pods are evicted for others any more. An Executor then only finishes what former leaders have begun.
	OnlyFinish bool
	// PodGroups is used by Preemptors.
	PodGroups PodGroups
	Recorder  record.EventRecorder
	Observer  Observer
	// Reclaims receives what metrics count of evictions by share; it isn't used without them.
	Reclaims ReclaimObserver
	// AnswerLost is the time after the start of an eviction call in which it can still take effect, if its answer was lost.
	AnswerLost time.Duration
	// Leading returns an error if this process isn't the leader.
	Leading func() error
	Clock   clock.WithTicker
	// NewGroup returns a group that runs at most limit functions at a time; a negative limit means none.
	NewGroup func(limit int) background.Group
}

// errOutdated means that nothing was evicted because the API server shows other pods than the cache: the watch may have stalled.
var errOutdated = errors.New("the cache is behind the API server")

// evictor makes the calls with which pods are evicted. The types of this package that evict pods embed it.
type evictor struct{ Options }

// request evicts a pod; a dry run asks whether that would be granted. ends is when its grace period ends. gone is true if the pod isn't running any
// more, or is being deleted, which the watch will show soon; another pod may have its name.
func (e *evictor) request(ctx context.Context, pod gpu.Pod, dryRun bool) (ends time.Time, gone bool, err error) {
	live, err := e.read(ctx, pod)
	if err != nil || live == nil || live.Spec.NodeName == "" {
		return time.Time{}, err == nil, err
	}
	var shorter *int64 // The grace period, if the pod's own is too long.
	most := int64(protocol.MaxGracePeriod.Seconds())
	switch {
	case protocol.Lingers(live):
		ends, shorter = protocol.LeavesBy(live.DeletionTimestamp.Time, *live.DeletionGracePeriodSeconds), &most
	case live.DeletionTimestamp != nil:
		return live.DeletionTimestamp.Time, true, nil
	default:
		grace := ptr.Deref(live.Spec.TerminationGracePeriodSeconds, corev1.DefaultTerminationGracePeriodSeconds)
		if grace > most {
			grace, shorter = most, &most
		}
		ends = e.Clock.Now().Add(time.Duration(grace) * time.Second)
	}
	err = e.API.Evict(ctx, pod, shorter, dryRun)
	if !dryRun {
		e.Observer.APIWrite("eviction")
	}
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return ends, true, nil
	}
	return ends, false, err
}

// readUnbound reads a pod that waits. It returns errOutdated if there is none.
func (e *evictor) readUnbound(ctx context.Context, pod gpu.Pod) (*corev1.Pod, error) {
	live, err := e.read(ctx, pod)
	if err == nil && (live == nil || live.DeletionTimestamp != nil || live.Spec.NodeName != "") {
		err = fmt.Errorf("%w: pod %s doesn't wait any more", errOutdated, pod)
	}
	return live, err
}

// cached returns a pod as the cache has it; nil if it isn't there.
func (e *evictor) cached(pod gpu.Pod) *clustercache.PodInfo {
	if info, known := e.Cache.Pod(pod.Namespace, pod.Name); known && info.UID == pod.UID {
		return info
	}
	return nil
}

// errUnread means that a pod could not be read, so its eviction wasn't requested.
var errUnread = errors.New("reading pod")

// read reads a pod; nil if it is gone or has ended.
func (e *evictor) read(ctx context.Context, pod gpu.Pod) (*corev1.Pod, error) {
	live, err := e.API.Pod(ctx, pod.Namespace, pod.Name)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("%w %s: %w", errUnread, pod, err)
	case gpu.PodUID(live.UID) != pod.UID || protocol.Terminal(live):
		return nil, nil
	}
	return live, nil
}

// resultOf returns the result of an eviction, as a label of metrics.
func resultOf(err error) reasons.Result {
	switch {
	case err == nil:
		return reasons.ResultEvicted
	case byBudget(err):
		return reasons.ResultRefused
	}
	return reasons.ResultFailed
}

// answered reports whether the error is the API server's answer about this pod, such as a rejection by a budget or a
// webhook. It is false if the API server is unavailable or overloaded.
func answered(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status) && !apierrors.IsTimeout(err) && !apierrors.IsServerTimeout(err) && !apierrors.IsServiceUnavailable(err) &&
		(!apierrors.IsTooManyRequests(err) || byBudget(err))
}

// timedOut reports whether no answer to the request of an eviction came in time. The pod was read right before, so it is likely that the API server works,
// and waits for a webhook that concerns such pods.
func timedOut(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, errUnread)
}

// byBudget reports whether a disruption budget forbids the eviction. An overloaded API server answers with the same status, but without
// this cause (k8s.io/kubernetes pkg/registry/core/pod/storage/eviction.go, createTooManyRequestsError).
func byBudget(err error) bool { return apierrors.HasStatusCause(err, policyv1.DisruptionBudgetCause) }

// certain reports whether the end of the pod certainly frees the card of its allocation. For an assumed allocation,
// kube-scheduler may not know that the pod is on the node. For a presumed allocation, the card is unknown.
func certain(allocation *ledger.Allocation) bool {
	return allocation.State == ledger.Bound && !allocation.Presumed
}

// frees reports whether the deletion of the pod makes room on its node soon. kube-scheduler doesn't shorten the grace period of a pod that is being
// deleted.
func frees(pod *clustercache.PodInfo, now time.Time) bool {
	return !pod.Overdue(now) && !pod.Mirror && !pod.Lingers
}
