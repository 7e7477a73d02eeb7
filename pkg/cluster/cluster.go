package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	listersv1 "k8s.io/client-go/listers/core/v1"
	policyListersv1 "k8s.io/client-go/listers/policy/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
)

// ErrNotReady means that the cache is not synced: nodes and pods are still being listed.
var ErrNotReady = errors.New("the ledger is still being rebuilt from the API server")

// Options configure a Cluster.
type Options struct {
	// Client lists and watches nodes, pods and disruption budgets.
	Client kubernetes.Interface
	// API makes the calls whose outcome matters. Outside tests it is NewAPI(Client).
	API API
	// Recorder writes Events.
	Recorder record.EventRecorder
	// Observer receives what metrics count.
	Observer Observer
	// CardPolicy ranks the cards of a node. NodePolicy ranks nodes for members of gangs.
	CardPolicy, NodePolicy placement.Policy
	// BindTimeout bounds one bind with all its calls. It must be less than kube-scheduler's httpTimeout.
	BindTimeout time.Duration
	// BindWindow is the longest time for which binds that arrive close together are collected before they are sent
	// together. Zero sends each bind at once. At most a quarter of BindTimeout is used for it.
	BindWindow time.Duration
	// EvictFragmented allows the eviction of lower-priority pods for a pod that only fragmentation keeps pending, see
	// evictor.
	EvictFragmented bool
	// Leading is called right before each write; an error prevents the write. It is nil for an extender without
	// replicas.
	Leading func() error
	// Gangs configures gangs. The zero value treats their members like any other pod.
	Gangs GangOptions
	// Clock is the real clock outside tests.
	Clock clock.WithTicker
}

// Observer receives what metrics count. Its methods are called often and must return at once.
type Observer interface {
	// BindFinished reports the result of a bind, one of the Result constants.
	BindFinished(result string)
	// BindResolved reports the outcome of an unconfirmed bind, one of the Outcome constants.
	BindResolved(outcome string)
	// Evicted reports the result of a round of evictions.
	Evicted(result string)
	// CacheSynced reports how long the cache sync took.
	CacheSynced(took time.Duration)
	// Requeued counts the writes that made kube-scheduler retry rejected pods.
	Requeued()
	// APIWrite counts writes to the API server by kind ("binding", "node"). Events are not counted.
	APIWrite(kind string)
}

// Cluster keeps the ledger in step with the API server, and binds pods. Its methods are safe for concurrent use.
type Cluster struct {
	Options
	ledger  *ledger.Ledger
	pods    podCache
	nodes   listersv1.NodeLister
	budgets policyListersv1.PodDisruptionBudgetLister
	factory informers.SharedInformerFactory
	// watches are the informers that feed the ledger, by resource.
	watches map[string]cache.SharedIndexInformer
	sync    syncState
	settler *settler
	waker   *waker
	// attempts requeues pods that no change of the cluster would requeue.
	attempts *attempts
	pending  pending
	// evictor is nil if fragmentation eviction is off.
	evictor *evictor
	flights flights
	batch   *batch
	// assumedEvents limits the Events that name a pod's card.
	assumedEvents *rate.Limiter
	term          term
	// gangs is nil if members of gangs are treated like any other pod.
	gangs *gangs
}

// New builds a Cluster. It reads nothing before Run.
func New(o Options) (*Cluster, error) {
	c := &Cluster{Options: o, assumedEvents: rate.NewLimiter(assumedEventsSecond, assumedEventsBurst)}
	c.ledger = ledger.New(c.freed)
	c.batch = &batch{clock: o.Clock, window: min(o.BindWindow, o.BindTimeout/4)}
	c.waker = newWaker(o.Clock, o.API, o.Observer, c.fits, c.ledger.AnyFit, c.leading)
	if o.EvictFragmented {
		c.evictor = newEvictor(c)
	}
	c.waker.anyNode = c.anyNode
	c.attempts = newAttempts(c)
	c.settler = newSettler(o.Clock, o.API, o.Observer, c.ledger, o.BindTimeout, c.boundLate, c.waker.released)
	c.gangs = newGangs(c)

	c.factory = informers.NewSharedInformerFactoryWithOptions(o.Client, 0,
		informers.WithTransform(new(slimmer).slim), informers.WithTweakListOptions(consistent))
	pods := c.factory.InformerFor(&corev1.Pod{}, func(client kubernetes.Interface, _ time.Duration) cache.SharedIndexInformer {
		return coreinformers.NewFilteredPodInformer(client, metav1.NamespaceAll, 0, cache.Indexers{nodeIndex: indexByNode}, consistent)
	})
	c.pods = podCache{pods.GetIndexer()}
	nodes := c.factory.Core().V1().Nodes()
	c.nodes = nodes.Lister()
	c.watches = map[string]cache.SharedIndexInformer{"pods": pods, "nodes": nodes.Informer()}
	budgets := c.factory.Policy().V1().PodDisruptionBudgets()
	c.budgets = budgets.Lister()
	c.sync.budgets = budgets.Informer().HasSynced
	podHandler, err := pods.AddEventHandler(c.podEvents())
	if err != nil {
		return nil, fmt.Errorf("watching pods: %w", err)
	}
	nodeHandler, err := nodes.Informer().AddEventHandler(c.nodeEvents())
	if err != nil {
		return nil, fmt.Errorf("watching nodes: %w", err)
	}
	// The handlers' own HasSynced: an informer's HasSynced can return true before the handlers have passed the whole
	// list to the ledger.
	c.sync.synced = []cache.InformerSynced{podHandler.HasSynced, nodeHandler.HasSynced}
	return c, nil
}

// Ledger returns the ledger that the Cluster keeps.
func (c *Cluster) Ledger() *ledger.Ledger { return c.ledger }

// Run runs the informers and the loops of the Cluster until ctx ends.
func (c *Cluster) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	// Run does not wait for the informers to stop: a reflector that cannot reach the API server sleeps through its
	// back-off of up to half a minute and ignores its context (k8s.io/client-go tools/cache/reflector.go, watchList).
	c.factory.StartWithContext(ctx)

	g.Go(func() error { return c.settler.run(ctx) })
	g.Go(func() error { return c.waker.run(ctx) })
	g.Go(func() error { return c.attempts.run(ctx) })
	if c.EvictFragmented {
		g.Go(func() error { return c.evictor.run(ctx) })
	}
	g.Go(func() error { return c.awaitLedger(ctx) })
	if c.gangs != nil {
		g.Go(func() error { return c.gangs.run(ctx) })
		g.Go(func() error { return c.gangs.evict(ctx) })
	}
	return g.Wait()
}
