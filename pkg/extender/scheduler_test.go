package extender

import (
	"context"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/watch"
	clientfake "k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/metrics"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/scheduling"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/fake"
)

// cluster is a running scheduling.Scheduler, for benchmarks and fuzzing.
type cluster struct {
	*scheduling.Scheduler
	metrics     *metrics.Extender
	nodes, pods events
	// server has the pods that can be bound.
	server *fake.Server
}

// events is a watch. It needs no memory for the objects that it has delivered.
type events chan watch.Event

func (e events) ResultChan() <-chan watch.Event { return e }
func (e events) Stop()                          {}

// startCluster runs a Scheduler. options, if given, change its Options before.
func startCluster(t testing.TB, options ...func(*scheduling.Options)) *cluster {
	t.Helper()
	c := &cluster{
		nodes: make(events, 1000), pods: make(events, 1000), server: fake.NewServer(),
		metrics: metrics.NewExtender(prometheus.NewRegistry()),
	}
	c.server.Answer(fake.Answers{Bind: c.bind})
	client := clientfake.NewClientset()
	for resource, events := range map[string]events{"nodes": c.nodes, "pods": c.pods} {
		client.PrependWatchReactor(resource, func(clienttesting.Action) (bool, watch.Interface, error) { return true, events, nil })
	}
	o := scheduling.Options{
		Client: client, API: c.server, Recorder: &record.FakeRecorder{}, Observer: c.metrics, CardPolicy: placement.Binpack,
		NodePolicy: placement.Binpack, BindTimeout: 10 * time.Second, Clock: clock.RealClock{},
	}
	for _, change := range options {
		change(&o)
	}
	var err error
	if c.Scheduler, err = scheduling.New(o); err != nil {
		t.Fatal(err)
	}
	await.Run(t, c.Run)
	await.True(t, "the cache and the disruption budgets are synced", func() bool {
		_, err := c.Preempt(t.Context(), fake.Pod("probe", 1), nil)
		return err == nil
	})
	return c
}

// addPod makes the watch report the pod. An unbound pod can be bound then.
func (c *cluster) addPod(pod *corev1.Pod) {
	if pod.Spec.NodeName == "" {
		c.server.Set(pod)
	}
	c.pods <- watch.Event{Type: watch.Added, Object: pod}
}

// bind binds the pod as the API server does, and makes the watch report that.
func (c *cluster) bind(_ context.Context, binding *corev1.Binding) error {
	if err := c.server.Commit(binding); err != nil {
		return err
	}
	c.pods <- watch.Event{Type: watch.Modified, Object: c.server.Get(&corev1.Pod{ObjectMeta: binding.ObjectMeta})}
	return nil
}

// addNode makes the watch report a node with cards of the given sizes in MiB.
func (c *cluster) addNode(name string, cards ...int64) {
	c.nodes <- watch.Event{Type: watch.Added, Object: fake.Node(name, cards...)}
}

// awaitNode waits until the node has its cards and the number of allocations.
func (c *cluster) awaitNode(t testing.TB, name string, allocations int) {
	t.Helper()
	await.True(t, "the cache has the node and its pods", func() bool {
		node, ok := c.Node(name)
		return ok && len(node.Cards) > 0 && len(node.Allocations) == allocations
	})
}
