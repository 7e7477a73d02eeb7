package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/informers"
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
	// CardPolicy chooses among the cards of a node.
	CardPolicy placement.Policy
	// BindTimeout bounds one bind, all its calls included. It must lie below kube-scheduler's httpTimeout.
	BindTimeout time.Duration
	// Leading is asked right before each write; an error keeps it from being made. Nil for the only extender.
	Leading func() error
	// Clock is real outside tests.
	Clock clock.WithTicker
}

// Observer is told what happens. Its methods are called often and must return at once.
type Observer interface {
	// BindFinished tells the result of a bind, one of the Result constants.
	BindFinished(result string)
	// Settled tells how a bind whose answer was lost turned out.
	Settled(outcome string)
	// Woken counts the writes that made kube-scheduler look again.
	Woken()
	// APIWrite counts writes to the API server, Events left out, by kind ("binding", "node").
	APIWrite(kind string)
}

// Cluster is the API server's view of who holds what, and the way to change it. Its methods may be called from many
// goroutines.
type Cluster struct {
	Options
	ledger  *ledger.Ledger
	pods    listersv1.PodLister
	nodes   listersv1.NodeLister
	byNode  cache.Indexer // Of pods, see nodeIndex.
	budgets policyListersv1.PodDisruptionBudgetLister
	factory informers.SharedInformerFactory
	sync    syncState
	settler *settler
	waker   *waker
	flights flights
	term    term
}

// New wires a Cluster. Nothing is read before Run.
func New(o Options) (*Cluster, error) {
	c := &Cluster{Options: o}
	c.waker = newWaker(o.Clock, o.API, o.Observer, c.fits, c.anyFit, c.leading)
	c.ledger = ledger.New(c.waker.freed)
	c.settler = newSettler(o.Clock, o.API, o.Observer, c.ledger, o.BindTimeout, c.waker.released)

	c.factory = informers.NewSharedInformerFactoryWithOptions(o.Client, 0, informers.WithTransform(new(slimmer).slim))
	pods, nodes := c.factory.Core().V1().Pods(), c.factory.Core().V1().Nodes()
	c.pods, c.nodes = pods.Lister(), nodes.Lister()
	if err := pods.Informer().AddIndexers(cache.Indexers{nodeIndex: indexByNode}); err != nil {
		return nil, fmt.Errorf("watching pods: %w", err)
	}
	c.byNode = pods.Informer().GetIndexer()
	budgets := c.factory.Policy().V1().PodDisruptionBudgets()
	c.budgets = budgets.Lister()
	c.sync.budgets = budgets.Informer().HasSynced
	podHandler, err := pods.Informer().AddEventHandler(c.podEvents())
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
	g.Go(func() error { return c.awaitLedger(ctx) })
	return g.Wait()
}
