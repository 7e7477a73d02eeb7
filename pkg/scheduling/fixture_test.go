package scheduling

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// fixture is a running Cluster on a fake API server. The test controls its answers and its watch separately.
type fixture struct {
	*Cluster
	t      testing.TB
	clock  *clocktesting.FakeClock
	client *fake.Clientset
	server *server
	counts *counts
	events chan string
}

// begin is the time on the fixture's clock at the start of each test.
var begin = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)

// start runs a Cluster whose API server has the objects.
func start(t testing.TB, bindTimeout time.Duration, objects ...runtime.Object) *fixture {
	t.Helper()
	return startWith(t, Options{BindTimeout: bindTimeout}, func(*Cluster) {}, objects...)
}

// leadership holds the answer of Options.Leading. A test may change it while Run calls it.
type leadership struct{ hindrance atomic.Pointer[error] }

// ask implements Options.Leading.
func (l *leadership) ask() error {
	if err := l.hindrance.Load(); err != nil {
		return *err
	}
	return nil
}

// set sets the answer; nil means that this process leads.
func (l *leadership) set(err error) {
	if err == nil {
		l.hindrance.Store(nil)
	} else {
		l.hindrance.Store(&err)
	}
}

// startWith runs a Cluster with the options of the test in addition to the fixture's. change modifies the Cluster
// before Run.
func startWith(t testing.TB, o Options, change func(*Cluster), objects ...runtime.Object) *fixture {
	t.Helper()
	client := fake.NewClientset(objects...)
	watching := make(chan struct{}, 100)
	client.PrependWatchReactor("*", func(action clienttesting.Action) (bool, watch.Interface, error) {
		options := action.(clienttesting.WatchActionImpl).ListOptions
		w, err := client.Tracker().Watch(action.GetResource(), action.GetNamespace(), options)
		watching <- struct{}{}
		return true, w, err
	})
	f := &fixture{
		t: t, client: client, counts: &counts{n: map[string]int{}},
		clock:  clocktesting.NewFakeClock(begin),
		server: &server{pods: map[types.NamespacedName]*corev1.Pod{}},
	}
	for _, object := range objects {
		if pod, ok := object.(*corev1.Pod); ok {
			f.server.set(pod)
		}
	}
	recorder := record.NewFakeRecorder(100_000)
	f.events = recorder.Events
	o.Client, o.API, o.Recorder, o.Observer = client, f.server, recorder, f.counts
	o.CardPolicy, o.Clock = placement.Binpack, f.clock
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	f.Cluster = c
	change(c)
	if err := c.Ready(); !errors.Is(err, ErrNotReady) {
		t.Fatalf("Ready before Run: %v, want ErrNotReady", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	for range []string{"nodes", "pods", "disruption budgets"} {
		<-watching // The fake client's watch does not report changes from before it began.
	}
	// Wait for CacheSynced as well: Run has then finished reading what depends on the sync, and the test may change it.
	f.await("the ledger to stand", func() bool { return c.Ready() == nil && c.sync.budgets() && f.counts.of("rebuilt") == 1 })
	f.await("the settler's ticker", f.clock.HasWaiters)
	return f
}

// await waits for a condition.
func (f *fixture) await(what string, condition func() bool) {
	f.t.Helper()
	await(f.t, what, condition)
}

func await(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("gave up waiting for %s", what)
		}
	}
}

func (f *fixture) request(pod *corev1.Pod, node string) BindRequest {
	return BindRequest{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, Node: node}
}

// bind binds the pod to node n1.
func (f *fixture) bind(pod *corev1.Pod) error { return f.Bind(f.t.Context(), f.request(pod, "n1")) }

// publish makes the watch report the API server's current state of the pod.
func (f *fixture) publish(pod *corev1.Pod) {
	f.t.Helper()
	f.publishObject(f.server.get(pod))
}

// publishObject makes the watch report the given pod.
func (f *fixture) publishObject(pod *corev1.Pod) {
	f.t.Helper()
	pods := f.client.CoreV1().Pods(pod.Namespace)
	_, err := pods.Update(f.t.Context(), pod, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		_, err = pods.Create(f.t.Context(), pod, metav1.CreateOptions{})
	}
	if err != nil {
		f.t.Fatal(err)
	}
}

// publishGone makes the watch report that the pod was deleted.
func (f *fixture) publishGone(pod *corev1.Pod) {
	f.t.Helper()
	if err := f.client.CoreV1().Pods(pod.Namespace).Delete(f.t.Context(), pod.Name, metav1.DeleteOptions{}); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) publishNode(node *corev1.Node) {
	f.t.Helper()
	nodes := f.client.CoreV1().Nodes()
	_, err := nodes.Update(f.t.Context(), node, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		_, err = nodes.Create(f.t.Context(), node, metav1.CreateOptions{})
	}
	if err != nil {
		f.t.Fatal(err)
	}
}

// held returns the state and the placement of the pod in the ledger, such as "bound n1 card 0".
func (f *fixture) held(pod *corev1.Pod) string {
	node, holder, ok := f.ledger.Lookup(gpu.PodUID(pod.UID))
	if !ok {
		return "not held"
	}
	return fmt.Sprintf("%s %s %s", holder.State, node, holder.Placement)
}

func (f *fixture) wantHeld(pod *corev1.Pod, want string) {
	f.t.Helper()
	if got := f.held(pod); got != want {
		f.t.Errorf("%s is %q, want %q", pod.Name, got, want)
	}
}

func (f *fixture) awaitHeld(pod *corev1.Pod, want string) {
	f.t.Helper()
	f.await(fmt.Sprintf("%s to be %q", pod.Name, want), func() bool { return f.held(pod) == want })
}

// wantEvent waits for an Event and compares it.
func (f *fixture) wantEvent(want string) {
	f.t.Helper()
	select {
	case event := <-f.events:
		if event != want {
			f.t.Errorf("Event %q, want %q", event, want)
		}
	case <-time.After(30 * time.Second):
		f.t.Errorf("no Event, want %q", want)
	}
}

// isOpen reports whether the settler has an open bind of the pod.
func (f *fixture) isOpen(pod *corev1.Pod) bool {
	f.settler.mu.Lock()
	defer f.settler.mu.Unlock()
	_, open := f.settler.open[gpu.PodUID(pod.UID)]
	return open
}

// look lets time pass, and waits until the settler has read a pod at least once more.
func (f *fixture) look(after time.Duration) {
	f.t.Helper()
	reads, stepped := f.server.readsSoFar(), time.Time{}
	f.await("the settler to look", func() bool {
		if f.server.readsSoFar() > reads {
			return true
		}
		// Step again after a while: the settler may have been about to record the time of its last read when the clock
		// moved.
		if time.Since(stepped) > time.Second {
			f.clock.Step(after)
			stepped = time.Now()
		}
		return false
	})
}

// server is the API server's state of pods, independent of what the watch has reported. It binds as the real API server
// does, unless a test sets onBind.
type server struct {
	mu   sync.Mutex
	pods map[types.NamespacedName]*corev1.Pod
	// onBind replaces the answer to a Binding if set.
	onBind func(ctx context.Context, binding *corev1.Binding) error
	// noReads is the error of live reads if set.
	noReads error
	reads   int
	binds   int
	// annotated are the nodes of which an annotation was set.
	annotated []string
	// evicted are the pods whose eviction was requested. A dry run has the prefix "?".
	evicted []string
	// onEvict replaces the answer to an eviction if set.
	onEvict func(pod gpu.Pod, dryRun bool) error
	// noAnnotations is the error of AnnotateNode if set.
	noAnnotations error
	// committed is called with each pod that was bound.
	committed func(pod *corev1.Pod)
}

func (s *server) set(pod *corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pods[types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}] = pod.DeepCopy()
}

func (s *server) get(pod *corev1.Pod) *corev1.Pod {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pods[types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}].DeepCopy()
}

func (s *server) remove(pod *corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pods, types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name})
}

func (s *server) with(change func(s *server)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(s)
}

func (s *server) readsSoFar() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reads
}

func (s *server) bindsSoFar() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.binds
}

func (s *server) wakes() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.annotated...)
}

// Bind implements API.
func (s *server) Bind(ctx context.Context, binding *corev1.Binding) error {
	s.mu.Lock()
	s.binds++
	answer := s.onBind
	s.mu.Unlock()
	if answer != nil {
		return answer(ctx, binding)
	}
	return s.commit(ctx, binding)
}

var podResource = corev1.Resource("pods")

// commit binds as the API server does: once, if the UID matches, with annotations and node in one write.
func (s *server) commit(_ context.Context, binding *corev1.Binding) error {
	s.mu.Lock()
	pod, ok := s.pods[types.NamespacedName{Namespace: binding.Namespace, Name: binding.Name}]
	switch {
	case !ok:
		s.mu.Unlock()
		return apierrors.NewNotFound(podResource, binding.Name)
	case pod.UID != binding.UID, pod.Spec.NodeName != "":
		s.mu.Unlock()
		return apierrors.NewConflict(podResource, binding.Name, errors.New("precondition failed, or already assigned"))
	}
	bound := pod.DeepCopy()
	if bound.Annotations == nil {
		bound.Annotations = map[string]string{}
	}
	maps.Copy(bound.Annotations, binding.Annotations)
	bound.Spec.NodeName = binding.Target.Name
	s.pods[types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}] = bound
	committed := s.committed
	s.mu.Unlock()
	if committed != nil {
		committed(bound.DeepCopy())
	}
	return nil
}

// PodsOn implements API.
func (s *server) PodsOn(ctx context.Context, node string) ([]corev1.Pod, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reads++
	if err := errors.Join(ctx.Err(), s.noReads); err != nil {
		return nil, err
	}
	var pods []corev1.Pod
	for _, pod := range s.pods {
		if pod.Spec.NodeName == node {
			pods = append(pods, *pod.DeepCopy())
		}
	}
	return pods, nil
}

// Pod implements API.
func (s *server) Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reads++
	if err := errors.Join(ctx.Err(), s.noReads); err != nil {
		return nil, err
	}
	pod, ok := s.pods[types.NamespacedName{Namespace: namespace, Name: name}]
	if !ok {
		return nil, apierrors.NewNotFound(podResource, name)
	}
	return pod.DeepCopy(), nil
}

// Evict implements API.
func (s *server) Evict(_ context.Context, pod gpu.Pod, dryRun bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := pod.Name
	if dryRun {
		name = "?" + name
	}
	s.evicted = append(s.evicted, name)
	if s.onEvict != nil {
		return s.onEvict(pod, dryRun)
	}
	return nil
}

// AnnotateNode implements API.
func (s *server) AnnotateNode(_ context.Context, node, key, value string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.noAnnotations != nil {
		return s.noAnnotations
	}
	if key != protocol.AnnotationFreed || value == "" {
		return fmt.Errorf("annotated with %q=%q", key, value)
	}
	s.annotated = append(s.annotated, node)
	return nil
}

// counts implements Observer.
type counts struct {
	mu sync.Mutex
	n  map[string]int
}

func (c *counts) add(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n[what]++
}

func (c *counts) of(what string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n[what]
}

func (c *counts) BindFinished(result string)  { c.add("bind " + result) }
func (c *counts) BindResolved(outcome string) { c.add("settled " + outcome) }
func (c *counts) CacheSynced(time.Duration)   { c.add("rebuilt") }
func (c *counts) Evicted(result string)       { c.add("evicted " + result) }
func (c *counts) Requeued()                   { c.add("woken") }
func (c *counts) APIWrite(kind string)        { c.add("write " + kind) }

// newPod returns an unbound pod that asks for GPU memory.
func newPod(name string, request int64) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name:      "main",
			Resources: corev1.ResourceRequirements{Limits: amount(protocol.ResourceMemory, request)},
		}}},
		Status: corev1.PodStatus{Phase: corev1.PodPending},
	}
}

// boundPod returns a pod that is bound to a node and annotated with a card.
func boundPod(name string, request int64, node string, card int) *corev1.Pod {
	pod := newPod(name, request)
	pod.Spec.NodeName = node
	pod.Annotations = protocol.Assignment{Card: card, Request: gpu.Memory(request), AssumeTime: time.Unix(1, 0)}.Annotations()
	return pod
}

func amount(name corev1.ResourceName, n int64) corev1.ResourceList {
	return corev1.ResourceList{name: *resource.NewQuantity(n, resource.DecimalSI)}
}

// newNode returns a node with cards of the given sizes, as the device plugin reports it.
func newNode(t testing.TB, name string, cards ...int64) *corev1.Node {
	t.Helper()
	inventory, sum := protocol.Inventory{Unit: gpu.MiB}, int64(0)
	for i, memory := range cards {
		inventory.Cards = append(inventory.Cards, gpu.Card{Index: i, Memory: gpu.Memory(memory), NUMANode: gpu.NoNUMANode})
		sum += memory
	}
	annotation, err := inventory.Annotation()
	if err != nil {
		t.Fatal(err)
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: name, Annotations: map[string]string{protocol.AnnotationInventory: annotation},
	}}
	node.Status.Capacity = amount(protocol.ResourceMemory, sum)
	maps.Copy(node.Status.Capacity, amount(protocol.ResourceCount, int64(len(cards))))
	return node
}
