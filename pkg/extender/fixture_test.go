package extender

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/cluster"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/metrics"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/protocol"
)

func TestMain(m *testing.M) {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	os.Exit(m.Run())
}

// fixture is the extender's router over a running cluster.Cluster that has the given objects.
type fixture struct {
	t        testing.TB
	client   kubernetes.Interface
	cluster  *cluster.Cluster
	registry *prometheus.Registry
	observer *watchful
	handler  http.Handler
	// serial is the number of pods that repeatBind has made.
	serial int
}

// watchful counts panics in addition to the metrics. No input may cause a panic.
type watchful struct {
	*metrics.Extender
	mu     sync.Mutex
	panics int
}

func (w *watchful) Answered(verb, outcome string, took time.Duration) {
	w.Extender.Answered(verb, outcome, took)
	if outcome == OutcomePanic {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.panics++
	}
}

func start(t testing.TB, objects ...runtime.Object) *fixture {
	t.Helper()
	return startWith(t, cluster.GangOptions{}, objects...)
}

func startWith(t testing.TB, gangs cluster.GangOptions, objects ...runtime.Object) *fixture {
	t.Helper()
	client := fake.NewClientset(objects...)
	f := &fixture{t: t, client: client, registry: prometheus.NewRegistry()}
	f.observer = &watchful{Extender: metrics.NewExtender(f.registry)}
	state, err := cluster.New(cluster.Options{
		Client: client, API: api{client}, Recorder: &record.FakeRecorder{}, Observer: f.observer.Extender,
		CardPolicy: placement.Binpack, BindTimeout: 10 * time.Second, Clock: clock.RealClock{}, Gangs: gangs,
	})
	if err != nil {
		t.Fatal(err)
	}
	f.cluster = state
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- state.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	await(t, "the ledger to stand", func() bool { return state.Ready() == nil })
	await(t, "disruption budgets to be known", func() bool {
		_, err := state.Preempt(ctx, newPod("probe", 1), nil)
		return err == nil
	})
	metrics.NewLedger(f.registry, state.Ledger(), state.Ready, true)
	f.handler = f.over(state)
	return f
}

// over returns the router over another Cluster.
func (f *fixture) over(c Cluster) http.Handler { return NewServer(f.options(c)).Handler() }

func (f *fixture) options(c Cluster) Options {
	return Options{
		Cluster: c, Observer: f.observer, Metrics: promhttp.HandlerFor(f.registry, promhttp.HandlerOpts{}),
		CardPolicy: placement.Binpack, NodePolicy: placement.Binpack, StopTimeout: 10 * time.Second,
	}
}

func await(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("gave up waiting for %s", what)
		}
	}
}

// api binds through the fake client in the way of the API server.
type api struct{ client kubernetes.Interface }

func (a api) Bind(ctx context.Context, binding *corev1.Binding) error {
	pod, err := a.Pod(ctx, binding.Namespace, binding.Name)
	if err != nil {
		return err
	}
	if pod.UID != binding.UID || pod.Spec.NodeName != "" {
		return apierrors.NewConflict(corev1.Resource("pods"), binding.Name, errors.New("precondition failed"))
	}
	pod.Spec.NodeName, pod.Annotations = binding.Target.Name, binding.Annotations
	_, err = a.client.CoreV1().Pods(binding.Namespace).Update(ctx, pod, metav1.UpdateOptions{})
	return err
}

func (a api) Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error) {
	return a.client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
}

func (a api) PodsOn(context.Context, string) ([]corev1.Pod, error) {
	return nil, errors.New("no terms here")
}

func (a api) Evict(context.Context, gpu.Pod, bool) error { return errors.New("no eviction expected") }

func (a api) AnnotateNode(context.Context, string, string, string) error { return nil }

// call sends a request through the router.
func (f *fixture) call(method, path, body string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	f.handler.ServeHTTP(w, newRequest(method, path, body))
	return w
}

// newRequest returns a request in the form that kube-scheduler sends.
func newRequest(method, path, body string) *http.Request {
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	return r
}

func (f *fixture) post(verb string, args any) *httptest.ResponseRecorder {
	f.t.Helper()
	body, err := json.Marshal(args)
	if err != nil {
		f.t.Fatal(err)
	}
	return f.call(http.MethodPost, Prefix+"/"+verb, string(body))
}

// answer decodes a JSON answer strictly, and checks its status.
func answer[T any](t testing.TB, w *httptest.ResponseRecorder, status int) T {
	t.Helper()
	var out T
	if w.Code != status {
		t.Fatalf("status %d, want %d: %s", w.Code, status, w.Body)
	}
	if got := w.Header().Get("Content-Type"); got != "application/json" {
		t.Errorf("Content-Type %q", got)
	}
	decoder := json.NewDecoder(bytes.NewReader(w.Body.Bytes()))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&out); err != nil {
		t.Fatalf("the answer can't be read: %v: %s", err, w.Body)
	}
	return out
}

func newPod(name string, request int64) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main"}}},
	}
	if request > 0 {
		pod.Spec.Containers[0].Resources.Limits = amount(protocol.ResourceMemory, request)
	}
	return pod
}

func boundPod(name string, request int64, node string, card int) *corev1.Pod {
	pod := newPod(name, request)
	pod.Spec.NodeName = node
	pod.Annotations = protocol.Assignment{Card: card, Request: gpu.Memory(request), AssumeTime: time.Unix(1, 0)}.Annotations()
	return pod
}

func amount(name corev1.ResourceName, n int64) corev1.ResourceList {
	return corev1.ResourceList{name: *resource.NewQuantity(n, resource.DecimalSI)}
}

// newNode returns a node with cards of the given sizes in MiB. A negative size makes an unhealthy card.
func newNode(t testing.TB, name string, cards ...int64) *corev1.Node {
	t.Helper()
	inventory, sum := protocol.Inventory{Unit: gpu.MiB}, int64(0)
	for i, memory := range cards {
		card := gpu.Card{Index: i, Memory: gpu.Memory(max(memory, -memory)), NUMANode: gpu.NoNUMANode}
		if memory < 0 {
			card.Unhealthy = "Xid 79"
		}
		inventory.Cards = append(inventory.Cards, card)
		sum += int64(card.Memory)
	}
	annotation, err := inventory.Annotation()
	if err != nil {
		t.Fatal(err)
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: name, Annotations: map[string]string{protocol.AnnotationInventory: annotation},
	}}
	node.Status.Capacity = amount(protocol.ResourceMemory, sum)
	node.Status.Allocatable = amount(corev1.ResourcePods, 100)
	maps.Copy(node.Status.Allocatable, node.Status.Capacity)
	return node
}

// seedsFigure is the filter figure of the existing extender's design document, with a request of 8138 MiB. n1 has 4069 MiB
// free in total, n2 has 4069 MiB free on each card, and n3 has 8138 MiB free on one card.
func seedsFigure(t testing.TB) []runtime.Object {
	return []runtime.Object{
		newNode(t, "n1", 16276, 16276), boundPod("a", 16276, "n1", 0), boundPod("b", 12207, "n1", 1),
		newNode(t, "n2", 16276, 16276), boundPod("c", 12207, "n2", 0), boundPod("d", 12207, "n2", 1),
		newNode(t, "n3", 16276, 16276), boundPod("e", 8138, "n3", 0), boundPod("f", 16276, "n3", 1),
	}
}

// broken is a Cluster that panics in every call except Ready.
type broken struct{ Cluster }

func (broken) Ready() error { return nil }

func (broken) Preempt(context.Context, *corev1.Pod, map[string]preemption.Victims) (map[string]preemption.Victims, error) {
	panic("never said")
}

func (broken) Bind(context.Context, cluster.BindRequest) error {
	var nothing *int
	return fmt.Errorf("never said: %d", *nothing)
}

// unready is a Cluster that is not synced.
type unready struct{ Cluster }

func (unready) Ready() error { return cluster.ErrNotReady }

func (unready) Preempt(context.Context, *corev1.Pod, map[string]preemption.Victims) (map[string]preemption.Victims, error) {
	return nil, cluster.ErrNotReady
}

func (unready) Bind(context.Context, cluster.BindRequest) error { return cluster.ErrNotReady }
