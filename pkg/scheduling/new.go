package scheduling

import (
	"context"

	"golang.org/x/time/rate"

	"github.com/gpushare/gpushare/pkg/arrivals"
	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/binding"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/dispatch"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/eviction"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/requeue"
	"github.com/gpushare/gpushare/pkg/sampling"
)

// New builds a Scheduler. It reads and writes nothing before Run.
func New(o Options) (*Scheduler, error) {
	cache := clustercache.New(clustercache.Options{Client: o.Client, Clock: o.Clock, CacheSynced: o.Observer.CacheSynced})
	s, err := newScheduler(o, cache)
	if err == nil && s.fair != nil {
		err = cache.AddNamespaceHandler(s.fair)
	}
	if err == nil && o.Gangs.Hold > 0 && o.Gangs.Native {
		cache.AddPodGroupHandler(s.groups)
	}
	return s, err
}

func newScheduler(o Options, cache clusterCache) (*Scheduler, error) {
	replicas := o.Leading != nil
	if !replicas {
		o.Leading = func() error { return nil }
	}
	if o.newGroup == nil {
		o.newGroup = background.Goroutines
	}
	nodes := eligibility.NewCluster()
	var turnRules *dispatch.TurnRules
	if o.FairShare.On {
		turnRules = dispatch.NewTurnRules(o.FairShare.PriorityCutoff)
	}
	s := &Scheduler{
		Options: o, ledger: ledger.NewWithResources(nodes, turnRules), cache: cache, nodes: nodes, failures: &queue.Failures{}, withTimeout: context.WithTimeout,
		replicas: replicas, bypassReports: rate.NewLimiter(rate.Every(bypassPause), bypassBurst),
	}
	s.expectations = s.newExpectations()
	s.requeue = requeue.New(requeue.Options{
		API: o.API, Ledger: s.ledger, Cache: s.cache, EligibleNodes: s.nodes.UsableNodes, Observer: o.Observer, Leading: o.Leading, Clock: o.Clock,
		MinSample: o.minSample,
	})
	s.binder = binding.New(binding.Options{
		API: o.API, Ledger: s.ledger, Recorder: o.Recorder, Observer: o.Observer,
		Timeout: o.BindTimeout, Window: o.BindWindow, Leading: o.Leading, Clock: o.Clock,
	})
	evictions := eviction.Options{
		API: o.API, Ledger: s.ledger, Cache: s.cache, Recorder: o.Recorder, Observer: o.Observer,
		AnswerLost: s.BindDeadline(), Leading: o.Leading, Clock: o.Clock, NewGroup: o.newGroup, Reclaims: o.FairShare.Observer,
		OnlyFinish: !s.evictsForOthers(),
		PodGroups:  func(uid gpu.PodUID) (gang.PodGroup, bool) { return s.groups.manager.PodGroupOf(uid) },
	}
	s.executor = eviction.NewExecutor(evictions, o.EvictionRecord)
	s.preemptors = eviction.NewPreemptors(s.executor, o.EvictFragmented, func() { s.requeue.RequeueAll("") })
	if o.Gangs.Hold > 0 {
		s.members = eviction.NewMemberEvictor(evictions, o.Gangs.Observer.GangEvicted)
	}
	s.groups = s.newGroups()
	if o.FairShare.On {
		s.fair = s.newFairShare(o.FairShare, turnRules)
	}
	s.nominator = s.newNominator()
	s.groups.nominator = s.nominator
	s.waiting = s.newWaiting()
	if o.EvictOverusers {
		s.overusers = eviction.NewOveruseEvictor(evictions, s.groups.manager)
	}
	s.ledger.AddFreedListener(s.requeue.Freed)
	s.ledger.AddFreedListener(func(string) { s.groups.manager.MemoryFreed() })
	s.ledger.AddFreedListener(s.fair.freed)
	handlers := (*eventHandlers)(s)
	s.binder.AddListener(handlers)
	return s, s.cache.AddHandler(handlers)
}

func (s *Scheduler) newNominator() *sampling.Nominator {
	return sampling.New(sampling.Options{
		API: s.API, Ledger: s.ledger, Cache: s.cache, Nodes: s.nodes, Observer: s.Observer, SampleSize: s.SampleSize,
		Requeue: s.requeue.RequeueAll, Leading: s.Leading, View: s.view(),
		AnswerLost: s.BindDeadline(), Writes: s.newGroup, Clock: s.Clock,
	})
}

func (s *Scheduler) newGroups() *groups {
	options := gang.Options{
		Ledger: s.ledger, Release: func(uid gpu.PodUID) { s.binder.Release(uid) }, View: s.view(),
		Hold: s.Gangs.Hold, Patience: s.Gangs.Patience, OnFailure: s.Gangs.OnFailure,
		Observer: s.Gangs.Observer, EligibleNodes: func(uid gpu.PodUID) []string {
			if pod, pending := s.cache.PendingPod(uid); pending {
				return s.nodes.UsableNodes(pod.Constraints)
			}
			return nil
		},
		Failures:   s.failures,
		AwaitsTurn: func(pod gpu.Pod) bool { return s.fair.awaitsTurn(pod) },
	}
	return &groups{
		GangOptions: s.Gangs, cache: s.cache, binder: s.binder, requeue: s.requeue, evictor: s.members, verifier: s.binder, recorder: s.Recorder,
		leading: s.Leading, bindTimeout: s.BindTimeout, clock: s.Clock, manager: gang.New(options),
	}
}

func (s *Scheduler) newFairShare(o FairShareOptions, turnRules *dispatch.TurnRules) *fairShare {
	options := dispatch.Options{
		Ledger: s.ledger, Release: func(uid gpu.PodUID) { s.binder.Release(uid) }, View: s.view(),
		Nodes: s.nodes, Failures: s.failures, Patience: s.Gangs.Patience, MayEvict: s.executor.Ready, Evicting: s.executor.IsEvicting,
		Groups: s.groups.manager, TurnRules: turnRules, Provisioning: o.Provisioning, ReclaimAfter: o.ReclaimAfter, MinRuntime: o.MinRuntime, Observer: o.Observer,
	}
	f := &fairShare{
		FairShareOptions: o, groups: s.groups, api: s.API, requeue: s.requeue, ready: s.cache.Ready, recorder: s.Recorder, leading: s.Leading,
		clock: s.Clock, writes: s.newGroup(dispatch.MaxOpening), reclaims: s.newGroup(-1), problems: map[string]*namespaceProblem{},
	}
	f.manager, f.reclaimer = dispatch.New(options), eviction.NewReclaimer(s.executor)
	return f
}

func (s *Scheduler) newWaiting() *waiting {
	o := s.Reservations
	return &waiting{
		reserver: queue.NewReserver(queue.Options{
			Ledger: s.ledger, MaxIdle: o.MaxIdle, MaxAge: o.MaxAge, Failures: s.failures, Reserved: s.Observer.Reserved,
		}),
		cache: s.cache, ledger: s.ledger, groups: s.groups, fair: s.fair, nodes: s.nodes, leading: s.Leading, clock: s.Clock,
	}
}

func (s *Scheduler) newExpectations() *expectations {
	if !s.NodePolicy.NeedsOutlook() {
		return nil
	}
	return &expectations{
		arrivals: arrivals.NewCounter(), nodes: s.nodes, ledger: s.ledger, cardPolicy: s.CardPolicy,
		leading: s.Leading, clock: s.Clock,
	}
}
