package scheduling

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/binding"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// handlersFixture calls the event handlers of a Scheduler that doesn't run, as the cache does.
type handlersFixture struct {
	*fixture
	handlers *eventHandlers
	pods     map[string]*clustercache.PodInfo
}

func newHandlersFixture(t *testing.T, nodes ...*corev1.Node) *handlersFixture {
	f := &handlersFixture{fixture: newFixture(t, Options{Gangs: GangOptions{Hold: time.Second, Observer: &fake.Observer{}}}), pods: map[string]*clustercache.PodInfo{}}
	f.handlers = (*eventHandlers)(f.Scheduler)
	for _, node := range nodes {
		f.handlers.NodeUpdated(node)
	}
	return f
}

func (f *handlersFixture) report(pods ...*corev1.Pod) {
	for _, pod := range pods {
		info := clustercache.NewPodInfo(pod)
		f.handlers.PodUpdated(f.pods[pod.Name], info)
		f.pods[pod.Name] = info
	}
}

func (f *handlersFixture) wantUsed(want ...gpu.Memory) {
	f.t.Helper()
	node, _ := f.ledger.Node("n1")
	check.Equal(f.t, "used memory of n1", want, node.Used)
}

// The watch was interrupted, and a pod was replaced by another one of the same name.
func TestReplacedPod(t *testing.T) {
	f := newHandlersFixture(t, fake.Node("n1", 100, 100))
	first, second, third := fake.Pod("p", 40, fake.Bound("n1", 0)), fake.Pod("p", 10, fake.Bound("n1", 1)), fake.Pod("p", 10)
	second.UID, third.UID = "second", "third"
	f.report(first)
	f.wantUsed(40, 0)
	f.report(second)
	f.wantUsed(0, 10)
	f.report(third)
	f.wantUsed(0, 0)

	f.report(fake.Pod("nominee", 10, fake.Nominated("n1")), fake.Pod("cardless", 0, fake.On("n1"), fake.CPU(1)))
	seen, pending := f.requeue.Revision(), fake.Pod("cardless", 0)
	pending.UID = "pending"
	f.report(pending)
	if f.requeue.Revision() == seen {
		t.Error("no pod is requeued for the CPU of a pod without GPU memory")
	}

	inGang := func(uid gpu.PodUID) bool { known, _ := f.groups.manager.Membership(uid); return known }
	f.report(member(2, 1))
	single := fake.Pod("job-1", 8)
	if !inGang("uid-job-1") {
		t.Error("the gang doesn't have the member")
	}
	f.report(single)
	if inGang("uid-job-1") {
		t.Error("the gang still has a pod that names no group")
	}
}

// The watch resolves the unconfirmed bind of a pod that asks for whole cards too.
func TestUnconfirmedBindOfWholeCards(t *testing.T) {
	for name, test := range map[string]struct {
		edits []fake.PodEdit
		want  string
	}{
		"bound": {[]fake.PodEdit{fake.On("n1")}, "resolved bound"},
		"ended": {[]fake.PodEdit{fake.On("n1"), fake.Phase(corev1.PodFailed)}, "resolved gone"},
	} {
		f := newHandlersFixture(t, fake.Node("n1", 100))
		pod := fake.Pod("p", 0)
		pod.Spec.Containers[0].Resources.Limits = fake.Amount(protocol.ResourceWholeCard, 1)
		f.server.Answer(fake.Answers{Read: errLost, Bind: func(context.Context, *corev1.Binding) error { return errLost }})
		claim, _ := f.binder.Claim("uid-p")
		if _, err := claim.Write(t.Context(), "n1", ledger.Allocation{Pod: protocol.Pod(pod)}, nil, binding.Membership{}); !errors.Is(err, binding.ErrUnconfirmed) {
			t.Fatal(err)
		}
		claim.End()
		f.report(fake.Edited(pod, test.edits...))
		if f.observer.Count(test.want) != 1 {
			t.Errorf("%s: counted %v", name, f.observer.Counts())
		}
		f.wantUsed(0)
	}
}

func TestDeletedNodeFindsItsPods(t *testing.T) {
	f := newHandlersFixture(t, fake.Node("n1", 100, 100))
	pod := fake.Pod("p", 40, fake.Bound("n1", 1))
	f.report(pod)
	f.handlers.NodeDeleted("n1")
	if f.fits(gpu.Pod{UID: "x", Request: 1}, "n1") {
		t.Error("a pod fits a deleted node")
	}
	f.want(pod, "bound n1 card 1")
	f.handlers.NodeUpdated(fake.Node("n1", 100, 100))
	f.wantUsed(0, 40)
}

// What a node has free follows the watch.
func TestFreeFollowsTheWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asking := fake.Pod("asking", 16, fake.CPU(5))
		running := fake.Pod("running", 0, fake.On("n1"), fake.CPU(5))
		g := startGroups(t, GangOptions{}, asking)
		fits := func(want bool) {
			t.Helper()
			if got := g.nodes.Fits(ledger.ResourceQuery{Node: "n1", Pods: []gpu.PodUID{"uid-asking"}}); got != want {
				t.Errorf("the pod fits: %t, want %t", got, want)
			}
		}
		fits(true)
		g.publishObject(running)
		fits(false)
		g.publishObject(fake.Edited(running, fake.Phase(corev1.PodSucceeded)))
		fits(true)
		g.publishObject(fake.Edited(asking, fake.Nominated("n2"))) // It doesn't count for itself.
		fits(true)
		for _, cpus := range []int64{4, 8} {
			node := fake.Node("n1", 16, 16)
			node.Status.Allocatable[corev1.ResourceCPU] = fake.Amount("x", cpus)["x"]
			g.publishNode(node)
			fits(cpus > 5)
		}
	})
}
