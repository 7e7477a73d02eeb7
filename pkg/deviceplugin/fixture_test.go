package deviceplugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/features"
	"k8s.io/client-go/kubernetes/fake"
	metadatafake "k8s.io/client-go/metadata/fake"
	clienttesting "k8s.io/client-go/testing"
	events "k8s.io/client-go/tools/record"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/pkg/nodeconfig"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

// fixture is a test node: a fake API server, the kubelet's directory, and the plugins that a test starts there.
type fixture struct {
	t      *testing.T
	client *fake.Clientset
	// slices is the client for ResourceSlices; nil for none.
	slices *metadatafake.FakeMetadataClient
	dir    string
	events *events.FakeRecorder
	// passed are the Events that awaitEvent has read and no call has awaited yet.
	passed []string
	// blind is true if informers get no events after their first list except from watcher.
	blind   bool
	watcher *watch.FakeWatcher
	// away makes every write fail.
	away atomic.Bool
	// hanging delays the plugins' requests, if it is set.
	hanging *hanging
	// watches counts the watches of pods that were opened.
	watches atomic.Int32
	// entries are the entries of the kubelet's checkpoint at its start.
	entries []entry
	// socket is the socket of PodResources; empty if the kubelet has no such service.
	socket  string
	address string
	// errorEnv, deviceList and config are options of the plugins.
	errorEnv   bool
	deviceList DeviceListStrategy
	simulated  bool
	config     nodeconfig.Source
	// isolation has the plugins' options for limits; nil for none.
	isolation *isolationOptions
	// callGap is the plugins' field of the same name. It is much shorter than in production unless a test is about it.
	callGap time.Duration
	// readmission is how long the plugins keep the devices of pods healthy; not at all if it is zero.
	readmission time.Duration
	// absence is the registrar's field of the same name; as in production if it is zero.
	absence time.Duration
}

// TestMain switches a feature of client-go off: a fake clientset can't send a list as a watch.
func TestMain(m *testing.M) {
	_ = os.Setenv("KUBE_FEATURE_"+string(features.WatchListClient), "false") // client-go reads it at its first use.
	os.Exit(m.Run())
}

// fakeClient returns the plugin's client for a fake clientset.
func fakeClient(api *fake.Clientset) Client {
	return Client{
		Pods:  func(namespace string) Objects[*corev1.Pod, *corev1.PodList] { return api.CoreV1().Pods(namespace) },
		Nodes: api.CoreV1().Nodes(), Slices: fakeSlices().Resource(sliceResource),
	}
}

// fakeSlices returns a client for the metadata of objects.
func fakeSlices(objects ...runtime.Object) *metadatafake.FakeMetadataClient {
	scheme := metadatafake.NewTestScheme()
	_ = metav1.AddMetaToScheme(scheme)
	return metadatafake.NewSimpleMetadataClient(scheme, objects...)
}

// newFixture makes a fixture for a test that runs beside others, because many tests wait.
func newFixture(t *testing.T, objects ...runtime.Object) *fixture {
	t.Helper()
	t.Parallel()
	return newFixtureAlone(t, objects...)
}

// newFixtureAlone makes a fixture for a test that runs alone.
func newFixtureAlone(t *testing.T, objects ...runtime.Object) *fixture {
	t.Helper()
	// The path of a socket must be short.
	dir, err := os.MkdirTemp("", "gpushare")
	check.Must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: testNode}}
	b := &fixture{t: t, dir: dir, events: events.NewFakeRecorder(1000), watcher: watch.NewFake(), callGap: 10 * time.Millisecond}
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
func (b *fixture) start(cards []gpu.Card) (plugin *Plugin, stop func()) {
	b.t.Helper()
	client := fakeClient(b.client)
	if b.slices != nil {
		client.Slices = b.slices.Resource(sliceResource)
	}
	if b.hanging != nil {
		client = b.hanging.around(client)
	}
	options := Options{
		Client: client, Events: b.events, NodeName: testNode, BootID: "this boot", VisibleDevices: VisibleByUUID, Simulated: b.simulated,
		DeviceList: b.deviceList, ErrorEnv: b.errorEnv, Config: b.config,
		Directory: b.dir, PodResourcesSocket: b.socket, ListenAddress: b.address,
	}
	if o := b.isolation; o != nil {
		options.Config.Flags = func(s *nodeconfig.Settings) { s.Isolation = o.mode }
		options.Isolation = isolation.Options{CgroupRoot: o.cgroups, SpecDirs: []string{o.specs}, MPS: o.mps}
	}
	p, err := New(options)
	check.Must(b.t, err)
	p.registrar.cleanup, p.registrar.absence = time.Millisecond, cmp.Or(b.absence, p.registrar.absence)
	p.service.interval, p.service.readmission.time, p.service.callGap = time.Millisecond, b.readmission, b.callGap
	p.allocator.askTimeout = time.Minute // The machine can be busy.
	if cards != nil {
		p.SetCards(gpu.GiB, cards, nil, nil, "")
	}
	watches := b.watches.Load()
	stop = await.Run(b.t, p.Run)
	if !b.blind {
		// The fake clientset drops events between list and watch.
		await.True(b.t, "the informer's watch", func() bool { return p.pods.informer.HasSynced() && b.watches.Load() > watches })
	}
	return p, stop
}

// askable makes the kubelet serve PodResources, which shows the pods that it has admitted.
func (b *fixture) servePodResources() { b.socket = filepath.Join(b.dir, "pods.sock") }

// up starts a kubelet and a plugin with healthy cards, and waits until the kubelet has their devices.
func (b *fixture) up(sizes ...gpu.Memory) (*kubelet, *Plugin) {
	b.t.Helper()
	if b.entries != nil {
		writeCheckpoint(b.t, b.dir, b.entries...)
	}
	k := startKubelet(b.t, b.dir, b.entries...)
	if b.socket != "" {
		k.podResources(b.socket)
	}
	p, _ := b.start(newCards(sizes...))
	var all gpu.Memory
	for _, size := range sizes {
		all += size
	}
	k.awaitDevices(int(all), int(all))
	return k, p
}

// trust admits a pod, named "known", with one unit on card 0: the kubelet's answers count once it has known a pod.
func (b *fixture) trust(k *kubelet, p *Plugin) {
	b.t.Helper()
	known := newPod("known", main(1), assumed(0, 0))
	b.create(p, known)
	k.mustAdmit(known)
}

// create creates pods and waits until the informer knows them.
func (b *fixture) create(p *Plugin, pods ...*corev1.Pod) {
	b.t.Helper()
	for _, pod := range pods {
		if _, err := b.client.CoreV1().Pods(pod.Namespace).Create(context.Background(), pod, metav1.CreateOptions{}); err != nil {
			b.t.Fatal(err)
		}
		if !b.blind {
			await.True(b.t, "the informer to know "+pod.Name, func() bool { return p.pods.Exists(gpu.PodUID(pod.UID)) })
		}
	}
}

// delete deletes a pod and waits until the informer has dropped it.
func (b *fixture) delete(p *Plugin, pod *corev1.Pod) {
	b.t.Helper()
	check.Must(b.t, b.client.CoreV1().Pods(pod.Namespace).Delete(context.Background(), pod.Name, metav1.DeleteOptions{}))
	await.True(b.t, "the informer to drop "+pod.Name, func() bool { return !p.pods.Exists(gpu.PodUID(pod.UID)) })
}

func (b *fixture) pod(name string) *corev1.Pod {
	b.t.Helper()
	pod, err := b.client.CoreV1().Pods("default").Get(context.Background(), name, metav1.GetOptions{})
	check.Must(b.t, err)
	return pod
}

func (b *fixture) node() *corev1.Node {
	b.t.Helper()
	node, err := b.client.CoreV1().Nodes().Get(context.Background(), testNode, metav1.GetOptions{})
	check.Must(b.t, err)
	return node
}

// awaitHealthy waits until the node's inventory has this number of healthy cards.
func (b *fixture) awaitHealthy(n int) {
	b.t.Helper()
	await.True(b.t, fmt.Sprintf("an inventory with %d healthy cards", n), func() bool {
		cards := protocol.ParseNode(b.node()).Cards
		return n == len(slices.DeleteFunc(cards, func(c gpu.Card) bool { return !c.Healthy() }))
	})
}

// awaitAssigned waits until the pod's annotations name this card as assigned.
func (b *fixture) awaitAssigned(name string, card int) protocol.Assignment {
	b.t.Helper()
	var got protocol.Assignment
	await.True(b.t, fmt.Sprintf("pod %s to be assigned card %d", name, card), func() bool {
		var err error
		got, err = protocol.ParseAssignment(b.pod(name).Annotations)
		return err == nil && got.Assigned && len(got.Cards) == 1 && got.Cards[0].Index == card
	})
	return got
}

// awaitEvent waits for an Event that contains these words, in upper or lower case. Goroutines send Events in no defined order, so
// one that was sent before an Event that was awaited earlier counts too. Each Event counts once.
func (b *fixture) awaitEvent(words string) {
	b.t.Helper()
	has := func(event string) bool { return strings.Contains(strings.ToLower(event), strings.ToLower(words)) }
	if i := slices.IndexFunc(b.passed, has); i >= 0 {
		b.passed = slices.Delete(b.passed, i, i+1)
		return
	}
	deadline := time.After(30 * time.Second)
	for {
		select {
		case event := <-b.events.Events:
			if has(event) {
				return
			}
			b.passed = append(b.passed, event)
		case <-deadline:
			b.t.Fatalf("no Event contains %q", words)
		}
	}
}

func counted(t *testing.T, p *Plugin, o allocation.Result) float64 {
	t.Helper()
	return testutil.ToFloat64(p.metrics.allocations.WithLabelValues(string(o)))
}

func cardOf(env map[string]string) string { return env["ALIYUN_COM_GPU_MEM_IDX"] }

// cardsOf returns the cards of each container.
func cardsOf(r *allocation.Record) map[string][]int {
	out := map[string][]int{}
	for uid, containers := range r.Snapshot() {
		for name, a := range containers {
			out[string(uid)+"/"+name] = a.Cards.Cards()
		}
	}
	return out
}
