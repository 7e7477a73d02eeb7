package deviceplugin

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/connectivity"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

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
			b.blind = true
			b.askable()
			var entries []entry
			for i, c := range slices.Concat(test.running.Spec.InitContainers, test.running.Spec.Containers) {
				entries = append(entries, newEntry(t, string(test.running.UID), c.Name, 0, deviceID(0, gpu.Memory(i))))
			}
			b.books = entries
			k, p := b.up(16, 16)

			k = k.withoutBooks(b, test.running)
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

// A kubelet without books asks anew for a container that it starts again, and its word of the end comes after that.
func TestEndIsToldLate(t *testing.T) {
	one, two := newPod("one", main(4), assumed(0, 1), assigned, ran(true)), newPod("two", main(4), assumed(1, 2), assigned, ran(true))
	b := newBench(t, one, two)
	b.statusPatience = statusPatience
	b.askable()
	before := []entry{
		newEntry(t, "uid-one", "main", 0, "00", "01", "02", "03"), newEntry(t, "uid-two", "main", 1, "10", "11", "12", "13"),
	}
	b.books = before
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
	k, p := b.up(16, 16)

	k = k.withoutBooks(b, one, two)
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

// A kubelet that has lost its books asks anew, from several workers at once, for containers that it starts again. Which of
// them a call is for nothing can tell then; but each is given a card once, and the checkpoint sets right whose it is.
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
