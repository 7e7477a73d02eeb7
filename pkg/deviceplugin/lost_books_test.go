package deviceplugin

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// TestKubeletWithoutBooks: a kubelet that has lost its checkpoint shows no devices for containers that still run or have ended,
// as long as their pods exist. This alone must not make one of them the container for which the kubelet calls Allocate.
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
			k, p, b := lostBooks(t, test.later, test.running)
			if _, static := test.comes.Annotations[corev1.MirrorPodAnnotationKey]; static {
				if env, err := k.admit(test.comes); status.Code(err) != codes.FailedPrecondition {
					t.Errorf("a static pod got %v and %v", env, err)
				}
				return
			}
			b.create(p, test.comes)
			if got := cardOf(k.mustAdmit(test.comes)["main"]); got != "1" {
				t.Errorf("got card %s, which is full: taken for a container of a pod that runs there", got)
			}
		})
	}
}

// lostBooks starts a kubelet that has lost its checkpoint while these pods still run, each on the annotated one of two cards of
// 16 units. The allocator's clock is later ahead. The plugin's informer gets no further events.
func lostBooks(t *testing.T, later time.Duration, running ...*corev1.Pod) (*kubelet, *Plugin, *bench) {
	t.Helper()
	b := newBench(t)
	b.blind = true
	b.askable()
	for i, pod := range running {
		if _, err := b.client.CoreV1().Pods(pod.Namespace).Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		assignment, err := protocol.ParseAssignment(pod.Annotations)
		if err != nil {
			t.Fatal(err)
		}
		for n, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
			b.books = append(b.books, newEntry(t, string(pod.UID), c.Name, assignment.Card, deviceID(assignment.Card, gpu.Memory(8*i+n))))
		}
	}
	k, p := b.up(16, 16)

	k = k.withoutBooks(b, running...)
	await(t, "PodResources", func() bool {
		p.resources.connection.Connect()
		return p.resources.connection.GetState() == connectivity.Ready
	})
	clock := time.Now().Add(later)
	release, err := p.allocator.take(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	p.allocator.reading.Lock()
	defer p.allocator.reading.Unlock()
	p.allocator.now = func() time.Time { return clock }
	return k, p, b
}

// TestResizeWithoutBooks: a pod that is resized in place is admitted again, and a kubelet that has lost its checkpoint asks for
// the devices of its containers, which are running. The containers keep their card.
func TestResizeWithoutBooks(t *testing.T) {
	resized := func(pod *corev1.Pod) { pod.Generation, pod.Status.ObservedGeneration = 2, 1 }
	deferred := func(pod *corev1.Pod) {
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodResizePending, Status: corev1.ConditionTrue}}
	}
	pod := func(name string, card int, options ...podOption) *corev1.Pod {
		return newPod(name, append([]podOption{main(10), assumed(card, 1), assigned, ran(true)}, options...)...)
	}
	for name, test := range map[string]struct {
		resized *corev1.Pod
		beside  *corev1.Pod
		want    string // empty: the resize is deferred
	}{
		"one whose spec has changed":                                         {pod("one", 1, resized), pod("two", 0), "1"},
		"one whose resize has been deferred":                                 {pod("one", 1, deferred), newPod("two", main(9), assumed(0, 1), assigned, ran(true)), "1"},
		"not one whose end isn't reported yet, for another that is deferred": {pod("one", 1), pod("two", 0, deferred), ""},
		"one that can't be told from another":                                {pod("one", 1, resized), pod("two", 0, resized), ""},
		"one beside a container that has ended and waits for its start":      {pod("one", 1, resized), newPod("two", main(10), assumed(0, 1), assigned, ran(false)), ""},
		"one that the API server says nothing of":                            {pod("one", 1), pod("two", 0), ""},
	} {
		t.Run(name, func(t *testing.T) {
			k, p, b := lostBooks(t, time.Hour, test.resized, test.beside)
			env, err := k.admit(test.resized)
			if got := cardOf(env["main"]); got != test.want || (err == nil) != (got != "") {
				t.Errorf("got card %q and %v, want %q", got, err, test.want)
			}
			p.allocator.Sync(t.Context())
			for uid, containers := range p.allocator.record.Snapshot() {
				if want := map[gpu.PodUID]int{"uid-one": 1, "uid-two": 0}[uid]; containers["main"].Card != want {
					t.Errorf("pod %s is recorded on card %d, runs on %d", uid, containers["main"].Card, want)
				}
			}
			next := newPod("next", main(10), assumed(1, 2))
			b.create(p, next)
			if env, err := k.admit(next); status.Code(err) != codes.ResourceExhausted {
				t.Errorf("another pod got %v and %v beside 10 of 16 on each card", env, err)
			}
		})
	}
}

// TestResizeAfterPluginStart: a plugin that has just started doesn't know yet whether the kubelet answers queries. It queries
// the kubelet about the running pods, so that a pod which the kubelet hasn't reached isn't served in place of the resized one.
func TestResizeAfterPluginStart(t *testing.T) {
	one := newPod("one", main(10), assumed(1, 1), assigned, ran(true), func(pod *corev1.Pod) { pod.Generation, pod.Status.ObservedGeneration = 2, 1 })
	k, p, b := lostBooks(t, time.Hour, one)
	b.create(p, newPod("next", main(10), assumed(0, 2)))
	if got := cardOf(k.mustAdmit(one)["main"]); got != "1" {
		t.Errorf("got card %s, runs on card 1", got)
	}
}

// TestInitContainersAreAskedForAgain: a kubelet that starts without its checkpoint admits the running pods one by one. It asks
// again for their init containers, which have ended.
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
	b.askable()
	b.books = before
	k, p := b.up(16, 16, 16)

	k = k.withoutBooks(b)
	for i, pod := range pods {
		if got := cardOf(k.mustAdmit(pod, "i")["i"]); got != strconv.Itoa(i) {
			t.Errorf("the init container of pod %s got card %s, want %d as before", pod.Name, got, i)
		}
	}
	p.allocator.Sync(t.Context())
	given := p.allocator.record.Snapshot()
	for i, pod := range pods {
		if got := b.pod(pod.Name).Annotations["ALIYUN_COM_GPU_MEM_IDX"]; got != strconv.Itoa(i) {
			t.Errorf("pod %s is annotated with card %s now", pod.Name, got)
		}
		if used := (&snapshot{Pods: views(pod), Served: served{gpu.PodUID(pod.UID): given[gpu.PodUID(pod.UID)]}}).used("", false); used[i] != 2 || len(used) != 1 {
			t.Errorf("pod %s holds %v, want 2 of card %d", pod.Name, used, i)
		}
	}
}

// TestEndIsReportedLate: a kubelet that has lost its checkpoint asks again for a container that it restarts, before it reports
// the container's end. The plugin rejects the call, and the kubelet tries again, as for any container that can't be started.
func TestEndIsReportedLate(t *testing.T) {
	one, two := newPod("one", main(4), assumed(0, 1), assigned, ran(true)), newPod("two", main(4), assumed(1, 2), assigned, ran(true))
	k, p, b := lostBooks(t, time.Hour, one, two)
	if env, err := k.admit(two); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("got %v and %v for one of two containers that run", env, err)
	}
	ended := two.DeepCopy()
	ended.Status.ContainerStatuses[0].State.Running = nil
	if _, err := b.client.CoreV1().Pods("default").UpdateStatus(t.Context(), ended, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := cardOf(k.mustAdmit(two)["main"]); got != "1" {
		t.Errorf("the container got card %s, its pod has card 1", got)
	}
	p.allocator.Sync(t.Context())
	if used := p.allocator.known().used("", false); used[0] != 4 || used[1] != 4 {
		t.Errorf("cards 0 and 1 have %v taken, want 4 each", used)
	}
}

// TestConcurrentRestarts: a kubelet that has lost its checkpoint asks again, from several workers at once, for containers that
// it restarts. Nothing shows for which container a call is. But each container gets a card once, and the checkpoint then
// corrects the record.
func TestConcurrentRestarts(t *testing.T) {
	const pods, cards = 16, 4
	var objects []runtime.Object
	var admitted []*corev1.Pod
	var before []entry
	for i := range pods {
		pod := newPod(fmt.Sprintf("p%d", i), main(4), assumed(i%cards, i), assigned, ran(false))
		objects, admitted = append(objects, pod), append(admitted, pod)
		var ids []string
		for unit := range 4 {
			ids = append(ids, deviceID(i%cards, gpu.Memory(i/cards*4+unit)))
		}
		before = append(before, newEntry(t, string(pod.UID), "main", i%cards, ids...))
	}
	b := newBench(t, objects...)
	b.askable()
	b.books = before
	k, p := b.up(16, 16, 16, 16)

	k.withoutBooks(b, admitted...)
	var group sync.WaitGroup
	after := make([]entry, pods)
	got := make([]int, pods)
	for i := range pods {
		group.Go(func() {
			// For the kubelet the node is empty, so it allocates other devices than before.
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
