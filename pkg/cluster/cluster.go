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

// ErrNotReady says that the ledger doesn't stand yet: nodes and pods are still being listed.
var ErrNotReady = errors.New("the ledger is still being rebuilt from the API server")

// Options are what a Cluster works with.
type Options struct {
	// Client reads, watches and binds.
	Client kubernetes.Interface
	// API makes the calls of which the outcome matters; NewAPI(Client) outside tests.
	API API
	// Recorder writes Events.
	Recorder record.EventRecorder
	// Observer is told what happens, for metrics.
	Observer Observer
	// CardPolicy chooses among the cards of a node, NodePolicy among nodes for pods of groups.
	CardPolicy, NodePolicy placement.Policy
	// BindTimeout bounds one bind, all its calls included. It must lie below kube-scheduler's httpTimeout.
	BindTimeout time.Duration
	// BindWindow is for how long the binds of a storm are gathered at most, to be sent together; zero sends each at once.
	// No more than a quarter of BindTimeout is spent so.
	BindWindow time.Duration
	// EvictFragmented lets pods be evicted for one of higher priority that only fragmentation keeps waiting, see evictor.
	EvictFragmented bool
	// Leading is asked right before each write; an error keeps it from being made. Nil for the only extender.
	Leading func() error
	// Gangs says how groups of pods are treated; the zero value leaves them alone.
	Gangs GangOptions
	// Clock is real outside tests.
	Clock clock.WithTicker
}

// Observer is told what happens. Its methods are called often and must return at once.
type Observer interface {
	// BindFinished tells the result of a bind, one of the Result constants.
	BindFinished(result string)
	// BindResolved tells how a bind whose answer was lost turned out.
	BindResolved(outcome string)
	// Evicted tells the result of a round of evictions.
	Evicted(result string)
	// CacheSynced tells how long it took until the ledger stood.
	CacheSynced(took time.Duration)
	// Requeued counts the writes that made kube-scheduler look again.
	Requeued()
	// APIWrite counts writes to the API server, Events left out, by kind ("binding", "node").
	APIWrite(kind string)
}

// Cluster is the API server's view of who holds what, and the way to change it. Its methods may be called from many
// goroutines.
type Cluster struct {
	Options
	ledger  *ledger.Ledger
	pods    podCache
	nodes   listersv1.NodeLister
	budgets policyListersv1.PodDisruptionBudgetLister
	factory informers.SharedInformerFactory
	// watches are the informers that the ledger is fed by, by resource.
	watches map[string]cache.SharedIndexInformer
	sync    syncState
	settler *settler
	waker   *waker
	// attempts requeues pods that no change of the cluster would.
	attempts *attempts
	pending  pending
	// evictor is nil where nobody is to be evicted.
	evictor *evictor
	flights flights
	batch   *batch
	// assumedEvents limits the Events of pods that got their card.
	assumedEvents *rate.Limiter
	term          term
	// gangs is nil where groups are left alone.
	gangs *gangs
}

// New wires a Cluster. Nothing is read before Run.
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
	// The handlers' own HasSynced: the informers' would say yes before the ledger has seen the last of the list.
	c.sync.synced = []cache.InformerSynced{podHandler.HasSynced, nodeHandler.HasSynced}
	return c, nil
}

// Ledger returns the book that this cluster keeps.
func (c *Cluster) Ledger() *ledger.Ledger { return c.ledger }

// Run feeds the ledger until ctx ends.
func (c *Cluster) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	// Not waited for at the end: a reflector that can't reach the API server sleeps through its back-off, up to half a
	// minute, whatever its context says (k8s.io/client-go tools/cache/reflector.go, watchList).
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
