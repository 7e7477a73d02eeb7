// Package scheduling answers kube-scheduler's calls: Filter, Prioritize, Bind and Preempt, each a list of steps.
//
// It connects the packages of the extender. Package clustercache reports pods and nodes, which the event handlers apply to the
// ledger. Bind assumes a card in the ledger, and package binding makes the one write that binds the pod and sets its
// annotations. Package requeue makes kube-scheduler retry rejected pods, package eviction evicts pods, package gang decides about
// groups, package dispatch about fair sharing. All state is in the API server: a new Scheduler rebuilds it from there.
package scheduling

import (
	"context"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/binding"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/eviction"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/pkg/requeue"
	"github.com/gpushare/gpushare/pkg/sampling"
)

// API makes the writes and live reads of a Scheduler; apiserver.Client implements it.
type API interface {
	binding.API
	eviction.API
	sampling.API
	AnnotateNode(ctx context.Context, node, key, value string) error
	// OpenGate removes one scheduling gate of a pod.
	OpenGate(ctx context.Context, pod gpu.Pod, gate string) error
}

// Options configure a Scheduler.
type Options struct {
	// Client lists and watches nodes, pods and disruption budgets.
	Client kubernetes.Interface
	API    API
	// Recorder writes Events.
	Recorder record.EventRecorder
	// Observer receives what metrics count.
	Observer Observer
	// CardPolicy ranks the cards of a node, NodePolicy ranks nodes.
	CardPolicy, NodePolicy placement.Policy
	// FilterBest is the maximum number of nodes that Filter passes, of those that share the best score, if there are more
	// than FilterBestAbove candidate nodes. If there are not, or FilterBest is 0, Filter passes every node that fits and
	// gives a reason for each of the others.
	FilterBest, FilterBestAbove int
	// BindTimeout bounds one bind with all its API calls. It must be less than kube-scheduler's httpTimeout.
	BindTimeout time.Duration
	// BindWindow is the longest time for which binds are collected, while pods queue, before they are sent together. Zero
	// sends each bind at once. At most a quarter of BindTimeout is used for it.
	BindWindow time.Duration
	// SampleSize returns the smallest number of candidate nodes that can be a sample, in a cluster of that many nodes, see package sampling. It is nil
	// if filter calls always have every node that passes kube-scheduler's own filters.
	SampleSize func(nodes int) int
	// EvictFragmented allows the eviction of lower-priority pods for a pod that only fragmentation keeps pending, see eviction.Preemptors.
	EvictFragmented bool
	// EvictionRecord is the ConfigMap in which evictions for other pods are recorded before they begin.
	EvictionRecord types.NamespacedName
	// EvictOverusers allows the eviction of pods that use more GPU memory than they request, see eviction.OveruseEvictor.
	EvictOverusers bool
	// Leading is called right before each write; an error prevents the write. It is nil for an extender without
	// replicas.
	Leading func() error
	// Reservations configures the awaited reservations of items that wait for memory. The zero value turns them off.
	Reservations ReservationOptions
	// Gangs configures gangs. The zero value treats their members like any other pod.
	Gangs GangOptions
	// FairShare configures fair sharing between tenants. The zero value turns it off.
	FairShare FairShareOptions
	// Clock is the real clock outside tests.
	Clock clock.WithTicker

	// minSample is requeue.Options.MinSample, for tests.
	minSample int
	// newGroup replaces goroutines in the simulation.
	newGroup func(limit int) background.Group
}

// Observer receives what metrics count. Its methods are called often and must return at once.
type Observer interface {
	binding.Observer
	requeue.Observer
	eviction.Observer
	sampling.Observer
	// Filtered counts nodes by Filter's result.
	Filtered(reason reasons.Reason, nodes int)
	// BindFinished reports the result of a bind, one of reasons.BindResults.
	BindFinished(result reasons.Result)
	// Reserved counts the choices of cards for awaited reservations.
	Reserved()
	// BoundWithoutExtender counts the pods that were bound without the extender.
	BoundWithoutExtender()
	// CacheSynced reports how long the cache sync took.
	CacheSynced(took time.Duration)
}

// Scheduler answers kube-scheduler's calls. Its methods are safe for concurrent use.
type Scheduler struct {
	Options
	ledger     *ledger.Ledger
	cache      clusterCache
	requeue    *requeue.Requeuer
	binder     *binding.Binder
	executor   *eviction.Executor
	preemptors *eviction.Preemptors
	// members are nil without gangs.
	members *eviction.MemberEvictor
	// overusers is nil if no pod is evicted for its use.
	overusers *eviction.OveruseEvictor
	// nodes knows which nodes pods can use, and what these have free besides GPU memory.
	nodes  *eligibility.Cluster
	groups *groups
	// fair is nil if fair sharing is off.
	fair      *fairShare
	explainer explainer
	waiting   *waiting
	failures  *queue.Failures
	nominator *sampling.Nominator
	// expectations are nil if the node policy isn't by cost.
	expectations *expectations
	// replicas is true if another process may lead.
	replicas bool
	// bypassReports limits the reports about pods that were bound without the extender.
	bypassReports *rate.Limiter
	// withTimeout is context.WithTimeout outside tests: a context's timer doesn't follow Clock.
	withTimeout func(context.Context, time.Duration) (context.Context, context.CancelFunc)
}

// view returns how nodes are rated.
func (s *Scheduler) view() ledger.View {
	return ledger.View{Card: s.CardPolicy, Node: s.NodePolicy}
}

// Run keeps the cache in step with the API server, and runs the loops of all parts, until ctx ends.
func (s *Scheduler) Run(ctx context.Context) error {
	loops := []func(context.Context) error{s.cache.Run, s.binder.Run, s.requeue.Run, s.nominator.Run, s.executor.Run, s.preemptors.Run, s.waiting.run}
	if s.expectations != nil {
		loops = append(loops, s.expectations.run)
	}
	if s.overusers != nil {
		loops = append(loops, s.overusers.Run)
	}
	if s.Gangs.Hold > 0 {
		loops = append(loops, s.groups.run, s.members.Run)
	}
	if s.fair != nil {
		loops = append(loops, s.fair.run)
	}
	g, ctx := errgroup.WithContext(ctx)
	for _, loop := range loops {
		g.Go(func() error { return loop(ctx) })
	}
	return g.Wait()
}

// evictsForOthers reports whether pods are evicted for others.
func (s *Scheduler) evictsForOthers() bool {
	return s.EvictFragmented || s.FairShare.On && s.FairShare.ReclaimAfter > 0
}

// Ready returns nil once the cache is synced. Before, it returns an error that wraps clustercache.ErrNotSynced.
func (s *Scheduler) Ready() error { return s.cache.Ready() }

// TakeOver begins a term as leader. It waits until the cache is synced. The caller ensures that a read of the API server shows every write
// of former leaders.
func (s *Scheduler) TakeOver(ctx context.Context) error {
	if err := s.cache.AwaitReady(ctx); err != nil {
		return err
	}
	s.binder.BeginTerm()
	s.failures.Clear()
	s.requeuePending()
	return nil
}

// Drain waits until no further write of this process can take effect. No new bind may begin meanwhile.
func (s *Scheduler) Drain(ctx context.Context) error { return s.binder.Drain(ctx) }

// BindDeadline returns how long after the begin of a bind its write may still take effect.
func (s *Scheduler) BindDeadline() time.Duration { return binding.Deadline(s.BindTimeout) }

// requeuePending requeues all pods if some are pending. It is unknown which pods a former extender rejected, and for which of them memory has become
// free since.
func (s *Scheduler) requeuePending() {
	if len(s.cache.Pending()) > 0 {
		s.requeue.RequeueAll("")
	}
}
