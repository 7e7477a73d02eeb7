package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

func TestAllocate(t *testing.T) {
	b := newFixture(t)
	k, p := b.up(16, 16)

	pods := []*corev1.Pod{
		newPod("third", main(4), assumed(0, 3)), newPod("first", main(4), assumed(1, 1)), newPod("second", main(4), assumed(0, 2)),
	}
	b.create(p, pods...)
	for _, name := range []string{"first", "second", "third"} {
		before := b.pod(name)
		env := k.mustAdmit(before)["main"]
		assignment, err := protocol.ParseAssignment(before.Annotations)
		check.Must(t, err)
		want := map[string]string{
			"NVIDIA_VISIBLE_DEVICES":       fmt.Sprintf("GPU-%d", assignment.Cards[0].Index),
			"ALIYUN_COM_GPU_MEM_IDX":       before.Annotations["ALIYUN_COM_GPU_MEM_IDX"],
			"ALIYUN_COM_GPU_MEM_POD":       before.Annotations["ALIYUN_COM_GPU_MEM_POD"],
			"ALIYUN_COM_GPU_MEM_DEV":       before.Annotations["ALIYUN_COM_GPU_MEM_DEV"],
			"ALIYUN_COM_GPU_MEM_CONTAINER": "4",
		}
		check.Equal(t, name, want, env)
		after := b.awaitAssigned(name, assignment.Cards[0].Index)
		if !after.AssumeTime.Equal(assignment.AssumeTime) || after.AssignTime.IsZero() {
			t.Errorf("%s: assumed %v, before %v; assigned %v", name, after.AssumeTime, assignment.AssumeTime, after.AssignTime)
		}
	}
	if got := counted(t, p, allocation.ResultAssumed); got != 3 {
		t.Errorf("counted %v allocations, want 3", got)
	}
	if got := testutil.ToFloat64(p.metrics.otherDevices); got != 0 {
		t.Errorf("the kubelet recorded devices of another card %v times", got)
	}
}

func TestMoved(t *testing.T) {
	b := newFixture(t)
	k, p := b.up(16, 16)
	direct := newPod("direct", main(10))
	b.create(p, direct)
	k.mustAdmit(direct)
	b.awaitAssigned("direct", 0)
	late := newPod("late", main(8), assumed(0, 1))
	b.create(p, late)
	if env := k.mustAdmit(late)["main"]; env["NVIDIA_VISIBLE_DEVICES"] != "GPU-1" {
		t.Errorf("got %v, want card 1", env)
	}
	if got := b.awaitAssigned("late", 1); !got.AssumeTime.Equal(start.Add(time.Second)) {
		t.Errorf("the assume time became %v", got.AssumeTime)
	}
	b.awaitEvent("GPUCardMoved container main got card 1: the choice for the pod was card 0, and pods that have a share there leave it no room")
	b.awaitEvent("GPUCardRepaired")
}

func TestMatchByKubelet(t *testing.T) {
	b := newFixture(t)
	b.servePodResources()
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

// TestMatchByOrder: if the kubelet doesn't answer, the match is by order. Where it is wrong, the annotations are
// repaired to what the containers got.
func TestMatchByOrder(t *testing.T) {
	b := newFixture(t)
	k, p := b.up(16, 16)
	early, late := newPod("early", main(10), assumed(0, 1)), newPod("late", main(10), assumed(1, 2))
	b.create(p, early, late)
	if got := cardOf(k.mustAdmit(late)["main"]); got != "0" {
		t.Fatalf("late got card %s: the test needs a wrong match", got)
	}
	b.awaitAssigned("late", 0)
	if got := cardOf(k.mustAdmit(early)["main"]); got != "1" {
		t.Errorf("early got card %s, which holds 10 of 16 already", got)
	}
	b.awaitAssigned("early", 1)
	await.True(t, "two repairs", func() bool { return testutil.ToFloat64(p.metrics.repairs) >= 2 })
}

func TestAllocateCancelled(t *testing.T) {
	b := newFixture(t)
	p, _ := b.start(newCards(16))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := p.allocator.Allocate(ctx, []string{"00"}); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled call gave %v", err)
	}
}

// TestAskOnce checks that one call asks the kubelet about each pod only once.
func TestAskOnce(t *testing.T) {
	b := newFixture(t)
	b.servePodResources()
	k, p := b.up(16, 16)
	b.create(p, newPod("a", main(2), assumed(0, 1)), newPod("b", main(2), assumed(0, 2)), newPod("c", main(2), assumed(0, 3)))
	b.trust(k, p)
	k.mu.Lock()
	k.answered = 0
	k.mu.Unlock()
	if _, err := k.admit(newPod("static", main(2), mirrors("static-1"))); err == nil {
		t.Error("a static pod was served")
	}
	// Three questions each for GetPreferredAllocation and Allocate. The list of pods in between has no new pod.
	if k.answered != 6 {
		t.Errorf("the kubelet was asked %d times about three pods, want 6", k.answered)
	}
}

// TestStaticPod checks that a static pod is rejected: it has no object in the API when the kubelet calls Allocate, so nothing
// is known about it.
func TestStaticPod(t *testing.T) {
	b := newFixture(t)
	k, p := b.up(16)
	static := newPod("static", main(10), mirrors("file"))
	_, err := k.admit(static)
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "no pod that the API server has on this node waits for 10 units of GPU memory, and static pods are not supported") {
		t.Errorf("got %v", err)
	}
	if got := counted(t, p, allocation.RefusedUnknownPod); got != 1 {
		t.Errorf("counted %v rejections", got)
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

// TestRejectedPodsAreShown: kubelets 1.34 and 1.35 show a pod that they have rejected like the one that they admit, until the API
// server knows that it has failed. Here the informer doesn't know the next pod either.
func TestRejectedPodsAreShown(t *testing.T) {
	rejected, next := newPod("rejected", main(8), assumed(1, 1), revision("5")), newPod("next", main(8), assumed(0, 2), revision("6"))
	b := newFixture(t, rejected)
	b.blind = true
	b.servePodResources()
	k, p := b.up(16, 16)
	k.showsRejected = true
	await.True(t, "the informer", func() bool { return p.pods.Exists("uid-rejected") })
	cards := newCards(16, 16)
	cards[1].Unhealthy = "Xid 79"
	p.SetCards(gpu.GiB, cards, nil, nil, "")
	k.awaitDevices(16, 32)
	if _, err := k.admit(rejected); err == nil {
		t.Fatal("the pod wasn't rejected")
	}
	b.create(p, next)
	if got := cardOf(k.mustAdmit(next)["main"]); got != "0" {
		t.Errorf("got card %s, want 0", got)
	}
}
