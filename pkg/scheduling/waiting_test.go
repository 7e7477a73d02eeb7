package scheduling

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/fake"
)

// A pod waits for CPU. Filter, bind and preempt keep what becomes free from the pods that come later, and these are requeued when there is enough.
func TestResourcesAreKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		at := func(d time.Duration) fake.PodEdit {
			return fake.Annotation(protocol.AnnotationAssumeTime, strconv.FormatInt(begin.Add(d).UnixNano(), 10))
		}
		first := fake.Pod("first", 4, fake.CPU(3), fake.Bound("n1", 0), at(0))
		later := fake.Pod("later", 4, fake.CPU(3), fake.Bound("n1", 1), fake.Priority(-1), at(time.Second)) // It has to end for the large pod.
		without := fake.Pod("without", 0, fake.CPU(1), fake.On("n1"))
		large, small, higher := fake.Pod("large", 16, fake.CPU(6)), fake.Pod("small", 4, fake.CPU(2)), fake.Pod("higher", 4, fake.CPU(2), fake.Priority(1))
		short(large)
		large.Status.Conditions[0].Message = "0/1 nodes are available: 1 Insufficient cpu."
		f := startCache(t, Options{}, fake.Node("n1", 16, 16), first, later, without, large, small, higher) // It has eight CPUs.
		wantFilter := func(what string, pod *corev1.Pod, want reasons.Reason) {
			t.Helper()
			result := f.filter(pod, "n1")
			if !slices.Equal(result.Reasons, []reasons.Reason{want}) || want == reasons.ResourcesReserved && result.ReservedFor != "pod default/large" {
				t.Errorf("%s: %+v, want %v", what, result, want)
			}
		}
		wantFilter("before the large pod waits", small, reasons.Fits)
		f.waiting.tick()
		why := f.diagnose(f.pendingPods("large"))
		if words := "; cards of n1 are reserved for it, and it gets them when pods there have ended"; !strings.HasSuffix(why[0].Message, words) {
			t.Errorf("it is pending because %q", why[0].Message)
		}
		wantFilter("a pod that comes later", small, reasons.ResourcesReserved)
		wantFilter("a pod of higher priority", higher, reasons.Fits)
		if err := f.bind(small); !noRoom(err) {
			t.Errorf("bind: %v", err)
		}
		victims := map[string]preemption.Victims{"n1": {Pods: []gpu.PodUID{"uid-later"}}}
		if answer, err := f.Preempt(t.Context(), small, victims); err != nil || len(answer) > 0 {
			t.Errorf("victims %v, %v for a pod that can't have what they use", answer, err)
		}
		f.requeue.Requeue(t.Context())
		before := len(f.requeued())
		f.publishGone(first)
		wantFilter("with the CPU of a pod on the other card", small, reasons.ResourcesReserved)
		f.requeue.Requeue(t.Context())
		if len(f.requeued()) > before {
			t.Error("requeued, although nothing fits")
		}
		f.publishGone(without)
		if f.requeue.Requeue(t.Context()); len(f.requeued()) == before {
			t.Error("not requeued, although both fit")
		}
		wantFilter("with enough for both", small, reasons.Fits)
	})
}

// Without memory that may be reserved on cards in use, even the first pod gets none.
func TestReservationsOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		now := fake.Annotation(protocol.AnnotationAssumeTime, strconv.FormatInt(begin.Add(time.Second).UnixNano(), 10))
		first := fake.Pod("first", 16)
		short(first)
		f := startCache(t, Options{}, fake.Node("n1", 16), fake.Pod("small", 4, fake.Bound("n1", 0), now), first)
		for _, maxIdle := range []float64{0, 0.02} {
			f.waiting.reserver.MaxIdle = maxIdle
			f.waiting.tick()
			if reserved := f.ledger.AwaitedNodes(); len(reserved) > 0 != (maxIdle > 0) {
				t.Errorf("with %v of the memory: %v", maxIdle, reserved)
			}
		}
	})
}
