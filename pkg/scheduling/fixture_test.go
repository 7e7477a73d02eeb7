package scheduling

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientfake "k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

func TestMain(m *testing.M) {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	os.Exit(m.Run())
}

var (
	begin        = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	errLost      = fmt.Errorf("reading the answer: %w", io.ErrUnexpectedEOF)
	errForbidden = apierrors.NewForbidden(fake.PodResource, "p", errors.New("no permission"))
)

const (
	// tick is a step of the fake clock in which each loop of a Scheduler runs at most once.
	tick = 100 * time.Millisecond
	// patience is more time of the fake clock than any test waits.
	patience = time.Hour
)

// bubble makes the test run in a bubble of package synctest, as tests of a running Scheduler have to: the helpers that change something go
// on when all goroutines of the Scheduler wait, so what a test sees doesn't depend on how fast the machine is.
func bubble(test func(t *testing.T)) func(t *testing.T) {
	return func(t *testing.T) { synctest.Test(t, test) }
}

// fixture is a Scheduler on a fake API server. The test controls the server's answers and its watch separately.
type fixture struct {
	*Scheduler
	t        testing.TB
	clock    *clocktesting.FakeClock
	client   *clientfake.Clientset
	server   *fake.Server
	observer *fake.Observer
	events   chan string
}

// steppedClock is a clock that can be set forwards and back. As on a real machine, its timers don't follow.
type steppedClock struct {
	*clocktesting.FakeClock
	steps atomic.Int64
}

func (c *steppedClock) Now() time.Time { return c.FakeClock.Now().Add(time.Duration(c.steps.Load())) }

func (c *steppedClock) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

// newFixture returns a fixture that doesn't run. Its API server has the objects.
func newFixture(t testing.TB, o Options, objects ...runtime.Object) *fixture {
	t.Helper()
	recorder := record.NewFakeRecorder(100_000)
	o.Reservations = ReservationOptions{MaxIdle: 0.02, MaxAge: time.Hour}
	f := &fixture{
		t: t, clock: clocktesting.NewFakeClock(begin), client: clientfake.NewClientset(objects...), server: fake.NewServer(),
		observer: &fake.Observer{}, events: recorder.Events,
	}
	for _, object := range objects {
		if pod, ok := object.(*corev1.Pod); ok {
			f.server.Set(pod)
		}
	}
	if o.BindTimeout == 0 {
		o.BindTimeout = 30 * time.Second // No test reaches it.
	}
	o.Client, o.API, o.Recorder, o.Observer = f.client, f.server, recorder, f.observer
	o.CardPolicy, o.NodePolicy = placement.Binpack, placement.Binpack
	if stepped, ok := o.Clock.(*steppedClock); ok {
		stepped.FakeClock = f.clock
	} else {
		o.Clock = f.clock
	}
	var err error
	if f.Scheduler, err = New(o); err != nil {
		t.Fatal(err)
	}
	return f
}

// run runs the Scheduler until the test ends.
func (f *fixture) run() { await.Run(f.t, f.Run) }

// start runs a Scheduler until the test ends, and waits for the cache sync.
func start(t testing.TB, o Options, objects ...runtime.Object) *fixture {
	t.Helper()
	f := newFixture(t, o, objects...)
	if err := f.Ready(); !errors.Is(err, clustercache.ErrNotSynced) {
		t.Fatalf("Ready before Run: %v", err)
	}
	f.run()
	f.awaitSync()
	return f
}

// startCache is start for a test that makes the rounds of all loops itself: only the cache runs.
func startCache(t *testing.T, o Options, objects ...runtime.Object) *fixture {
	t.Helper()
	f := newFixture(t, o, objects...)
	await.Run(t, f.cache.Run)
	f.awaitSync()
	return f
}

func (f *fixture) awaitSync() {
	f.t.Helper()
	f.await("the cache sync", func() bool {
		return f.Ready() == nil && f.cache.BudgetsSynced() && f.observer.Count("synced") == 1
	})
	synctest.Wait() // The fake client's watches don't report changes from before they began.
}

// standby is true while another replica leads.
type standby struct{ atomic.Bool }

var errStandby = errors.New("another replica leads")

func (s *standby) leading() error {
	if s.Load() {
		return errStandby
	}
	return nil
}

func (f *fixture) await(what string, condition func() bool) {
	f.t.Helper()
	synctest.Wait()
	await.True(f.t, what, condition)
}

// pass advances the clock until the condition is true. The condition is checked when all that the Scheduler does in a tick is done.
func (f *fixture) pass(what string, condition func() bool) {
	f.t.Helper()
	for passed := time.Duration(0); passed < patience; passed += tick {
		f.clock.Step(tick)
		time.Sleep(tick) // The time of client-go.
		if synctest.Wait(); condition() {
			return
		}
	}
	f.t.Fatalf("after %v still waiting: %s", patience, what)
}

func request(pod *corev1.Pod, node string) BindRequest {
	return BindRequest{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, Node: node}
}

// bind binds the pod to node n1.
func (f *fixture) bind(pod *corev1.Pod) error { return f.Bind(f.t.Context(), request(pod, "n1")) }

// filter makes a filter call for the pod.
func (f *fixture) filter(pod *corev1.Pod, nodes ...string) FilterResult {
	f.t.Helper()
	result, err := f.Filter(pod, nodes)
	check.Must(f.t, err)
	return result
}

// publish makes the watch report the API server's current state of the pod.
func (f *fixture) publish(pod *corev1.Pod) {
	f.t.Helper()
	f.publishObject(f.server.Get(pod))
}

// publishObject makes the watch report the given pod.
func (f *fixture) publishObject(pod *corev1.Pod) {
	f.t.Helper()
	f.send(pod)
	synctest.Wait()
}

// send is publishObject without the wait until the Scheduler has received it.
func (f *fixture) send(pod *corev1.Pod) {
	f.t.Helper()
	pods := f.client.CoreV1().Pods(pod.Namespace)
	_, err := pods.Update(f.t.Context(), pod, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		_, err = pods.Create(f.t.Context(), pod, metav1.CreateOptions{})
	}
	check.NoError(f.t, err)
}

// publishGone makes the watch report that the pod was deleted.
func (f *fixture) publishGone(pod *corev1.Pod) {
	f.t.Helper()
	f.sendGone(pod)
	synctest.Wait()
}

// sendGone is publishGone without the wait until the Scheduler has received it.
func (f *fixture) sendGone(pod *corev1.Pod) {
	f.t.Helper()
	check.NoError(f.t, f.client.CoreV1().Pods(pod.Namespace).Delete(f.t.Context(), pod.Name, metav1.DeleteOptions{}))
}

// publishNode makes the watch report the node.
func (f *fixture) publishNode(node *corev1.Node) {
	f.t.Helper()
	if _, err := f.client.CoreV1().Nodes().Update(f.t.Context(), node, metav1.UpdateOptions{}); err != nil {
		f.t.Error(err)
	}
	synctest.Wait()
}

// allocation returns the pod's allocation, such as "bound n1 card 0", "assumed n1 card 0" or "none".
func (f *fixture) allocation(uid gpu.PodUID) string {
	node, allocation, ok := f.ledger.Lookup(uid)
	if !ok {
		return "none"
	}
	state := map[ledger.State]string{ledger.Assumed: "assumed", ledger.Bound: "bound"}[allocation.State]
	return fmt.Sprint(state, " ", node, " ", allocation.Placement)
}

func (f *fixture) want(pod *corev1.Pod, want string) {
	f.t.Helper()
	if got := f.allocation(gpu.PodUID(pod.UID)); got != want {
		f.t.Errorf("the allocation of %s is %q, want %q", pod.Name, got, want)
	}
}

// wantSettled is want, once all that the Scheduler does now is done.
func (f *fixture) wantSettled(pod *corev1.Pod, want string) {
	f.t.Helper()
	synctest.Wait()
	f.want(pod, want)
}

// fits reports whether the pod would find memory on the node.
func (f *fixture) fits(pod gpu.Pod, node string) (fits bool) {
	_, fits = f.ledger.FirstFit(pod, []string{node})
	return fits
}

// wantEvent waits for an Event and compares it.
func (f *fixture) wantEvent(want string) {
	f.t.Helper()
	if event := await.Receive(f.t, want, f.events); event != want {
		f.t.Errorf("Event %q, want %q", event, want)
	}
}

// requeued returns the nodes that were changed to requeue pods.
func (f *fixture) requeued() []string { return f.server.Calls().Annotated }
