package deviceplugin

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/connectivity"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

// TestLostCheckpoint: a kubelet that has lost its checkpoint shows no devices for containers that still run or have ended, as
// long as their pods exist. A call for one of them gets the card that the container has, and a call for another pod does not.
func TestLostCheckpoint(t *testing.T) {
	one := func(options ...podOption) *corev1.Pod {
		return newPod("one", append([]podOption{assumed(1, 1), assigned}, options...)...)
	}
	for name, test := range map[string]struct {
		one       *corev1.Pod // It has card 1, another pod has card 0.
		next      *corev1.Pod // The default is one.
		container string
		started   time.Duration // The time since the kubelet's start.
		failed    bool          // Card 1 has failed too.
		want      string        // Empty if the allocation is rejected.
	}{
		"a pod that the watch has not delivered": {
			one: one(main(2), container("rest", 8), ran(false)), next: newPod("next", main(2), assumed(0, 2)), want: "0",
		},
		"an init container that has ended, while the kubelet starts": {one: one(initStep(2), main(10), ran(true)), container: "i", want: "1"},
		"its card has failed too":                                    {one: one(initStep(2), main(10), ran(true)), container: "i", failed: true},
		"one of two containers that run, as if its pod is resized":   {one: one(main(10), ran(true)), started: time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			k, p, b := lostCheckpoint(t, test.started, test.one, newPod("two", main(10), assumed(0, 1), assigned, ran(true)))
			if test.failed {
				cards := newCards(16, 16)
				cards[1].Unhealthy = "Xid 79"
				p.SetCards(gpu.GiB, cards, nil, nil, "")
			}
			pod, name := test.one, test.container
			if name == "" {
				name = "main"
			}
			if test.next != nil {
				pod = test.next
				b.create(p, pod)
			}
			env, err := k.admit(pod, name)
			if got := cardOf(env[name]); got != test.want || (err == nil) != (got != "") {
				t.Errorf("got card %q and %v, want %q", got, err, test.want)
			}
			p.checkpoint.Sync(t.Context())
			for uid, containers := range p.allocator.snapshots.record.Snapshot() {
				if want, ok := map[gpu.PodUID]int{"uid-one": 1, "uid-two": 0}[uid]; ok && !slices.Equal(containers["main"].Cards.Cards(), []int{want}) {
					t.Errorf("pod %s is recorded on %v, runs on %d", uid, containers["main"].Cards, want)
				}
			}
		})
	}
}

// lostCheckpoint starts a kubelet that has lost its checkpoint while these pods still run, each on the annotated one of two cards
// of 16 units. The kubelet started some time ago. The plugin's informer gets no further events.
func lostCheckpoint(t *testing.T, started time.Duration, running ...*corev1.Pod) (*kubelet, *Plugin, *fixture) {
	t.Helper()
	b := newFixture(t)
	b.blind = true
	b.servePodResources()
	for i, pod := range running {
		if _, err := b.client.CoreV1().Pods(pod.Namespace).Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		assignment, err := protocol.ParseAssignment(pod.Annotations)
		check.Must(t, err)
		for n, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
			b.entries = append(b.entries, newEntry(t, string(pod.UID), c.Name, assignment.Cards[0].Index, deviceID(assignment.Cards[0].Index, gpu.Memory(8*i+n))))
		}
	}
	k, p := b.up(16, 16)

	k = k.loseCheckpoint(b, running...)
	await.True(t, "PodResources", func() bool {
		p.resources.connection.Connect()
		return p.resources.connection.GetState() == connectivity.Ready
	})
	p.allocator.mu.Lock()
	defer p.allocator.mu.Unlock()
	p.allocator.snapshots.registered = time.Now().Add(-started)
	return k, p, b
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
	b := newFixture(t, objects...)
	b.servePodResources()
	b.entries = before
	k, p := b.up(16, 16, 16, 16)

	k.loseCheckpoint(b, admitted...)
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
			got[i] = assignment.Cards[0].Index
			after[i] = newEntry(t, before[i].PodUID, "main", assignment.Cards[0].Index, ids...)
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
