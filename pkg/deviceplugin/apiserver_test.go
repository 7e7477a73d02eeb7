package deviceplugin

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"

	"github.com/gpushare/gpushare/test/await"
)

// TestAPIServerAway: a write that fails or hangs while the API server is away is completed after its return.
func TestAPIServerAway(t *testing.T) {
	b := newFixture(t)
	b.hanging = &hanging{}
	k, p := b.up(16)
	one, two := newPod("one", main(4), assumed(0, 1)), newPod("two", main(2), assumed(0, 2))
	b.create(p, one, two)
	b.away.Store(true)
	k.mustAdmit(one)
	await.True(t, "a failed write", func() bool { return testutil.ToFloat64(p.metrics.annotationErrors) > 0 })
	if b.pod("one").Annotations["ALIYUN_COM_GPU_MEM_ASSIGNED"] != "false" {
		t.Error("the annotations were written")
	}
	b.away.Store(false)
	b.awaitAssigned("one", 0)
	b.hanging.Hang()
	k.mustAdmit(two)
	await.True(t, "a write that hangs", func() bool { return b.hanging.held.Load() > 0 })
	b.hanging.Resume()
	b.awaitAssigned("two", 0)
}

// TestAnnotationsRefused: a pod whose annotations the plugin has no right to write gets one Event, and the annotations once it has the right.
func TestAnnotationsRefused(t *testing.T) {
	b := newFixture(t)
	var allowed atomic.Bool
	b.client.PrependReactor("patch", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		if allowed.Load() {
			return false, nil, nil
		}
		return true, nil, apierrors.NewForbidden(corev1.Resource("pods"), "one", errors.New("only gpushare writes them"))
	})
	k, p := b.up(16)
	one := newPod("one", main(4), assumed(0, 1))
	b.create(p, one)
	k.mustAdmit(one)
	b.awaitEvent(`GPUCardNotRecorded The API server refuses the annotations by which the device plugin reports what the pod's containers got ` +
		`(its ServiceAccount needs the right, and the guard and other policies must allow it): ` +
		`annotating pod default/one: pods "one" is forbidden: only gpushare writes them`)
	failed := testutil.ToFloat64(p.metrics.annotationErrors)
	await.True(t, "another failure", func() bool { return testutil.ToFloat64(p.metrics.annotationErrors) > failed })
	allowed.Store(true)
	b.awaitAssigned("one", 0)
	for len(b.events.Events) > 0 {
		if event := <-b.events.Events; strings.Contains(event, "GPUCardNotRecorded") {
			t.Errorf("a second Event: %s", event)
		}
	}
}

// TestRead: the plugin's watch delivers nothing by itself (blind), so the plugin has to read the pods for each allocation.
func TestRead(t *testing.T) {
	for name, test := range map[string]struct {
		// list answers each list of pods once the pod is bound. If it returns false, the API server has the answer.
		list func(b *fixture, pod *corev1.Pod, lists int) (failed bool)
		want string // Empty if the allocation is rejected.
	}{
		"the list has the pod": {want: "1"},
		"every list fails":     {list: func(*fixture, *corev1.Pod, int) bool { return true }},
		"the watch delivers the pod after the API server has become unreachable": {
			list: func(b *fixture, pod *corev1.Pod, lists int) bool {
				if lists == 1 {
					go b.watcher.Add(pod)
				}
				return true
			},
			want: "1",
		},
		// The watch broke with the connection too, so the list is repeated.
		"only the first list fails": {list: func(_ *fixture, _ *corev1.Pod, lists int) bool { return lists == 1 }, want: "1"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t)
			b.blind = true
			pod := newPod("pod", container("x", 2), container("y", 2), assumed(1, 1))
			var bound atomic.Bool
			var lists atomic.Int32
			b.client.PrependReactor("list", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
				if got := action.(clienttesting.ListAction).GetListRestrictions().Fields.String(); got != "spec.nodeName="+testNode {
					t.Errorf("listed pods of %q", got)
				}
				failed := bound.Load() && test.list != nil && test.list(b, pod, int(lists.Add(1)))
				return failed, nil, errors.New("the API server is away")
			})
			k, p := b.up(60, 4)
			b.create(p, pod)
			bound.Store(true)
			env, err := k.admit(pod)
			if test.want == "" {
				if status.Code(err) != codes.Unavailable {
					t.Errorf("got %v and %v, want Unavailable", env, err)
				}
				return
			}
			if err != nil || cardOf(env["x"]) != test.want || cardOf(env["y"]) != test.want {
				t.Errorf("got %v and %v, want card %s", env, err, test.want)
			}
			k.checkDevices(p, pod, 1)
		})
	}
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

// TestAPIServerHangs: an API server that doesn't answer delays no container of a known pod with a card, delays another pod no longer than
// one list may take, and doesn't keep the plugin from stopping.
func TestAPIServerHangs(t *testing.T) {
	b := newFixture(t)
	b.hanging = &hanging{}
	k := startKubelet(t, b.dir)
	p, stop := b.start(newCards(16))
	k.awaitDevices(16, 16)
	pods := []*corev1.Pod{
		newPod("a", initStep(2), container("x", 2), container("y", 2), assumed(0, 1)), newPod("b", main(3), assumed(0, 2)), newPod("unassigned", main(1)),
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
		if n := b.hanging.lists.Load() - lists; n != 0 && pod.Name != "unassigned" {
			t.Errorf("the API server was asked for its pods %d times, for pods that are known", n)
		}
	}
	await.True(t, "a write that hangs", func() bool { return b.hanging.held.Load() > 0 })

	if _, err := k.admit(newPod("unknown", main(4))); status.Code(err) != codes.Unavailable {
		t.Errorf("got %v, want Unavailable", err)
	}
	for _, pod := range pods {
		if b.pod(pod.Name).Annotations["ALIYUN_COM_GPU_MEM_ASSIGNED"] == "true" {
			t.Errorf("pod %s was annotated", pod.Name)
		}
	}

	stop() // With a write in progress.
	b.hanging.Resume()
	b.start(newCards(16))
	for _, pod := range pods {
		b.awaitAssigned(pod.Name, 0)
	}
}
