package deviceplugin

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

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

// TestSearch: the plugin's watch delivers nothing by itself (blind), so the plugin has to search for each pod.
func TestSearch(t *testing.T) {
	for name, test := range map[string]struct {
		// list answers each list of pods once the pod is bound. If it returns false, the API server has the answer.
		list func(b *fixture, pod *corev1.Pod, lists int) (failed bool)
		// before is called before the pod is admitted.
		before func(b *fixture, p *Plugin, pod *corev1.Pod)
		want   string // Empty if the allocation is rejected.
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
		"no list is made because the API server didn't answer a moment ago": {
			before: func(b *fixture, p *Plugin, pod *corev1.Pod) {
				p.pods.silentUntil = time.Now().Add(time.Minute)
				time.AfterFunc(5*searchPause, func() { b.watcher.Add(pod) })
			},
			list: func(b *fixture, _ *corev1.Pod, _ int) bool {
				b.t.Error("the API server was asked")
				return true
			},
			want: "1",
		},
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
			if test.before != nil {
				test.before(b, p, pod)
			}
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

// TestSearchWatchFirst: the watch delivers a pod while the list hangs.
func TestSearchWatchFirst(t *testing.T) {
	for name, test := range map[string]struct {
		ask   bool // The kubelet answers questions.
		other bool // The watch delivers another pod.
	}{
		"a busy API server takes longer for the list than for the event of the pod": {ask: true},
		// A match by order waits for the list, because the right pod may be in it.
		"the watch delivers another pod before": {other: true},
	} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t)
			if test.ask {
				b.servePodResources()
			}
			b.blind, b.hanging = true, &hanging{}
			k, p := b.up(16, 16)
			pod, delivered := newPod("pod", main(4), assumed(1, 1)), newPod("pod", main(4), assumed(1, 1))
			b.create(p, pod)
			if test.other {
				delivered = newPod("other", main(4), assumed(0, 2))
				b.create(p, delivered)
			}
			lists := b.hanging.lists.Load()
			b.hanging.Hang()
			go func() {
				for b.hanging.lists.Load() == lists && t.Context().Err() == nil {
					time.Sleep(time.Millisecond)
				}
				b.watcher.Add(delivered)
				for test.other && t.Context().Err() == nil {
					time.Sleep(5 * searchPause)
					if len(p.pods.Cached()) > 0 {
						b.hanging.Resume()
						return
					}
				}
			}()
			if got := cardOf(k.mustAdmit(pod)["main"]); got != "1" {
				t.Errorf("got card %s", got)
			}
			if p.pods.isSilent() {
				t.Error("the list was awaited until its timeout")
			}
			if !test.other {
				b.hanging.Resume()
			}
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
		if n := b.hanging.lists.Load() - lists; n != 0 && pod.Name != "unassigned" {
			t.Errorf("the API server was asked for its pods %d times, for pods that are known", n)
		}
	}
	await.True(t, "a write that hangs", func() bool { return b.hanging.held.Load() > 0 })

	// An unknown pod: after an unanswered request the plugin sends the API server no list for a moment. Otherwise each of the
	// kubelet's four calls would send one.
	for range 2 {
		if _, err := k.admit(newPod("unknown", main(4))); status.Code(err) != codes.Unavailable {
			t.Errorf("got %v, want Unavailable", err)
		}
	}
	if n := b.hanging.lists.Load() - lists; n == 0 || n > 3 {
		t.Errorf("the API server was asked for its pods %d times, want once", n)
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
