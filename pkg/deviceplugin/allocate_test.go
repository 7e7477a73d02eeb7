package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

func TestAllocateEarliestAssumedFirst(t *testing.T) {
	b := newBench(t)
	k, p := b.up(16, 16)

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

func TestContainersAreMatchedSingly(t *testing.T) {
	b := newBench(t)
	k, p := b.up(16, 16)
	many := newPod("many", initStep(2), sidecar("s", 3), container("none", 0), container("x", 2), container("y", 2), assumed(1, 5))
	other := newPod("other", main(2), assumed(0, 1), created(1))
	b.create(p, many, other)

	for name, env := range k.mustAdmit(other) {
		if cardOf(env) != "0" {
			t.Errorf("container %s of other got card %s", name, cardOf(env))
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
	if cardOf(env) != "1" || env["ALIYUN_COM_GPU_MEM_POD"] != "7" || env["ALIYUN_COM_GPU_MEM_CONTAINER"] != "2" {
		t.Errorf("got %v", env)
	}
	b.awaitAssigned("many", 1)
}

func TestPodNobodyAssumed(t *testing.T) {
	b := newBench(t)
	k, p := b.up(16, 16)
	b.create(p, newPod("promised", main(10), assumed(0, 1)))
	direct := newPod("direct", main(8))
	b.create(p, direct)
	if got := cardOf(k.mustAdmit(direct)["main"]); got != "1" {
		t.Errorf("got card %s, want the card that has room beside the promise", got)
	}
	got := b.awaitAssigned("direct", 1)
	if got.Request != 8 || got.CardMemory != 16 || got.AssumeTime.IsZero() {
		t.Errorf("annotations say %+v", got)
	}
}

// TestForgedAnnotations checks that a forged annotation gets its pod no card and takes no room from another pod.
func TestForgedAnnotations(t *testing.T) {
	b := newBench(t)
	k, p := b.up(16, 4)
	forged := newPod("forged", main(12), assumed(0, 0), annotation("ALIYUN_COM_GPU_MEM_POD", "1"), annotation("ALIYUN_COM_GPU_MEM_ASSIGNED", "true"))
	honest := newPod("honest", main(10), assumed(0, 5))
	b.create(p, forged, honest)
	if got := cardOf(k.mustAdmit(honest)["main"]); got != "0" {
		t.Errorf("honest got card %s", got)
	}
	// With these sizes the kubelet would reject the pod by its own count. It forgets the other pod here, so that the plugin has
	// to reject.
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
	k, p := b.up(16, 16)
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
	b.askable()
	k, p := b.up(16, 16)
	var pods []*corev1.Pod
	for i := range 30 {
		// The order of assumption is the reverse of the order of creation.
		pods = append(pods, newPod(fmt.Sprintf("p%02d", i), initStep(1), main(1), assumed(i%2, 100-i), created(i)))
	}
	b.create(p, pods...)
	for i, pod := range pods {
		for name, env := range k.mustAdmit(pod) {
			if want := fmt.Sprint(i % 2); cardOf(env) != want {
				t.Errorf("%s/%s got card %s, want %s", pod.Name, name, cardOf(env), want)
			}
		}
	}
	if k.rejected != 0 {
		t.Errorf("the kubelet's rate limit was passed %d times", k.rejected)
	}
}

// TestOrderMisleads: if the kubelet doesn't answer queries, the match is by order. Where it is wrong, the annotations are
// repaired to what the containers got.
func TestOrderMisleads(t *testing.T) {
	b := newBench(t)
	k, p := b.up(16, 16)
	early, late := newPod("early", main(10), assumed(0, 1)), newPod("late", main(10), assumed(1, 2))
	b.create(p, early, late)
	if got := cardOf(k.mustAdmit(late)["main"]); got != "0" {
		t.Fatalf("late got card %s: the test expects to be misled", got)
	}
	b.awaitAssigned("late", 0)
	if got := cardOf(k.mustAdmit(early)["main"]); got != "1" {
		t.Errorf("early got card %s, which holds 10 of 16 already", got)
	}
	b.awaitAssigned("early", 1)
	await(t, "two repairs", func() bool { return testutil.ToFloat64(p.metrics.repairs) >= 2 })
}

func TestConcurrentAllocations(t *testing.T) {
	b := newBench(t)
	b.askable() // The kubelet gives no answer.
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

func TestAllocateNothing(t *testing.T) {
	b := newBench(t)
	p, _ := b.start(newCards(16))
	if _, err := p.allocator.Allocate(context.Background(), nil); status.Code(err) != codes.InvalidArgument {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	p.allocator.turn <- struct{}{} // Another call holds turn.
	if _, err := p.allocator.Allocate(ctx, []string{"00"}); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled call gave %v", err)
	}
	<-p.allocator.turn
}

// TestEachPodIsAskedAboutOnce checks that one call queries the kubelet about each pod only once.
func TestEachPodIsAskedAboutOnce(t *testing.T) {
	b := newBench(t)
	b.askable()
	k, p := b.up(16, 16)
	b.create(p, newPod("a", main(2), assumed(0, 1)), newPod("b", main(2), assumed(0, 2)), newPod("c", main(2), assumed(0, 3)))
	b.trust(k, p)
	k.mu.Lock()
	k.answered = 0
	k.mu.Unlock()
	if _, err := k.admit(newPod("static", main(2), mirrors("static-1"))); err == nil {
		t.Error("a static pod was served")
	}
	// Three queries each for GetPreferredAllocation and Allocate. The list of pods in between has no new pod.
	if k.answered != 6 {
		t.Errorf("the kubelet was asked %d times about three pods, want 6", k.answered)
	}
}

// TestStaticPod checks that a static pod is rejected: it has no object in the API when the kubelet calls Allocate, so nothing
// is known about it.
func TestStaticPod(t *testing.T) {
	b := newBench(t)
	k, p := b.up(16)
	static := newPod("static", main(10), mirrors("file"))
	_, err := k.admit(static)
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "no pod that the API server has on this node waits for 10 of GPU memory, and static pods are not supported") {
		t.Errorf("got %v", err)
	}
	if got := counted(t, p, refusedUnknownPod); got != 1 {
		t.Errorf("%v refusals were counted", got)
	}
	b.awaitEvent("static pods are not supported")
	// The kubelet can still create the mirror pod, as failed. It takes no room and is never matched for another pod.
	b.create(p, static)
	next := newPod("next", main(10))
	b.create(p, next)
	if got := cardOf(k.mustAdmit(next)["main"]); got != "0" {
		t.Errorf("the next pod got card %s", got)
	}
	b.awaitAssigned("next", 0)
}

// TestRejectedPodsAreShown: kubelets 1.34 and 1.35 show a pod that they have rejected like the one that they admit, until the
// API server knows that it has failed.
func TestRejectedPodsAreShown(t *testing.T) {
	for name, test := range map[string]struct {
		sick   bool // the card of the rejected pod is unhealthy
		byUs   bool
		unseen bool // the informer doesn't know the next pod
	}{
		"rejected by the kubelet":                      {},
		"rejected by the kubelet, its card is sick":    {sick: true},
		"refused here":                                 {sick: true, byUs: true},
		"refused here, and the next one is news to us": {sick: true, byUs: true, unseen: true},
	} {
		t.Run(name, func(t *testing.T) {
			rejected, next := newPod("rejected", main(8), assumed(1, 1), revision("5")), newPod("next", main(8), assumed(0, 2), revision("6"))
			b := newBench(t, rejected)
			b.blind = test.unseen
			b.askable()
			k, p := b.up(16, 16)
			k.showsRejected = true
			await(t, "the informer", func() bool { return p.pods.Exists("uid-rejected") })
			if test.sick {
				cards := newCards(16, 16)
				cards[1].Unhealthy = "Xid 79"
				p.SetCards(cards, nil, "")
				k.awaitDevices(16, 32)
			}
			if !test.byUs {
				k.reject(rejected)
			} else if _, err := k.admit(rejected); err == nil {
				t.Fatal("the pod wasn't refused")
			}
			b.create(p, next)
			if got := cardOf(k.mustAdmit(next)["main"]); got != "0" {
				t.Errorf("got card %s, want 0", got)
			}
		})
	}
}
