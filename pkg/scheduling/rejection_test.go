package scheduling

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	corev1 "k8s.io/api/core/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"

	"github.com/gpushare/gpushare/pkg/binding"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// A pod is rejected because the watch lags. Then the watch reports that another pod is gone.
func TestRequeueAfterLateWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		other, pod := fake.Pod("other", 100, fake.Bound("n1", 0)), fake.Pod("p", 60)
		f := start(t, Options{}, fake.Node("n1", 100), fake.Node("n2", 50), other, pod)
		if result := f.filter(pod, "n1"); len(result.Passed) != 0 {
			t.Fatalf("%+v", result)
		}
		f.clock.Step(time.Second)
		f.publishGone(other)
		f.pass("the requeue", func() bool { return slices.Equal(f.requeued(), []string{"n1"}) })
		if result := f.filter(pod, "n1"); !slices.Equal(result.Names(), []string{"n1"}) {
			t.Errorf("%+v", result)
		}
		check.Must(t, f.bind(pod))
		// The rejection of a pod that is bound is dropped: then only a change of n2 helps a pod.
		seen, later := f.requeue.Revision(), fake.Pod("later", 1, fake.Bound("n2", 0))
		f.requeue.Rejected(protocol.Pod(pod), nil, seen)
		f.publish(pod)
		f.publishObject(later)
		f.requeue.Rejected(gpu.Pod{UID: "rejected", Request: 45}, nil, seen)
		f.requeue.Freed("n1")
		f.requeue.Freed("n2")
		f.pass("the requeue", func() bool { return slices.Equal(f.requeued(), []string{"n1", "n2"}) })
	})
}

// While a bind is unconfirmed, the pod is rejected on other nodes. It is requeued when the bind has failed.
func TestRequeueAfterFailedBind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pod := fake.Pod("p", 60)
		f := start(t, Options{}, fake.Node("n1", 100), fake.Node("n2", 100), pod)
		f.server.Answer(fake.Answers{Bind: func(context.Context, *corev1.Binding) error { return errLost }})
		if err := f.bind(pod); !errors.Is(err, binding.ErrUnconfirmed) {
			t.Fatal(err)
		}
		f.requeue.RequeueAll("before")
		f.pass("the requeue at the start", func() bool { return slices.Contains(f.requeued(), "before") })
		before := len(f.requeued())
		f.ledger.DeleteNode("n1") // The memory that the bind gives back does not count.
		if got := f.filter(pod, "n2").Names(); len(got) != 0 {
			t.Errorf("the pod may go to %v", got)
		}
		f.clock.Step(f.BindDeadline())
		f.pass("the requeue", func() bool { return len(f.requeued()) > before })
	})
}

// Pods that a former extender rejected are requeued if there is memory for them: when an extender without replicas has started,
// or when a replica takes over.
func TestRequeuePendingPods(t *testing.T) {
	for name, test := range map[string]struct {
		pods []kruntime.Object
		want bool
	}{
		"a pending pod":        {[]kruntime.Object{fake.Pod("small", 60)}, true},
		"no pending pod":       {[]kruntime.Object{fake.Pod("b", 60, fake.Bound("n1", 0)), fake.Pod("no GPU memory", 0)}, false},
		"a pod that has ended": {[]kruntime.Object{fake.Pod("p", 10, fake.Phase(corev1.PodFailed))}, false},
	} {
		for _, replicas := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, replicas: %v", name, replicas), bubble(func(t *testing.T) {
				var o Options
				if replicas {
					o.Leading = new(standby).leading
				}
				f := start(t, o, append(test.pods, fake.Node("n1", 100))...)
				if replicas {
					f.clock.Step(tick)
					if got := f.requeued(); len(got) > 0 {
						t.Errorf("requeued by %v before the term", got)
					}
					check.Must(t, f.TakeOver(t.Context()))
				}
				want := "n1"
				if !test.want {
					// A later requeue shows that no earlier one is pending.
					want = "later"
					f.requeue.RequeueAll(want)
				}
				f.pass("a requeue", func() bool { return len(f.requeued()) > 0 })
				if got := f.requeued(); !slices.Equal(got, []string{want}) {
					t.Errorf("requeued by %v, want %s", got, want)
				}
			}))
		}
	}
}

// fragmented returns a node of two cards of 16 and two pods with 12 of priority 1 on them. A pod that asks for 8 fits the node's
// sum, but no card.
func fragmented() []kruntime.Object {
	return []kruntime.Object{
		fake.Node("n1", 16, 16), fake.Pod("a12", 12, fake.Bound("n1", 0), fake.Priority(1)), fake.Pod("b12", 12, fake.Bound("n1", 1), fake.Priority(2)),
	}
}

// A rejected pod gets a card by an eviction. The card is reserved for it until it is bound.
func TestEvictionForRejectedPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pod, rival := fake.Pod("p", 8, fake.Priority(9)), fake.Pod("rival", 9, fake.Priority(9))
		f := start(t, Options{EvictFragmented: true}, append(fragmented(), pod, rival)...)
		f.filter(pod, "n1")
		f.pass("the eviction", func() bool { return len(f.server.Calls().Evicted) == 2 })
		if got := f.server.Calls().Evicted; !slices.Equal(got, []string{"?a12", "a12"}) {
			t.Errorf("evicted %v", got)
		}
		f.publishGone(fake.Pod("a12", 0))
		if got := f.filter(rival, "n1").Names(); len(got) != 0 {
			t.Errorf("a pod of equal priority may go to %v", got)
		}
		// The reservation outlives a change of the pod without a nomination.
		f.publishObject(fake.Edited(pod, func(pod *corev1.Pod) {
			pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: "changed"}}
		}))
		if got := f.filter(rival, "n1").Names(); len(got) != 0 {
			t.Errorf("a pod of equal priority may go to %v", got)
		}
		check.Must(t, f.bind(pod))
		f.publish(pod)
		if !f.fits(gpu.Pod{UID: "other", Request: 8}, "n1") || f.preemptors.Renew(protocol.Pod(pod), "") {
			t.Error("the reservation and the round go on")
		}
	})
}

// No pod is evicted for a pod whose preemption policy is Never, or which has passed since. A pod of lower priority shows that
// their turn is over.
func TestNoEviction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		never := corev1.PreemptNever
		neverPreempts := fake.Pod("never", 8, fake.Priority(9), func(pod *corev1.Pod) { pod.Spec.PreemptionPolicy = &never })
		passed, later := fake.Pod("passed", 8, fake.Priority(8)), fake.Pod("later", 8, fake.Priority(2))
		f := start(t, Options{EvictFragmented: true}, append(fragmented(), fake.Node("n2", 16), neverPreempts, passed, later)...)
		for _, pod := range []*corev1.Pod{neverPreempts, passed, later} {
			f.filter(pod, "n1")
		}
		f.filter(passed, "n2")
		f.pass("an eviction", func() bool { return len(f.events) > 0 })
		f.wantEvent("Normal GPUCardEvicted Evicted from GPU card 0 of node n1 for pod default/later of higher priority")
	})
}

// The Pod object of a request isn't kept: it can be as large as a request.
func TestRejectedPodObjectIsNotKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, Options{EvictFragmented: true}, append(fragmented(), fake.Pod("p", 8, fake.Priority(9)))...)
		object := weak.Make(func() *corev1.Pod {
			pod := fake.Pod("p", 8, fake.Priority(9))
			f.filter(pod, "n1")
			return pod
		}())
		f.await("the pod of the request to be collected", func() bool { runtime.GC(); return object.Value() == nil })
	})
}
