package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	events "k8s.io/client-go/tools/record"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// await waits for a condition. Its deadline is only there to end a test that has failed.
func await(t testing.TB, what string, condition func() bool) {
	t.Helper()
	err := wait.PollUntilContextTimeout(context.Background(), 2*time.Millisecond, 30*time.Second, true,
		func(context.Context) (bool, error) { return condition(), nil })
	if err != nil {
		t.Fatalf("waited in vain for: %s", what)
	}
}

// bench is a node: an API server's fake, the kubelet's directory, and plugins that are started on them.
type bench struct {
	t      *testing.T
	client *fake.Clientset
	dir    string
	events *events.FakeRecorder
	// blind informers are told nothing after their first list but by watcher.
	blind   bool
	watcher *watch.FakeWatcher
	// away makes every write fail.
	away atomic.Bool
	// hanging is what the plugins' requests go through, if set.
	hanging *hanging
	// watches counts the watches of pods that stand.
	watches atomic.Int32
	socket  string
	address string
	// errorEnv and deviceList are options of the plugins.
	errorEnv   bool
	deviceList DeviceListStrategy
	// patience is how long plugins wait for the mirror of a static pod, where that isn't the usual time.
	patience time.Duration
}

// fakeClient is a fake as the plugin sees it.
func fakeClient(api *fake.Clientset) Client {
	return Client{
		Pods: func(namespace string) Objects[*corev1.Pod, *corev1.PodList] { return api.CoreV1().Pods(namespace) }, Nodes: api.CoreV1().Nodes(),
		PlainLists: true,
	}
}

func newBench(t *testing.T, objects ...runtime.Object) *bench {
	t.Helper()
	// Sockets have short names only.
	dir, err := os.MkdirTemp("", "gpushare")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: testNode}}
	b := &bench{t: t, dir: dir, events: events.NewFakeRecorder(1000), watcher: watch.NewFake()}
	b.client = fake.NewClientset(append(objects, node)...)
	b.client.PrependReactor("patch", "*", func(clienttesting.Action) (bool, runtime.Object, error) {
		if b.away.Load() {
			return true, nil, errors.New("the API server is away")
		}
		return false, nil, nil
	})
	b.client.PrependWatchReactor("pods", func(action clienttesting.Action) (bool, watch.Interface, error) {
		if b.blind {
			return true, b.watcher, nil
		}
		options := action.(clienttesting.WatchActionImpl).ListOptions
		w, err := b.client.Tracker().Watch(action.GetResource(), action.GetNamespace(), options)
		b.watches.Add(1)
		return true, w, err
	})
	return b
}

// start runs a plugin until the test ends or stop is called.
func (b *bench) start(cards []gpu.Card) (plugin *Plugin, stop func()) {
	b.t.Helper()
	client := fakeClient(b.client)
	if b.hanging != nil {
		client = b.hanging.around(client)
	}
	p, err := New(Options{
		Client: client, Events: b.events, NodeName: testNode, Unit: gpu.GiB, VisibleDevices: VisibleByUUID,
		DeviceList: b.deviceList, ErrorEnv: b.errorEnv,
		Directory: b.dir, PodResourcesSocket: b.socket, ListenAddress: b.address,
	})
	if err != nil {
		b.t.Fatal(err)
	}
	p.registrar.settle = time.Millisecond
	p.service.interval = time.Millisecond
	p.allocator.statusPatience = 500 * time.Millisecond
	if b.patience > 0 {
		p.allocator.patience = b.patience
	}
	if cards != nil {
		p.SetCards(cards, nil, "")
	}
	watches := b.watches.Load()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			b.t.Errorf("Run: %v", err)
		}
	})
	b.t.Cleanup(stop)
	if !b.blind {
		// The fake forgets what happens between list and watch.
		await(b.t, "the informer's watch", func() bool { return p.pods.informer.HasSynced() && b.watches.Load() > watches })
	}
	return p, stop
}

// create makes a pod and waits until the plugin knows it.
func (b *bench) create(p *Plugin, pods ...*corev1.Pod) {
	b.t.Helper()
	for _, pod := range pods {
		if _, err := b.client.CoreV1().Pods(pod.Namespace).Create(context.Background(), pod, metav1.CreateOptions{}); err != nil {
			b.t.Fatal(err)
		}
		if !b.blind {
			await(b.t, "the informer to know "+pod.Name, func() bool { return p.pods.Exists(kubeletUID(pod)) })
		}
	}
}

// delete removes a pod and waits until the informer knows.
func (b *bench) delete(p *Plugin, pod *corev1.Pod) {
	b.t.Helper()
	if err := b.client.CoreV1().Pods(pod.Namespace).Delete(context.Background(), pod.Name, metav1.DeleteOptions{}); err != nil {
		b.t.Fatal(err)
	}
	await(b.t, "the informer to miss "+pod.Name, func() bool { return !p.pods.Exists(kubeletUID(pod)) })
}

func (b *bench) pod(name string) *corev1.Pod {
	b.t.Helper()
	pod, err := b.client.CoreV1().Pods("default").Get(context.Background(), name, metav1.GetOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	return pod
}

func (b *bench) node() *corev1.Node {
	b.t.Helper()
	node, err := b.client.CoreV1().Nodes().Get(context.Background(), testNode, metav1.GetOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	return node
}

// awaitAssigned waits until the pod's annotations say that it was given the card.
func (b *bench) awaitAssigned(name string, card int) protocol.Assignment {
	b.t.Helper()
	var got protocol.Assignment
	await(b.t, fmt.Sprintf("%s to be assigned card %d", name, card), func() bool {
		var err error
		got, err = protocol.ParseAssignment(b.pod(name).Annotations)
		return err == nil && got.Assigned && got.Card == card
	})
	return got
}

// awaitEvent waits for an event with these words.
func (b *bench) awaitEvent(words string) {
	b.t.Helper()
	deadline := time.After(30 * time.Second)
	for {
		select {
		case event := <-b.events.Events:
			if strings.Contains(event, words) {
				return
			}
		case <-deadline:
			b.t.Fatalf("no event says %q", words)
		}
	}
}

// admit admits a pod and fails the test where it is refused.
func (k *kubelet) mustAdmit(pod *corev1.Pod, containers ...string) map[string]map[string]string {
	k.t.Helper()
	env, err := k.admit(pod, containers...)
	if err != nil {
		k.t.Fatalf("pod %s: %v", pod.Name, err)
	}
	return env
}

func counted(t *testing.T, p *Plugin, o outcome) float64 {
	t.Helper()
	return testutil.ToFloat64(p.metrics.allocations.WithLabelValues(string(o)))
}

func TestAllocateEarliestAssumedFirst(t *testing.T) {
	b := newBench(t)
	k := startKubelet(t, b.dir)
	p, _ := b.start(newCards(16, 16))
	k.awaitDevices(32, 32)

	pods := []*corev1.Pod{
		newPod("third", main(4), assumed(0, 3)), newPod("first", main(4), assumed(1, 1)), newPod("second", main(4), assumed(0, 2)),
	}
	b.create(p, pods...)
	for _, name := range []string{"first", "second", "third"} {
		before := b.pod(name)
		env := k.mustAdmit(before)["main"]
		assignment, err := protocol.ParseAssignment(before.Annotations)
		if err != nil {
			t.Fatal(err)
		}
		want := map[string]string{
			"NVIDIA_VISIBLE_DEVICES":       fmt.Sprintf("GPU-%d", assignment.Card),
			"ALIYUN_COM_GPU_MEM_IDX":       before.Annotations["ALIYUN_COM_GPU_MEM_IDX"],
			"ALIYUN_COM_GPU_MEM_POD":       before.Annotations["ALIYUN_COM_GPU_MEM_POD"],
			"ALIYUN_COM_GPU_MEM_DEV":       before.Annotations["ALIYUN_COM_GPU_MEM_DEV"],
			"ALIYUN_COM_GPU_MEM_CONTAINER": "4",
		}
		if diff := cmp.Diff(want, env); diff != "" {
			t.Errorf("%s (-want +got)\n%s", name, diff)
		}
		after := b.awaitAssigned(name, assignment.Card)
		if !after.AssumeTime.Equal(assignment.AssumeTime) || after.AssignTime.IsZero() {
			t.Errorf("%s: assumed %v, before %v; assigned %v", name, after.AssumeTime, assignment.AssumeTime, after.AssignTime)
		}
	}
	if got := counted(t, p, kept); got != 3 {
		t.Errorf("counted %v allocations, want 3", got)
	}
	if got := testutil.ToFloat64(p.metrics.otherDevices); got != 0 {
		t.Errorf("the kubelet booked devices of another card %v times", got)
	}
}

func TestNodeTellsItsCards(t *testing.T) {
	b := newBench(t)
	k := startKubelet(t, b.dir)
	cards := newCards(16, 24)
	cards[1].Unhealthy = "Xid 79"
	b.start(cards)
	k.awaitDevices(16, 40)
	inventory, err := protocol.ParseInventory(b.node().Annotations)
	if err != nil {
		t.Fatalf("registered before the inventory was written: %v", err)
	}
	if diff := cmp.Diff(protocol.Inventory{Unit: gpu.GiB, Cards: cards}, inventory); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	count := func() string { q := b.node().Status.Capacity[protocol.ResourceCount]; return q.String() }
	await(t, "gpu-count", func() bool { return count() == "2" })

	// A kubelet that registers its node anew zeroes what isn't its own.
	node := b.node()
	node.Status.Capacity[protocol.ResourceCount], node.Status.Allocatable = *newQuantity(0), nil
	if _, err := b.client.CoreV1().Nodes().UpdateStatus(context.Background(), node, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	await(t, "gpu-count again", func() bool { return count() == "2" })

	// And the object itself can be made anew.
	if err := b.client.CoreV1().Nodes().Delete(context.Background(), testNode, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.client.CoreV1().Nodes().Create(context.Background(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: testNode}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	await(t, "the inventory and gpu-count on the new node", func() bool {
		return b.node().Annotations[protocol.AnnotationInventory] != "" && count() == "2"
	})
}

func TestNodeLabelsAndWholeCards(t *testing.T) {
	b := newBench(t)
	node := b.node()
	node.Labels = map[string]string{protocol.LabelDisableIsolation: "true"}
	node.Status.Capacity = corev1.ResourceList{protocol.ResourceWholeCard: *newQuantity(2)}
	if err := b.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), node, ""); err != nil {
		t.Fatal(err)
	}
	k := startKubelet(t, b.dir)
	p, _ := b.start(newCards(16))
	k.awaitDevices(16, 16)
	b.awaitEvent("GPUCardSharedTwice")
	pod := newPod("a", main(4), assumed(0, 1))
	b.create(p, pod)
	if env := k.mustAdmit(pod)["main"]; env["CGPU_DISABLE"] != "true" {
		t.Errorf("no CGPU_DISABLE in %v", env)
	}
}

func TestContainersAreMatchedSingly(t *testing.T) {
	b := newBench(t)
	k := startKubelet(t, b.dir)
	p, _ := b.start(newCards(16, 16))
	k.awaitDevices(32, 32)
	many := newPod("many", initStep(2), sidecar("s", 3), container("none", 0), container("x", 2), container("y", 2), assumed(1, 5))
	other := newPod("other", main(2), assumed(0, 1), created(1))
	b.create(p, many, other)

	for name, env := range k.mustAdmit(other) {
		if env["ALIYUN_COM_GPU_MEM_IDX"] != "0" {
			t.Errorf("container %s of other got card %s", name, env["ALIYUN_COM_GPU_MEM_IDX"])
		}
	}
	if got := k.mustAdmit(many, "i", "s", "x"); len(got) != 3 {
		t.Fatalf("got %v", got)
	}
	b.awaitAssigned("other", 0)
	if b.pod("many").Annotations["ALIYUN_COM_GPU_MEM_ASSIGNED"] != "false" {
		t.Error("assigned though a container is still to come")
	}
	env := k.mustAdmit(many, "y")["y"]
	if env["ALIYUN_COM_GPU_MEM_IDX"] != "1" || env["ALIYUN_COM_GPU_MEM_POD"] != "7" || env["ALIYUN_COM_GPU_MEM_CONTAINER"] != "2" {
		t.Errorf("got %v", env)
	}
	b.awaitAssigned("many", 1)
}

func TestPodNobodyAssumed(t *testing.T) {
	b := newBench(t)
	k := startKubelet(t, b.dir)
	p, _ := b.start(newCards(16, 16))
	k.awaitDevices(32, 32)
	b.create(p, newPod("promised", main(10), assumed(0, 1)))
	direct := newPod("direct", main(8))
	b.create(p, direct)
	if env := k.mustAdmit(direct)["main"]; env["ALIYUN_COM_GPU_MEM_IDX"] != "1" {
		t.Errorf("got %v, want the card that has room beside the promise", env)
	}
	got := b.awaitAssigned("direct", 1)
	if got.Request != 8 || got.CardMemory != 16 || got.AssumeTime.IsZero() {
		t.Errorf("annotations say %+v", got)
	}
}

// A forged annotation gets its pod nowhere, and harms nobody.
func TestForgedAnnotations(t *testing.T) {
	b := newBench(t)
	k := startKubelet(t, b.dir)
	p, _ := b.start(newCards(16, 4))
	k.awaitDevices(20, 20)
	forged := newPod("forged", main(12), assumed(0, 0), annotation("ALIYUN_COM_GPU_MEM_POD", "1"), annotation("ALIYUN_COM_GPU_MEM_ASSIGNED", "true"))
	honest := newPod("honest", main(10), assumed(0, 5))
	b.create(p, forged, honest)
	if env := k.mustAdmit(honest)["main"]; env["ALIYUN_COM_GPU_MEM_IDX"] != "0" {
		t.Errorf("honest got %v", env)
	}
	// The kubelet's own sum would refuse it with these sizes; here it is the plugin that has to.
	k.forget(honest)
	_, err := k.admit(forged)
	if status.Code(err) != codes.ResourceExhausted {
		t.Errorf("forged: %v, want ResourceExhausted", err)
	}
	b.awaitEvent("GPUCardRefused container main: pod default/forged: no card for 12 of GPU memory")
	if got := counted(t, p, refusedFull); got != 1 {
		t.Errorf("counted %v refusals", got)
	}
}

func TestMovedPodIsTold(t *testing.T) {
	b := newBench(t)
	k := startKubelet(t, b.dir)
	p, _ := b.start(newCards(16, 16))
	k.awaitDevices(32, 32)
	direct := newPod("direct", main(10))
	b.create(p, direct)
	k.mustAdmit(direct)
	b.awaitAssigned("direct", 0)
	promised := newPod("promised", main(8), assumed(0, 1))
	b.create(p, promised)
	if env := k.mustAdmit(promised)["main"]; env["NVIDIA_VISIBLE_DEVICES"] != "GPU-1" {
		t.Errorf("got %v, want card 1", env)
	}
	if got := b.awaitAssigned("promised", 1); !got.AssumeTime.Equal(start.Add(time.Second)) {
		t.Errorf("the time of assumption became %v", got.AssumeTime)
	}
	b.awaitEvent("GPUCardMoved container main got card 1: card 0, which was chosen for the pod, has no room left for it")
	b.awaitEvent("GPUCardRepaired")
}

func TestKubeletTellsWhichPod(t *testing.T) {
	b := newBench(t)
	b.socket = filepath.Join(b.dir, "pods.sock")
	k := startKubelet(t, b.dir)
	k.podResources(b.socket)
	p, _ := b.start(newCards(16, 16))
	k.awaitDevices(32, 32)
	var pods []*corev1.Pod
	for i := range 30 {
		// Assumed in one order, created in another.
		pods = append(pods, newPod(fmt.Sprintf("p%02d", i), initStep(1), main(1), assumed(i%2, 100-i), created(i)))
	}
	b.create(p, pods...)
	for i, pod := range pods {
		for name, env := range k.mustAdmit(pod) {
			if want := fmt.Sprint(i % 2); env["ALIYUN_COM_GPU_MEM_IDX"] != want {
				t.Errorf("%s/%s got card %s, want %s", pod.Name, name, env["ALIYUN_COM_GPU_MEM_IDX"], want)
			}
		}
	}
	if k.rejected != 0 {
		t.Errorf("the kubelet's rate limit was passed %d times", k.rejected)
	}
}

// Without the kubelet's word the order decides; where it misleads, annotations are mended to what containers got.
func TestOrderMisleads(t *testing.T) {
	b := newBench(t)
	k := startKubelet(t, b.dir)
	p, _ := b.start(newCards(16, 16))
	k.awaitDevices(32, 32)
	early, late := newPod("early", main(10), assumed(0, 1)), newPod("late", main(10), assumed(1, 2))
	b.create(p, early, late)
	if env := k.mustAdmit(late)["main"]; env["ALIYUN_COM_GPU_MEM_IDX"] != "0" {
		t.Fatalf("late got %v: the test expects to be misled", env)
	}
	b.awaitAssigned("late", 0)
	if env := k.mustAdmit(early)["main"]; env["ALIYUN_COM_GPU_MEM_IDX"] != "1" {
		t.Errorf("early got %v, which holds 10 of 16 already", env)
	}
	b.awaitAssigned("early", 1)
	await(t, "two repairs", func() bool { return testutil.ToFloat64(p.metrics.repairs) >= 2 })
}

func TestPluginRestartBetweenContainers(t *testing.T) {
	b := newBench(t)
	k := startKubelet(t, b.dir)
	p, stop := b.start(newCards(16, 16))
	k.awaitDevices(32, 32)
	pod := newPod("a", container("x", 2), container("y", 2), assumed(1, 5))
	other := newPod("b", main(2), assumed(0, 9))
	b.create(p, pod, other)
	k.mustAdmit(pod, "x")
	stop()
	b.start(newCards(16, 16))
	k.awaitRegistrations(2)
	k.awaitDevices(32, 32)
	if env := k.mustAdmit(pod, "y")["y"]; env["ALIYUN_COM_GPU_MEM_IDX"] != "1" {
		t.Errorf("y got %v", env)
	}
	b.awaitAssigned("a", 1)
}

func TestRepairAtStart(t *testing.T) {
	unassigned := newPod("unassigned", main(1), assumed(1, 1))
	wrong := newPod("wrong", main(1), assumed(0, 1), assigned)
	b := newBench(t, unassigned, wrong)
	writeCheckpoint(t, b.dir, newEntry(t, "uid-unassigned", "main", 1, "10"), newEntry(t, "uid-wrong", "main", 1, "11"),
		newEntry(t, "uid-gone", "main", 1, "12"))
	p, _ := b.start(newCards(16, 16))
	b.awaitAssigned("unassigned", 1)
	b.awaitAssigned("wrong", 1)
	b.awaitEvent("the annotations named card 0, the containers got card 1")
	if diff := cmp.Diff(map[string]int{"uid-unassigned/main": 1, "uid-wrong/main": 1}, cardsOf(p.allocator.record)); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

func TestKubeletRestarts(t *testing.T) {
	b := newBench(t)
	k := startKubelet(t, b.dir)
	p, _ := b.start(newCards(16))
	k.awaitDevices(16, 16)
	a := newPod("a", main(4), assumed(0, 1))
	b.create(p, a)
	k.mustAdmit(a)
	for range 3 {
		k.stop()
		k = startKubelet(t, b.dir, k.entries...)
		k.awaitDevices(16, 16)
	}
	next := newPod("next", main(4), assumed(0, 2))
	b.create(p, next)
	k.mustAdmit(next)
	b.awaitAssigned("next", 0)

	// One that comes up without its checkpoint asks again for what it has to start.
	k.stop()
	if err := os.Remove(filepath.Join(b.dir, checkpointFile)); err != nil {
		t.Fatal(err)
	}
	k = startKubelet(t, b.dir)
	k.awaitDevices(16, 16)
	if env := k.mustAdmit(a)["main"]; env["ALIYUN_COM_GPU_MEM_IDX"] != "0" {
		t.Errorf("got %v", env)
	}
	if missing := p.missing(); len(missing) > 0 {
		t.Errorf("not ready: %v", missing)
	}
}

// A kubelet that has lost its books finds no devices with containers that run on or have ended, and says so of each for
// as long as its pod lives. That alone must never make one of them the container that it asks for.
func TestKubeletWithoutBooks(t *testing.T) {
	for name, test := range map[string]struct {
		running *corev1.Pod
		comes   *corev1.Pod
		later   time.Duration
	}{
		"a pod that the plugin hasn't heard of, and an init container that has ended": {
			newPod("running", initStep(2), main(16), assumed(0, 1), ran(true)), newPod("new", main(2), assumed(1, 2)), 0,
		},
		"a pod that the plugin hasn't heard of, and a container that is to be started again": {
			newPod("running", main(2), container("rest", 14), assumed(0, 1), ran(false)), newPod("new", main(2), assumed(1, 2)), 0,
		},
		"a static pod, long after the kubelet started, and an init container that has ended": {
			newPod("running", initStep(2), main(16), assumed(0, 1), ran(true)), newPod("new", main(2), mirrors("static")), time.Hour,
		},
		"a static pod, long after the kubelet started, and a container that runs": {
			newPod("running", main(16), assumed(0, 1), ran(true)), newPod("new", main(16), mirrors("static")), time.Hour,
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, test.running)
			b.blind, b.socket = true, filepath.Join(b.dir, "pods.sock")
			var entries []entry
			for i, c := range slices.Concat(test.running.Spec.InitContainers, test.running.Spec.Containers) {
				entries = append(entries, newEntry(t, string(test.running.UID), c.Name, 0, deviceID(0, gpu.Memory(i))))
			}
			writeCheckpoint(t, b.dir, entries...)
			k := startKubelet(t, b.dir, entries...)
			p, _ := b.start(newCards(16, 16))
			k.awaitDevices(32, 32)

			k.stop()
			if err := os.Remove(filepath.Join(b.dir, checkpointFile)); err != nil {
				t.Fatal(err)
			}
			k = startKubelet(t, b.dir)
			k.admitted["default/running"] = test.running
			k.podResources(b.socket)
			k.awaitDevices(32, 32)
			await(t, "PodResources", func() bool {
				p.resources.connection.Connect()
				return p.resources.connection.GetState() == connectivity.Ready
			})
			if kubeletUID(test.comes) == gpu.PodUID(test.comes.UID) {
				b.create(p, test.comes) // A static pod's object comes later.
			}
			clock := time.Now().Add(test.later)
			release, err := p.allocator.take(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			p.allocator.reading.Lock()
			p.allocator.now = func() time.Time { return clock }
			p.allocator.reading.Unlock()
			release()
			if got := cardOf(k.mustAdmit(test.comes)["main"]); got != "1" {
				t.Errorf("got card %s, which is full: taken for a container of a pod that runs there", got)
			}
		})
	}
}

// A kubelet that starts without its books admits the pods that run on one by one, and asks anew for their init containers,
// which have ended.
func TestInitContainersAreAskedForAgain(t *testing.T) {
	var pods []*corev1.Pod
	var before []entry
	for i, name := range []string{"one", "two", "three"} {
		pod := newPod(name, initStep(2), main(2), assumed(i, i), assigned, ran(true))
		pods = append(pods, pod)
		ids := []string{deviceID(i, 0), deviceID(i, 1)}
		before = append(before, newEntry(t, string(pod.UID), "i", i, ids...), newEntry(t, string(pod.UID), "main", i, ids...))
	}
	b := newBench(t, pods[0], pods[1], pods[2])
	b.socket = filepath.Join(b.dir, "pods.sock")
	writeCheckpoint(t, b.dir, before...)
	k := startKubelet(t, b.dir, before...)
	p, _ := b.start(newCards(16, 16, 16))
	k.awaitDevices(48, 48)

	k.stop()
	if err := os.Remove(filepath.Join(b.dir, checkpointFile)); err != nil {
		t.Fatal(err)
	}
	k = startKubelet(t, b.dir)
	k.podResources(b.socket)
	k.awaitDevices(48, 48)
	for i, pod := range pods {
		if got := cardOf(k.mustAdmit(pod, "i")["i"]); got != strconv.Itoa(i) {
			t.Errorf("the init container of pod %s got card %s, want %d as before", pod.Name, got, i)
		}
	}
	p.allocator.Sync(t.Context())
	given, _ := p.allocator.record.Snapshot()
	for i, pod := range pods {
		if got := b.pod(pod.Name).Annotations["ALIYUN_COM_GPU_MEM_IDX"]; got != strconv.Itoa(i) {
			t.Errorf("pod %s is annotated with card %s now", pod.Name, got)
		}
		if used := (&snapshot{Pods: views(pod), Served: served{gpu.PodUID(pod.UID): given[gpu.PodUID(pod.UID)]}}).used("", false); used[i] != 2 || len(used) != 1 {
			t.Errorf("pod %s holds %v, want 2 of card %d", pod.Name, used, i)
		}
	}
}

// A kubelet that was killed before it had written down what an init container got asks for that one again, and not for the
// container after it, be it of the same size.
func TestKubeletKilledWithinAPod(t *testing.T) {
	b := newBench(t)
	b.socket = filepath.Join(b.dir, "pods.sock")
	k := startKubelet(t, b.dir)
	k.podResources(b.socket)
	p, _ := b.start(newCards(16, 16))
	k.awaitDevices(32, 32)
	pod := newPod("a", initStep(1), main(1), assumed(1, 1))
	b.create(p, pod)
	k.mustAdmit(pod, "i")

	k.stop()
	if err := os.Remove(filepath.Join(b.dir, checkpointFile)); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(b.socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	k = startKubelet(t, b.dir)
	k.podResources(b.socket)
	k.awaitDevices(32, 32)
	for _, name := range []string{"i", "main"} {
		if got := cardOf(k.mustAdmit(pod, name)[name]); got != "1" {
			t.Errorf("container %s got card %s, want 1", name, got)
		}
	}
	if none := testutil.ToFloat64(p.metrics.matches.WithLabelValues(string(byNobody))); none != 0 {
		t.Errorf("%v calls were taken for those of a pod that nobody knows", none)
	}
}

// A kubelet without books asks anew for a container that it starts again, and its word of the end comes after that.
func TestEndIsToldLate(t *testing.T) {
	one, two := newPod("one", main(4), assumed(0, 1), assigned, ran(true)), newPod("two", main(4), assumed(1, 2), assigned, ran(true))
	b := newBench(t, one, two)
	b.socket = filepath.Join(b.dir, "pods.sock")
	before := []entry{
		newEntry(t, "uid-one", "main", 0, "00", "01", "02", "03"), newEntry(t, "uid-two", "main", 1, "10", "11", "12", "13"),
	}
	writeCheckpoint(t, b.dir, before...)
	var asked atomic.Bool
	b.client.PrependReactor("list", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		if !asked.Load() {
			return false, nil, nil
		}
		// The plugin has come to ask the API server itself, to which both containers run. The word comes after the answer.
		go func() {
			time.Sleep(50 * time.Millisecond)
			ended := two.DeepCopy()
			ended.Status.ContainerStatuses[0].State.Running = nil
			if _, err := b.client.CoreV1().Pods("default").UpdateStatus(context.Background(), ended, metav1.UpdateOptions{}); err != nil {
				t.Error(err)
			}
		}()
		return false, nil, nil
	})
	k := startKubelet(t, b.dir, before...)
	p, _ := b.start(newCards(16, 16))
	k.awaitDevices(32, 32)

	k.stop()
	if err := os.Remove(filepath.Join(b.dir, checkpointFile)); err != nil {
		t.Fatal(err)
	}
	k = startKubelet(t, b.dir)
	k.admitted["default/one"], k.admitted["default/two"] = one, two
	k.podResources(b.socket)
	k.awaitDevices(32, 32)
	asked.Store(true)
	if got := cardOf(k.mustAdmit(two)["main"]); got != "1" {
		t.Errorf("the container got card %s, its pod has card 1", got)
	}
	b.awaitAssigned("two", 1)
	given, _ := p.allocator.record.Snapshot()
	if used := (&snapshot{Served: given}).used("", false); used[0] != 4 || used[1] != 4 {
		t.Errorf("cards 0 and 1 have %v taken, want 4 each", used)
	}
}

func TestDirectoryMadeAnew(t *testing.T) {
	b := newBench(t)
	k := startKubelet(t, b.dir)
	b.start(newCards(16))
	k.awaitDevices(16, 16)
	k.stop()
	if err := os.RemoveAll(b.dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(b.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	k = startKubelet(t, b.dir)
	k.awaitDevices(16, 16)
}

func TestAPIServerAway(t *testing.T) {
	b := newBench(t)
	k := startKubelet(t, b.dir)
	p, _ := b.start(newCards(16))
	k.awaitDevices(16, 16)
	pod := newPod("a", main(4), assumed(0, 1))
	b.create(p, pod)
	b.away.Store(true)
	k.mustAdmit(pod)
	await(t, "a failed write", func() bool { return testutil.ToFloat64(p.metrics.annotationErrors) > 0 })
	if b.pod("a").Annotations["ALIYUN_COM_GPU_MEM_ASSIGNED"] != "false" {
		t.Error("written by an API server that is away")
	}
	b.away.Store(false)
	b.awaitAssigned("a", 0)
}

func TestLiveList(t *testing.T) {
	b := newBench(t)
	b.blind = true
	var down atomic.Bool
	var selectors sync.Map
	b.client.PrependReactor("list", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
		selectors.Store(action.(clienttesting.ListAction).GetListRestrictions().Fields.String(), true)
		if down.Load() {
			return true, nil, errors.New("the API server is away")
		}
		return false, nil, nil
	})
	k := startKubelet(t, b.dir)
	p, _ := b.start(newCards(16))
	k.awaitDevices(16, 16)

	seen := newPod("seen", main(4), assumed(0, 1))
	b.create(p, seen)
	if env := k.mustAdmit(seen)["main"]; env["ALIYUN_COM_GPU_MEM_POD"] != "4" {
		t.Errorf("got %v", env)
	}
	down.Store(true)
	unseen := newPod("unseen", main(4), assumed(0, 1))
	b.create(p, unseen)
	if _, err := k.admit(unseen); status.Code(err) != codes.Unavailable {
		t.Errorf("got %v, want Unavailable: nothing may be concluded", err)
	}
	selectors.Range(func(selector, _ any) bool {
		if selector != "spec.nodeName="+testNode {
			t.Errorf("listed pods of %q", selector)
		}
		return true
	})
}

func TestStaticPod(t *testing.T) {
	b := newBench(t)
	k := startKubelet(t, b.dir)
	p, _ := b.start(newCards(16, 16))
	k.awaitDevices(32, 32)
	mirror := newPod("static", main(10), mirrors("static-uid"))
	if env := k.mustAdmit(mirror)["main"]; env["ALIYUN_COM_GPU_MEM_IDX"] != "0" {
		t.Errorf("got %v", env)
	}
	// It has no object, and holds its memory all the same.
	other := newPod("other", main(10))
	b.create(p, other)
	if env := k.mustAdmit(other)["main"]; env["ALIYUN_COM_GPU_MEM_IDX"] != "1" {
		t.Errorf("other got %v", env)
	}
	b.create(p, mirror)
	b.awaitAssigned("static", 0)
}

func TestCardFailsAndRecovers(t *testing.T) {
	b := newBench(t)
	k := startKubelet(t, b.dir)
	p, _ := b.start(newCards(16, 16))
	k.awaitDevices(32, 32)
	a := newPod("a", main(4), assumed(1, 1))
	b.create(p, a)
	cards := newCards(16, 16)
	cards[1].Unhealthy = "Xid 79"
	p.SetCards(cards, nil, "")
	k.awaitDevices(16, 32)
	b.awaitEvent("GPUCardUnhealthy card 1 (GPU-1): Xid 79")
	await(t, "the inventory to say so", func() bool {
		inventory, err := protocol.ParseInventory(b.node().Annotations)
		return err == nil && !inventory.Cards[1].Healthy()
	})
	if _, err := k.admit(a); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("got %v, want FailedPrecondition", err)
	}
	p.SetCards(nil, nil, "the driver is being updated")
	k.awaitDevices(0, 32)
	b.awaitEvent("GPUCardUnhealthy card 0 (GPU-0), 1 (GPU-1): the driver is being updated")
	p.SetCards(newCards(16, 16), nil, "")
	k.awaitDevices(32, 32)
	b.awaitEvent("GPUCardHealthy card 0 (GPU-0), 1 (GPU-1) can be used again")
	if n := testutil.ToFloat64(p.metrics.registrations); n != 1 {
		t.Errorf("registered %v times, once is enough", n)
	}
}

func TestNothingToOffer(t *testing.T) {
	b := newBench(t)
	k := startKubelet(t, b.dir)
	p, _ := b.start(nil)
	for _, test := range []struct {
		cards   []gpu.Card
		problem string
		want    string
	}{
		{nil, "the NVIDIA library can't be loaded", "the NVIDIA library can't be loaded"},
		{nil, "", "the node has no GPU card"},
		{newCards(1150168), "", "the smallest unit that fits is 6GiB (--memory-unit)"},
	} {
		p.SetCards(test.cards, nil, test.problem)
		if missing := strings.Join(p.missing(), "\n"); !strings.Contains(missing, test.want) {
			t.Errorf("readyz says %q, want %q", missing, test.want)
		}
		b.awaitEvent("GPUCardNotOffered")
	}
	p.SetCards(newCards(16), nil, "")
	k.awaitDevices(16, 16)
	k.awaitRegistrations(1)
}

func TestConcurrentAllocations(t *testing.T) {
	b := newBench(t)
	b.socket = filepath.Join(b.dir, "pods.sock")
	k := startKubelet(t, b.dir)
	p, _ := b.start(newCards(16, 16, 16, 16))
	k.awaitDevices(64, 64)
	const pods = 16
	for i := range pods {
		b.create(p, newPod(fmt.Sprintf("p%d", i), main(4), assumed(i%4, i)))
	}
	var group sync.WaitGroup
	used := make([]atomic.Int32, 4)
	for i := range pods {
		group.Go(func() {
			ids := make([]string, 4)
			for unit := range ids {
				ids[unit] = deviceID(i%4, gpu.Memory(i/4*4+unit))
			}
			response, err := p.allocator.Allocate(context.Background(), ids)
			if err != nil {
				t.Error(err)
				return
			}
			assignment, err := protocol.ParseAssignment(response.Envs)
			if err != nil {
				t.Error(err)
				return
			}
			used[assignment.Card].Add(4)
		})
	}
	group.Wait()
	for card := range used {
		if n := used[card].Load(); n != 16 {
			t.Errorf("card %d has %d taken, want 16", card, n)
		}
	}
	if got := len(cardsOf(p.allocator.record)); got != pods {
		t.Errorf("%d pods are in the record, want %d", got, pods)
	}
}

// A kubelet that has lost its books asks anew, from several workers at once, for containers that it starts again. Which of
// them a call is for nothing can tell then; but each is given a card once, and the checkpoint sets right whose it is.
func TestConcurrentRestarts(t *testing.T) {
	const pods, cards = 16, 4
	var objects []runtime.Object
	var before []entry
	for i := range pods {
		pod := newPod(fmt.Sprintf("p%d", i), main(4), assumed(i%cards, i), assigned, ran(false))
		objects = append(objects, pod)
		var ids []string
		for unit := range 4 {
			ids = append(ids, deviceID(i%cards, gpu.Memory(i/cards*4+unit)))
		}
		before = append(before, newEntry(t, string(pod.UID), "main", i%cards, ids...))
	}
	b := newBench(t, objects...)
	b.socket = filepath.Join(b.dir, "pods.sock")
	writeCheckpoint(t, b.dir, before...)
	k := startKubelet(t, b.dir, before...)
	p, _ := b.start(newCards(16, 16, 16, 16))
	k.awaitDevices(64, 64)

	k.stop()
	if err := os.Remove(filepath.Join(b.dir, checkpointFile)); err != nil {
		t.Fatal(err)
	}
	k = startKubelet(t, b.dir)
	for _, object := range objects {
		k.admitted["default/"+object.(*corev1.Pod).Name] = object.(*corev1.Pod)
	}
	k.podResources(b.socket)
	k.awaitDevices(64, 64)
	var group sync.WaitGroup
	after := make([]entry, pods)
	got := make([]int, pods)
	for i := range pods {
		group.Go(func() {
			// The kubelet takes the node for empty, and so other devices than before.
			ids := before[(i+5)%pods].DeviceIDs[-1]
			response, err := p.allocator.Allocate(context.Background(), ids)
			if err != nil {
				t.Error(err)
				return
			}
			assignment, err := protocol.ParseAssignment(response.Envs)
			if err != nil {
				t.Error(err)
				return
			}
			got[i] = assignment.Card
			after[i] = newEntry(t, before[i].PodUID, "main", assignment.Card, ids...)
		})
	}
	group.Wait()
	if t.Failed() {
		return
	}
	used := map[int]int{}
	for _, card := range got {
		used[card] += 4
	}
	for card := range cards {
		if used[card] != 16 {
			t.Errorf("card %d has %d taken, want 16", card, used[card])
		}
	}
	writeCheckpoint(t, b.dir, after...)
	for i := range pods {
		b.awaitAssigned(fmt.Sprintf("p%d", i), got[i])
	}
}

func TestAllocateNothing(t *testing.T) {
	b := newBench(t)
	p, _ := b.start(newCards(16))
	if _, err := p.allocator.Allocate(context.Background(), nil); status.Code(err) != codes.InvalidArgument {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	p.allocator.turn <- struct{}{} // Somebody is at it.
	if _, err := p.allocator.Allocate(ctx, []string{"00"}); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled call gave %v", err)
	}
	<-p.allocator.turn
}

func TestHTTP(t *testing.T) {
	b := newBench(t)
	k := startKubelet(t, b.dir)
	p, _ := b.start(nil)
	server := httptest.NewServer(p.handler())
	defer server.Close()
	get := func(path string) int {
		t.Helper()
		response, err := http.Get(server.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		return response.StatusCode
	}
	for path, want := range map[string]int{"/livez": 200, "/readyz": 503, "/metrics": 200, "/version": 200, "/": 404} {
		if got := get(path); got != want {
			t.Errorf("%s gave %d, want %d", path, got, want)
		}
	}
	p.SetCards(newCards(16), nil, "")
	k.awaitDevices(16, 16)
	await(t, "ready", func() bool { return get("/readyz") == 200 })
}

func TestBadAddress(t *testing.T) {
	b := newBench(t)
	p, err := New(Options{Client: fakeClient(b.client), Events: b.events, NodeName: testNode, Unit: gpu.GiB, Directory: b.dir, ListenAddress: "127.0.0.1:nowhere"})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Run(context.Background()); err == nil {
		t.Error("an address that can't be had went unnoticed")
	}
	if _, err := New(Options{}); err == nil {
		t.Error("a plugin of nothing went unnoticed")
	}
}

func TestMetrics(t *testing.T) {
	m := newMetrics(func() bool { return true })
	m.setCards(newCards(16))
	problems, err := testutil.GatherAndLint(m.registry)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}
