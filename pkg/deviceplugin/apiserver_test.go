package deviceplugin

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"
)

func TestAPIServerAway(t *testing.T) {
	b := newFixture(t)
	k, p := b.up(16)
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
	b := newFixture(t)
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
	k, p := b.up(16)

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

// TestPodHeardOfLateFromAPIServerThatIsGone: the plugin learns of a pod only at GetPreferredAllocation, and the API server then
// becomes unreachable. An event that was on its way still counts.
func TestPodHeardOfLateFromAPIServerThatIsGone(t *testing.T) {
	b := newFixture(t)
	b.blind = true
	late := newPod("late", container("x", 2), container("y", 2), assumed(1, 1))
	var gone atomic.Bool
	tell := sync.OnceFunc(func() { b.watcher.Add(late) })
	b.client.PrependReactor("list", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		if !gone.Load() {
			return false, nil, nil
		}
		go tell()
		return true, nil, errors.New("the API server is away")
	})
	k, p := b.up(60, 4)
	gone.Store(true)
	for name, env := range k.mustAdmit(late) {
		if cardOf(env) != "1" {
			t.Errorf("container %s got %v", name, env)
		}
	}
	k.checkDevices(p, late, 1)
}

// TestPodThatOnlyTheSecondListHas: a list that fails at once, as over a broken connection, is repeated, because the watch broke
// with it.
func TestPodThatOnlyTheSecondListHas(t *testing.T) {
	b := newFixture(t)
	b.blind = true
	var broken atomic.Bool
	b.client.PrependReactor("list", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		if broken.CompareAndSwap(true, false) {
			return true, nil, errors.New("connection reset by peer")
		}
		return false, nil, nil
	})
	k, _ := b.up(60, 4)
	late := newPod("late", main(4), assumed(1, 1))
	if err := b.client.Tracker().Add(late); err != nil {
		t.Fatal(err)
	}
	broken.Store(true)
	if got := cardOf(k.mustAdmit(late)["main"]); got != "1" {
		t.Errorf("got card %s", got)
	}
	if broken.Load() {
		t.Error("no list failed")
	}
}

// TestPodHeardOfWhileTheAPIServerIsLeftAlone: while the plugin sends the API server no list, the watch can still deliver the
// pod.
func TestPodHeardOfWhileTheAPIServerIsLeftAlone(t *testing.T) {
	b := newFixture(t)
	b.blind = true
	k, p := b.up(60, 4)
	p.pods.silentUntil.Store(time.Now().Add(time.Minute).UnixNano())
	late := newPod("late", main(4), assumed(1, 1))
	lists := len(b.client.Actions())
	told := time.AfterFunc(5*searchPause, func() { b.watcher.Add(late) })
	defer told.Stop()
	if got := cardOf(k.mustAdmit(late)["main"]); got != "1" {
		t.Errorf("got card %s", got)
	}
	for _, action := range b.client.Actions()[lists:] {
		if action.GetVerb() == "list" {
			t.Errorf("the API server was asked: %v", action)
		}
	}
}

// TestPodHeardOfBeforeTheOneThatIsMeant: a pod that the watch delivers during the list isn't matched by order. The list may
// have the right pod.
func TestPodHeardOfBeforeTheOneThatIsMeant(t *testing.T) {
	b := newFixture(t)
	b.blind, b.hanging = true, &hanging{}
	k, p := b.up(16, 16)
	meant, other := newPod("meant", main(4), assumed(1, 1)), newPod("other", main(4), assumed(0, 2))
	for _, pod := range []*corev1.Pod{meant, other} {
		if err := b.client.Tracker().Add(pod); err != nil {
			t.Fatal(err)
		}
	}
	lists := b.hanging.lists.Load()
	b.hanging.Hang()
	go func() {
		for b.hanging.lists.Load() == lists && t.Context().Err() == nil {
			time.Sleep(time.Millisecond)
		}
		b.watcher.Add(other)
		for len(p.pods.Cached()) == 0 && t.Context().Err() == nil {
			time.Sleep(time.Millisecond)
		}
		time.Sleep(5 * searchPause)
		b.hanging.Resume()
	}()
	if got := cardOf(k.mustAdmit(meant)["main"]); got != "1" {
		t.Errorf("got card %s", got)
	}
}

// TestPodHeardOfBeforeTheListIsThere: a busy API server can take longer for the list of all pods than for the event of the one
// pod that is searched for.
func TestPodHeardOfBeforeTheListIsThere(t *testing.T) {
	b := newFixture(t)
	b.servePodResources()
	b.blind, b.hanging = true, &hanging{}
	k, p := b.up(60, 4)
	late := newPod("late", main(4), assumed(1, 1))
	lists := b.hanging.lists.Load()
	b.hanging.Hang()
	go func() {
		for b.hanging.lists.Load() == lists {
			if t.Context().Err() != nil {
				return
			}
			time.Sleep(time.Millisecond)
		}
		b.watcher.Add(late)
	}()
	if got := cardOf(k.mustAdmit(late)["main"]); got != "1" {
		t.Errorf("got card %s", got)
	}
	k.checkDevices(p, late, 1)
	if p.pods.isSilent() {
		t.Error("the list was waited for to its end")
	}
	b.hanging.Resume()
}

// hanging is an API server that accepts requests and doesn't answer them from Hang until Resume.
type hanging struct {
	resumed     atomic.Pointer[chan struct{}]
	lists, held atomic.Int32
}

func (h *hanging) Hang() {
	resumed := make(chan struct{})
	h.resumed.Store(&resumed)
}

func (h *hanging) Resume() { close(*h.resumed.Swap(nil)) }

// pass returns when the request is answered or canceled.
func (h *hanging) pass(ctx context.Context) error {
	resumed := h.resumed.Load()
	if resumed == nil {
		return nil
	}
	h.held.Add(1)
	defer h.held.Add(-1)
	select {
	case <-*resumed:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// around returns a client with requests about pods and nodes that hang with h.
func (h *hanging) around(client Client) Client {
	pods := client.Pods
	client.Pods = func(namespace string) Objects[*corev1.Pod, *corev1.PodList] {
		return held[*corev1.Pod, *corev1.PodList]{pods(namespace), h}
	}
	client.Nodes = held[*corev1.Node, *corev1.NodeList]{client.Nodes, h}
	return client
}

type held[T, L runtime.Object] struct {
	Objects[T, L]
	by *hanging
}

func (o held[T, L]) List(ctx context.Context, options metav1.ListOptions) (list L, err error) {
	o.by.lists.Add(1)
	if err := o.by.pass(ctx); err != nil {
		return list, err
	}
	return o.Objects.List(ctx, options)
}

func (o held[T, L]) Patch(ctx context.Context, name string, kind types.PatchType, data []byte, options metav1.PatchOptions, subresources ...string) (object T, err error) {
	if err := o.by.pass(ctx); err != nil {
		return object, err
	}
	return o.Objects.Patch(ctx, name, kind, data, options, subresources...)
}

// TestAPIServerHangs: an API server that doesn't answer delays no container of a known pod, delays another pod no longer than
// one list may take, and doesn't keep the plugin from stopping.
func TestAPIServerHangs(t *testing.T) {
	b := newFixture(t)
	b.hanging = &hanging{}
	k := startKubelet(t, b.dir)
	p, stop := b.start(newCards(16))
	k.awaitDevices(16, 16)
	pods := []*corev1.Pod{
		newPod("a", container("x", 2), container("y", 2), assumed(0, 1)), newPod("b", main(3), assumed(0, 2)), newPod("unassigned", main(1)),
	}
	b.create(p, pods...)
	lists := b.hanging.lists.Load()

	b.hanging.Hang()
	for _, pod := range pods {
		for name, env := range k.mustAdmit(pod) {
			if cardOf(env) != "0" {
				t.Errorf("%s/%s got %v", pod.Name, name, env)
			}
		}
	}
	if n := b.hanging.lists.Load() - lists; n != 0 {
		t.Errorf("the API server was asked for its pods %d times, for pods that are known", n)
	}
	await(t, "a write that hangs", func() bool { return b.hanging.held.Load() > 0 })

	// An unknown pod: after an unanswered request the plugin sends the API server no list for a moment. Otherwise each of the
	// kubelet's four calls would send one.
	for range 2 {
		if _, err := k.admit(newPod("unheard-of", main(4))); status.Code(err) != codes.Unavailable {
			t.Errorf("got %v, want Unavailable", err)
		}
	}
	if n := b.hanging.lists.Load() - lists; n == 0 || n > 3 {
		t.Errorf("the API server was asked for its pods %d times, want once", n)
	}
	for _, pod := range pods {
		if b.pod(pod.Name).Annotations["ALIYUN_COM_GPU_MEM_ASSIGNED"] == "true" {
			t.Errorf("%s was annotated by an API server that hangs", pod.Name)
		}
	}

	stop() // With a write in progress.
	b.hanging.Resume()
	b.start(newCards(16))
	for _, pod := range pods {
		b.awaitAssigned(pod.Name, 0)
	}
}

// TestAPIServerComesBack: a write that was in progress when the API server stopped answering is completed after its return.
func TestAPIServerComesBack(t *testing.T) {
	b := newFixture(t)
	b.hanging = &hanging{}
	k, p := b.up(16)
	pod := newPod("a", main(2), assumed(0, 1))
	b.create(p, pod)
	b.hanging.Hang()
	k.mustAdmit(pod)
	await(t, "a write that hangs", func() bool { return b.hanging.held.Load() > 0 })
	b.hanging.Resume()
	b.awaitAssigned("a", 0)
}
