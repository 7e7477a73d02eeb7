package clustercache

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	policylisters "k8s.io/client-go/listers/policy/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/gpu"
)

// Options configure a Cache.
type Options struct {
	// Client lists and watches pods, nodes and disruption budgets.
	Client kubernetes.Interface
	// Clock is the real clock outside tests.
	Clock clock.WithTicker
	// CacheSynced is called with the duration of the cache sync, if it isn't nil.
	CacheSynced func(took time.Duration)
}

// Cache keeps the pods, nodes and disruption budgets of the cluster. Its methods are safe for concurrent use. Callers
// must not change the objects that it returns.
type Cache struct {
	Options
	factory informers.SharedInformerFactory
	// podInformer and nodeInformer are the informers for which the cache sync waits.
	podInformer, nodeInformer cache.SharedIndexInformer
	nodes                     corelisters.NodeLister
	budgets                   policylisters.PodDisruptionBudgetLister
	budgetsSynced             cache.InformerSynced
	pending                   pendingPods
	handler                   Handler
	// podGroups is nil if PodGroups are not watched.
	podGroups PodGroupHandler
	// synced reports for each informer whether the handler has received its first list.
	synced []cache.InformerSynced
	// hindrance is why the API server has failed to answer or to list, the last time; nil if no failure is known.
	hindrance atomic.Pointer[error]
	// ready is closed when the cache is synced.
	ready chan struct{}
}

// New returns a Cache. It reads nothing before Run.
func New(o Options) *Cache {
	factory := informers.NewSharedInformerFactoryWithOptions(o.Client, 0,
		informers.WithTransform(new(sharing).transform), informers.WithTweakListOptions(consistent))
	pods := factory.InformerFor(&corev1.Pod{}, func(client kubernetes.Interface, _ time.Duration) cache.SharedIndexInformer {
		return coreinformers.NewFilteredPodInformer(client, metav1.NamespaceAll, 0, cache.Indexers{nodeIndex: indexByNode, reportIndex: indexByReport}, consistent)
	})
	nodes, budgets := factory.Core().V1().Nodes(), factory.Policy().V1().PodDisruptionBudgets()
	return &Cache{
		Options: o, factory: factory, podInformer: pods, nodeInformer: nodes.Informer(),
		nodes: nodes.Lister(), budgets: budgets.Lister(), budgetsSynced: budgets.Informer().HasSynced,
		ready: make(chan struct{}),
	}
}

// AddHandler registers the handler. It must be called once, before Run and before any other method.
func (c *Cache) AddHandler(h Handler) error {
	c.handler = h
	if err := c.watch("pods", c.podInformer, c.podEvents(h)); err != nil {
		return err
	}
	return c.watch("nodes", c.nodeInformer, nodeEvents(h))
}

// watch adds event handlers to an informer, and makes the cache sync wait for them.
func (c *Cache) watch(what string, informer cache.SharedIndexInformer, events cache.ResourceEventHandler) error {
	handlers, err := informer.AddEventHandler(events)
	if err == nil {
		err = informer.SetWatchErrorHandlerWithContext(c.listFailed)
	}
	if err != nil {
		return fmt.Errorf("watching %s: %w", what, err)
	}
	// The handlers' own HasSynced: an informer's can return true before the handlers have received the whole list.
	c.synced = append(c.synced, handlers.HasSynced)
	return nil
}

// AddNamespaceHandler registers a handler for namespaces, and makes the cache sync wait for them. Without it they are not
// watched. It must be called after AddHandler and before Run.
func (c *Cache) AddNamespaceHandler(h NamespaceHandler) error {
	return c.watch("namespaces", c.factory.Core().V1().Namespaces().Informer(), namespaceEvents(h))
}

// Pod returns the pod with the name.
func (c *Cache) Pod(namespace, name string) (*PodInfo, bool) {
	object, _, _ := c.podInformer.GetIndexer().GetByKey(namespace + "/" + name) // It never fails.
	pod, ok := object.(*PodInfo)
	return pod, ok
}

// PodsOn returns the pods that are bound to the node and have not ended, and the pending pods that are nominated to it.
func (c *Cache) PodsOn(node string) []*PodInfo { return c.indexed(nodeIndex, node) }

// MayOveruse returns the bound pods that use more GPU memory than they request, according to their annotations, or that may: they have
// limits above their requests.
func (c *Cache) MayOveruse() []*PodInfo { return c.reported(overuseValue) }

// Reported returns the bound pods with a problem, ordered by namespace and name: their annotations report over-use or a limit that is
// not in force, or they were bound without the extender.
func (c *Cache) Reported() []*PodInfo {
	pods := c.reported(problemValue)
	slices.SortFunc(pods, byName)
	return pods
}

// indexed returns the pods that an index has for a value.
func (c *Cache) indexed(index, value string) []*PodInfo {
	objects, _ := c.podInformer.GetIndexer().ByIndex(index, value) // It can't fail, because the index exists.
	pods := make([]*PodInfo, 0, len(objects))
	for _, object := range objects {
		if pod, ok := object.(*PodInfo); ok {
			pods = append(pods, pod)
		}
	}
	return pods
}

// reported returns the pods of one kind of report. It reads those of one node after the other, because event handlers wait while the index is
// read. So if a watch was interrupted, and shows another pod with the name of one on another node, the result can have both or neither.
func (c *Cache) reported(what string) (pods []*PodInfo) {
	for _, value := range c.podInformer.GetIndexer().ListIndexFuncValues(reportIndex) {
		if strings.HasPrefix(value, what) {
			pods = append(pods, c.indexed(reportIndex, value)...)
		}
	}
	return pods
}

// reportIndex is the name of the index of Reported, MayOveruse and RequestProblems. Its values are one of the others, followed by the node.
const (
	reportIndex  = "report"
	problemValue = "problem/"
	overuseValue = "overuse/"
	requestValue = "request/"
)

func indexByReport(object any) (values []string, err error) {
	pod, ok := object.(*PodInfo)
	if !ok || pod.Ended {
		return nil, nil
	}
	if pod.RequestProblem != "" && !pod.Leaving {
		values = append(values, requestValue+pod.Node)
	}
	if pod.Node == "" {
		return values, nil
	}
	if pod.Overuse != nil || pod.LimitProblem != "" || pod.WithoutExtender {
		values = append(values, problemValue+pod.Node)
	}
	if pod.Overuse != nil || pod.Limits != (gpu.Limits{}) {
		values = append(values, overuseValue+pod.Node)
	}
	return values, nil
}

// nodeIndex is the name of the index of pods by node, see PodsOn.
const nodeIndex = "node"

func indexByNode(object any) ([]string, error) {
	pod, ok := object.(*PodInfo)
	if !ok || pod.Ended {
		return nil, nil
	}
	if node := cmp.Or(pod.Node, pod.NominatedNode); node != "" {
		return []string{node}, nil
	}
	return nil, nil
}

// Pending returns the pending pods, ordered by namespace and name.
func (c *Cache) Pending() []*PodInfo { return c.pending.list() }

// PendingPod returns the pod if it is pending.
func (c *Cache) PendingPod(uid gpu.PodUID) (*PodInfo, bool) {
	pod, ok := c.pending.get(uid)
	return pod.info, ok
}

// PendingFor returns for how long kube-scheduler could have tried the pending pod: since the watch first reported the pod, or
// reported its last scheduling gate removed. It returns 0 if the pod isn't pending.
func (c *Cache) PendingFor(uid gpu.PodUID) time.Duration {
	pod, ok := c.pending.get(uid)
	if !ok {
		return 0
	}
	return c.Clock.Now().Sub(pod.since)
}

// RequestProblems returns the pods that have a RequestProblem, have not ended and aren't being deleted, ordered by namespace and name.
func (c *Cache) RequestProblems() []*PodInfo {
	pods := c.reported(requestValue)
	slices.SortFunc(pods, byName)
	unserved := func(pod *PodInfo) bool { return pod.Unserved }
	if slices.ContainsFunc(pods, unserved) && diagnosis.OffersWholeCards(c.Nodes()) {
		pods = slices.DeleteFunc(pods, unserved)
	}
	return pods
}

// Node returns the node with the name. It has only the fields that the extender reads.
func (c *Cache) Node(name string) (*corev1.Node, bool) {
	node, err := c.nodes.Get(name)
	return node, err == nil
}

// Nodes returns all nodes, with and without cards, in random order.
func (c *Cache) Nodes() []*corev1.Node {
	nodes, _ := c.nodes.List(labels.Everything()) // A List from the cache never fails.
	return nodes
}

// Budgets returns the disruption budgets of the namespace.
func (c *Cache) Budgets(namespace string) []*policyv1.PodDisruptionBudget {
	budgets, _ := c.budgets.PodDisruptionBudgets(namespace).List(labels.Everything()) // A List from the cache never fails.
	return budgets
}

// WatchVersions returns the resource version that the watches of pods and nodes have reached, by resource, without those that
// have reached none. While a watch works, its version grows with every change and bookmark.
func (c *Cache) WatchVersions() map[string]uint64 {
	versions := map[string]uint64{}
	for resource, informer := range map[string]cache.SharedIndexInformer{"pods": c.podInformer, "nodes": c.nodeInformer} {
		if version, err := strconv.ParseUint(informer.LastSyncResourceVersion(), 10, 64); err == nil && version > 0 {
			versions[resource] = version
		}
	}
	return versions
}
