package extender

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/metrics"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/scheduling"
)

// cluster is a running scheduling.Scheduler, for benchmarks and fuzzing. It implements scheduling.API.
type cluster struct {
	*scheduling.Scheduler
	metrics     *metrics.Extender
	nodes, pods events

	mu sync.Mutex
	// unbound are the pods that can be bound, by name. All pods have the same namespace.
	unbound map[string]*corev1.Pod
}

// events is a watch. It needs no memory for the objects that it has delivered.
type events chan watch.Event

func (e events) ResultChan() <-chan watch.Event { return e }
func (e events) Stop()                          {}

// startCluster runs a Scheduler. options, if given, change its Options before.
func startCluster(t testing.TB, options ...func(*scheduling.Options)) *cluster {
	t.Helper()
	c := &cluster{
		nodes: make(events, 1000), pods: make(events, 1000), unbound: map[string]*corev1.Pod{},
		metrics: metrics.NewExtender(prometheus.NewRegistry()),
	}
	client := fake.NewClientset()
	for resource, events := range map[string]events{"nodes": c.nodes, "pods": c.pods} {
		client.PrependWatchReactor(resource, func(clienttesting.Action) (bool, watch.Interface, error) { return true, events, nil })
	}
	o := scheduling.Options{
		Client: client, API: c, Recorder: &record.FakeRecorder{}, Observer: c.metrics, CardPolicy: placement.Binpack,
		NodePolicy: placement.Binpack, BindTimeout: 10 * time.Second, Clock: clock.RealClock{},
	}
	for _, change := range options {
		change(&o)
	}
	var err error
	if c.Scheduler, err = scheduling.New(o); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	await(t, "the cache and the disruption budgets are synced", func() bool {
		_, err := c.Preempt(ctx, newPod("probe", 1), nil)
		return err == nil
	})
	return c
}

// addPod makes the watch report the pod. An unbound pod can be bound then.
func (c *cluster) addPod(pod *corev1.Pod) {
	c.mu.Lock()
	if pod.Spec.NodeName == "" {
		c.unbound[pod.Name] = pod
	}
	c.mu.Unlock()
	c.pods <- watch.Event{Type: watch.Added, Object: pod}
}

// addNode makes the watch report a node with cards of the given sizes in MiB.
func (c *cluster) addNode(t testing.TB, name string, cards ...gpu.Memory) {
	t.Helper()
	inventory, sum := protocol.Inventory{Unit: gpu.MiB}, gpu.Memory(0)
	for i, memory := range cards {
		inventory.Cards = append(inventory.Cards, gpu.Card{Index: i, Memory: memory, NUMANode: gpu.NoNUMANode})
		sum += memory
	}
	annotation, err := inventory.Annotation()
	if err != nil {
		t.Fatal(err)
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{protocol.AnnotationInventory: annotation}}}
	node.Status.Capacity = corev1.ResourceList{
		protocol.ResourceMemory: *resource.NewQuantity(int64(sum), resource.DecimalSI), corev1.ResourcePods: resource.MustParse("100"),
	}
	node.Status.Allocatable = node.Status.Capacity
	c.nodes <- watch.Event{Type: watch.Added, Object: node}
}

// awaitNode waits until the node has its cards and the number of allocations.
func (c *cluster) awaitNode(t testing.TB, name string, allocations int) {
	t.Helper()
	await(t, "the cache has the node and its pods", func() bool {
		node, ok := c.Node(name)
		return ok && len(node.Cards) > 0 && len(node.Allocations) == allocations
	})
}

// boundPod returns a pod that is bound to a node and annotated with a card.
func boundPod(name string, request int64, node string, card int) *corev1.Pod {
	pod := newPod(name, request)
	pod.Spec.NodeName = node
	pod.Annotations = protocol.Assignment{Card: card, Request: gpu.Memory(request), AssumeTime: time.Unix(1, 0)}.Annotations()
	return pod
}

// Bind binds the pod as the API server does, and makes the watch report that.
func (c *cluster) Bind(_ context.Context, binding *corev1.Binding) error {
	c.mu.Lock()
	pod := c.unbound[binding.Name]
	delete(c.unbound, binding.Name)
	c.mu.Unlock()
	if pod == nil || pod.UID != binding.UID {
		return apierrors.NewConflict(corev1.Resource("pods"), binding.Name, errors.New("precondition failed"))
	}
	pod = pod.DeepCopy()
	pod.Spec.NodeName, pod.Annotations = binding.Target.Name, binding.Annotations
	c.pods <- watch.Event{Type: watch.Modified, Object: pod}
	return nil
}

func (c *cluster) Pod(_ context.Context, _, name string) (*corev1.Pod, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if pod := c.unbound[name]; pod != nil {
		return pod.DeepCopy(), nil
	}
	return nil, apierrors.NewNotFound(corev1.Resource("pods"), name)
}

func (*cluster) PodsOn(context.Context, string) ([]corev1.Pod, error) {
	return nil, errors.New("not implemented")
}

func (*cluster) Evict(context.Context, gpu.Pod, bool) error { return errors.New("not implemented") }

func (*cluster) AnnotateNode(context.Context, string, string, string) error { return nil }
