package eviction

import (
	"context"
	"fmt"
	"io"
	"net/url"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/fake"
)

var (
	begin      = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	recordName = types.NamespacedName{Namespace: "gpushare", Name: "evictions"}
	errLost    = fmt.Errorf("reading the answer: %w", io.ErrUnexpectedEOF)
	errTimeout = &url.Error{Op: "Post", URL: "https://192.0.2.1/api/v1/", Err: context.DeadlineExceeded}
)

// cluster implements Cache. A test reports pods to it and to the ledger.
type cluster struct {
	ledger  *ledger.Ledger
	pods    map[string]*clustercache.PodInfo
	nodes   map[string]*corev1.Node
	budgets []*policyv1.PodDisruptionBudget
	// notReady is the answer of Ready.
	notReady, budgetsNotSynced error
	// informed receives the changes of pods.
	informed *Preemptors
	// noCPU are nodes without CPU for any pod.
	noCPU map[string]bool
}

func newCluster(objects ...runtime.Object) *cluster {
	c := &cluster{pods: map[string]*clustercache.PodInfo{}, nodes: map[string]*corev1.Node{}}
	var nodes []*corev1.Node
	for _, object := range objects {
		switch o := object.(type) {
		case *corev1.Node:
			nodes, c.nodes[o.Name] = append(nodes, o), o
		case *policyv1.PodDisruptionBudget:
			c.budgets = append(c.budgets, o)
		}
	}
	enough := fake.Resources(func(q ledger.ResourceQuery) bool { return !c.noCPU[q.Node] })
	c.ledger, c.informed = fake.LedgerWith(enough, nodes...), NewPreemptors(NewExecutor(Options{}, recordName), false, func() {})
	for _, object := range objects {
		if pod, ok := object.(*corev1.Pod); ok {
			c.report(pod)
		}
	}
	return c
}

// report reports a new or changed pod, as the event handlers of package scheduling do.
func (c *cluster) report(object *corev1.Pod) {
	pod := clustercache.NewPodInfo(object)
	c.pods[pod.Name] = pod
	switch {
	case pod.Request == 0:
	case pod.Node != "":
		c.ledger.SetBound(pod.Node, pod.Pod, pod.Placement, pod.AssumeTime)
		c.informed.Forget(pod.UID)
		c.ledger.End(ledger.Nominated, string(pod.UID))
	case c.informed.Renew(pod.Pod, pod.NominatedNode):
	case pod.NominatedNode != "":
		c.ledger.Nominate(pod.NominatedNode, pod.Pod)
	default:
		c.ledger.End(ledger.Nominated, string(pod.UID))
	}
}

// delete reports that the pod is gone.
func (c *cluster) delete(object *corev1.Pod) {
	uid := gpu.PodUID(object.UID)
	delete(c.pods, object.Name)
	c.ledger.Remove(uid)
	c.informed.Forget(uid)
	c.ledger.End(ledger.Nominated, string(uid))
}

func (c *cluster) Ready() error                        { return c.notReady }
func (c *cluster) MayOveruse() []*clustercache.PodInfo { return nil }

func (c *cluster) BudgetsSynced() bool { return c.budgetsNotSynced == nil }

func (c *cluster) Pod(_, name string) (*clustercache.PodInfo, bool) {
	pod, ok := c.pods[name]
	return pod, ok
}

func (c *cluster) PodsOn(node string) (pods []*clustercache.PodInfo) {
	for _, pod := range c.pods {
		if !pod.Ended && (pod.Node == node || pod.NominatedNode == node) {
			pods = append(pods, pod)
		}
	}
	return pods
}

func (c *cluster) Node(name string) (*corev1.Node, bool) {
	node, ok := c.nodes[name]
	return node, ok
}

func (c *cluster) Budgets(namespace string) (budgets []*policyv1.PodDisruptionBudget) {
	for _, budget := range c.budgets {
		if budget.Namespace == namespace {
			budgets = append(budgets, budget)
		}
	}
	return budgets
}

// fixture is Preemptors that don't run: the test moves the clock and calls their steps.
//
// Its node n1 has two cards of 16. a7 and a5, of priority 1, use 7 and 5 of the first card; b12, of priority 2, uses 12 of the
// second card. The pending pod, of priority 9, asks for 8: the node's sum has room for it, but no card has.
type fixture struct {
	*Preemptors
	*cluster
	t        testing.TB
	clock    *clocktesting.FakeClock
	server   *fake.Server
	observer *fake.Observer
	events   chan string
	standby  error
	// requeues counts the requeues of rejected pods.
	requeues             int
	a7, a5, b12, pending *corev1.Pod
}

// newFixture returns a fixture, which change may change before the cluster is built from its pods and the objects.
func newFixture(t testing.TB, change func(*fixture), objects ...runtime.Object) *fixture {
	recorder := record.NewFakeRecorder(1000)
	f := &fixture{
		t: t, clock: clocktesting.NewFakeClock(begin), server: fake.NewServer(), observer: &fake.Observer{}, events: recorder.Events,
		a7:  fake.Pod("a7", 7, fake.Bound("n1", 0), fake.Priority(1)),
		a5:  fake.Pod("a5", 5, fake.Bound("n1", 0), fake.Priority(1)),
		b12: fake.Pod("b12", 12, fake.Bound("n1", 1), fake.Priority(2)), pending: fake.Pod("pending", 8, fake.Priority(9)),
	}
	if change != nil {
		change(f)
	}
	f.cluster = newCluster(append(objects, fake.Node("n1", 16, 16), f.a7, f.a5, f.b12, f.pending)...)
	for _, object := range append(objects, f.a7, f.a5, f.b12, f.pending) {
		if pod, ok := object.(*corev1.Pod); ok {
			f.server.Set(pod)
		}
	}
	f.Preemptors = NewPreemptors(NewExecutor(f.options(recorder), recordName), true, func() { f.requeues++ })
	f.informed = f.Preemptors
	f.executor.Tick(context.Background())
	return f
}

func (f *fixture) options(recorder record.EventRecorder) Options {
	return Options{
		API: f.server, Ledger: f.ledger, Cache: f.cluster, Recorder: recorder, Observer: f.observer,
		AnswerLost: 65 * time.Second, Leading: func() error { return f.standby }, Clock: f.clock, NewGroup: background.Goroutines,
	}
}

// report lets the API server have the pod, and reports it.
func (f *fixture) report(pod *corev1.Pod) {
	f.server.Set(pod)
	f.cluster.report(pod)
}

// delete lets the API server lose the pod, and reports that.
func (f *fixture) delete(pod *corev1.Pod) {
	f.server.Remove(pod)
	f.cluster.delete(pod)
}

// withSecondNode returns a node n2 of two cards of 16, with a pod with 12 of priority 1 on one and a pod with 12 of priority 2
// on the other.
func withSecondNode() []runtime.Object {
	return []runtime.Object{
		fake.Node("n2", 16, 16), fake.Pod("c12", 12, fake.Bound("n2", 0), fake.Priority(1)), fake.Pod("d12", 12, fake.Bound("n2", 1), fake.Priority(2)),
	}
}

// reject records that filter found no room for the pod on the nodes.
func (f *fixture) reject(pod *corev1.Pod, nodes ...string) {
	f.Rejected(protocol.Pod(pod), pod.Status.NominatedNodeName, slices.Values(nodes), f.clock.Now())
}

// startRound makes filter reject the pending pod, so that a round begins.
func (f *fixture) startRound() {
	f.reject(f.pending, "n1")
	f.later(cycle)
}

// later advances the clock and makes one step, as Run does.
func (f *fixture) later(d time.Duration) {
	f.clock.Step(d)
	f.executor.Tick(context.Background())
	f.Tick(context.Background())
}

// reserves reports whether a card is reserved for the pending pod.
func (f *fixture) reserves() bool {
	_, reserves := f.all["uid-pending"]
	return reserves
}

// fitsFor reports whether another pod would find memory on n1.
func (f *fixture) fitsFor(priority int32, memory gpu.Memory) bool {
	return f.fits(gpu.Pod{UID: "other", Priority: priority, Request: memory}, "n1")
}

// wantEvicted compares the requested evictions so far. A dry run has the prefix "?".
func (f *fixture) wantEvicted(want ...string) {
	f.t.Helper()
	if got := f.server.Calls().Evicted; !slices.Equal(got, want) {
		f.t.Errorf("evicted %v, want %v", got, want)
	}
}
