package scheduling

import (
	"context"
	"errors"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/fake"
)

func TestPreempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		never := corev1.PreemptNever
		f := start(t, Options{}, fake.Node("n1", 16), fake.Node("n2", 16), fake.Node("n3", 16), fake.Pod("a", 16, fake.Bound("n1", 0)),
			fake.Pod("b9", 9, fake.Bound("n2", 0), fake.Label("x")), fake.Pod("b7", 7, fake.Bound("n2", 0)),
			fake.Pod("c", 16, fake.Bound("n3", 0), fake.Priority(5)), fake.Budget("x", "x", 0))
		type victims = map[string]preemption.Victims
		proposed := victims{"n1": {Pods: []gpu.PodUID{"uid-a"}}, "n2": {Pods: []gpu.PodUID{"uid-b7"}}, "n3": {}}
		for name, test := range map[string]struct {
			pod  *corev1.Pod
			want victims
		}{
			"victims by card": {fake.Pod("p", 16, fake.Priority(5)), victims{
				"n1": {Pods: []gpu.PodUID{"uid-a"}}, "n2": {Pods: []gpu.PodUID{"uid-b7", "uid-b9"}, Violations: 1},
			}},
			"a pod without GPU memory":       {fake.Pod("p", 0, fake.Priority(5)), proposed},
			"a pod that must preempt no pod": {fake.Pod("p", 16, fake.Priority(5), func(pod *corev1.Pod) { pod.Spec.PreemptionPolicy = &never }), nil},
		} {
			got, err := f.Preempt(t.Context(), test.pod, proposed)
			if diff := cmp.Diff(test.want, got); diff != "" || err != nil {
				t.Errorf("%s: %v (-want +got):\n%s", name, err, diff)
			}
		}
	})
}

// Preempt waits for the disruption budgets, filter and bind don't.
func TestPreemptWithoutBudgets(t *testing.T) {
	f := newFixture(t, Options{}, fake.Node("n1", 16))
	f.client.PrependReactor("list", "poddisruptionbudgets", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, errLost })
	f.run()
	await.True(t, "the cache sync", func() bool { return f.Ready() == nil })
	if _, err := f.Preempt(t.Context(), fake.Pod("p", 16), nil); !errors.Is(err, clustercache.ErrNotSynced) {
		t.Errorf("%v, want ErrNotSynced", err)
	}
}

// kube-scheduler doesn't read the answer of a call that it has given up, so Preempt does nothing for it.
func TestPreemptGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, Options{}, fake.Node("n1", 16), fake.Pod("a", 16, fake.Bound("n1", 0)))
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		got, err := f.Preempt(ctx, fake.Pod("p", 16, fake.Priority(5)), map[string]preemption.Victims{"n1": {Pods: []gpu.PodUID{"uid-a"}}})
		if got != nil || !errors.Is(err, context.Canceled) {
			t.Errorf("%v, %v, want context.Canceled", got, err)
		}
	})
}

// kube-scheduler sees the end of a victim before the extender does, tries the preemptor again, and proposes a victim on another node.
func TestPreemptWhileVictimsLeave(t *testing.T) {
	leaving := fake.Terminating(begin)
	type victims = map[string]preemption.Victims
	elsewhere := victims{"n2": {Pods: []gpu.PodUID{"uid-b"}}}
	nominated := fake.Pod("p", 16, fake.Priority(5), fake.Nominated("n1"))
	on := func(name string, memory int64, edits ...fake.PodEdit) *corev1.Pod {
		return fake.Pod(name, memory, append([]fake.PodEdit{fake.Bound("n1", 0), fake.Priority(1)}, edits...)...)
	}
	for name, test := range map[string]struct {
		pod *corev1.Pod
		// others are the pods of node n1, whose first card is in use. offered are the candidate nodes of the filter call.
		others  []runtime.Object
		offered []string
		want    victims
	}{
		"the victim is leaving":                         {nominated, []runtime.Object{on("a", 16, leaving)}, []string{"n1"}, nil},
		"both victims are leaving":                      {nominated, []runtime.Object{on("a", 8, leaving), on("c", 8, leaving)}, []string{"n1"}, nil},
		"one of two victims isn't deleted":              {nominated, []runtime.Object{on("a", 8, leaving), on("c", 8)}, []string{"n1"}, elsewhere},
		"a pod of higher priority has taken the place":  {nominated, []runtime.Object{on("a", 8, leaving), on("c", 8, fake.Priority(9))}, []string{"n1"}, elsewhere},
		"the victim doesn't end":                        {nominated, []runtime.Object{on("a", 16, fake.Terminating(begin.Add(-2*time.Minute)))}, []string{"n1"}, elsewhere},
		"kube-scheduler rejects the nominated node":     {nominated, []runtime.Object{on("a", 16, leaving)}, []string{"n2"}, elsewhere},
		"a former leader's answer ended the nomination": {fake.Pod("p", 16, fake.Priority(5)), []runtime.Object{on("a", 16, leaving)}, []string{"n1"}, nil},
		"the victims of several cards are leaving":      {fake.Pod("p", 32, fake.Cards(2), fake.Priority(5), fake.Nominated("n1")), []runtime.Object{on("a", 16, leaving), on("c", 16, leaving, fake.Bound("n1", 1))}, []string{"n1"}, nil},
		"the victim of one of several cards isn't":      {fake.Pod("p", 32, fake.Cards(2), fake.Priority(5), fake.Nominated("n1")), []runtime.Object{on("a", 16, leaving), on("c", 16, fake.Bound("n1", 1))}, []string{"n1"}, victims{}},
	} {
		t.Run(name, bubble(func(t *testing.T) {
			objects := append(test.others, fake.Node("n1", 16, 16), fake.Node("n2", 16), test.pod, fake.Pod("full", 16, fake.Bound("n1", 1), fake.Priority(9)),
				fake.Pod("b", 16, fake.Bound("n2", 0), fake.Priority(1)))
			if test.pod.Labels != nil { // It needs both cards of n1.
				objects = slices.DeleteFunc(objects, func(o runtime.Object) bool { pod, ok := o.(*corev1.Pod); return ok && pod.Name == "full" })
			}
			f := start(t, Options{}, objects...)
			if result := f.filter(test.pod, test.offered...); len(result.Passed) > 0 {
				t.Fatalf("passed on %v", result.Names())
			}
			got, err := f.Preempt(t.Context(), test.pod, elsewhere)
			if diff := cmp.Diff(test.want, got); diff != "" || err != nil {
				t.Errorf("%v (-want +got):\n%s", err, diff)
			}
		}))
	}
}

// The watch lags: it shows neither the nomination nor the deletion of the victim yet, of which kube-scheduler has seen the end.
func TestPreemptBeforeTheWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type victims = map[string]preemption.Victims
		pod := fake.Pod("p", 16, fake.Priority(5))
		f := start(t, Options{}, fake.Node("n1", 16), fake.Node("n2", 16), pod,
			fake.Pod("a", 16, fake.Bound("n1", 0), fake.Priority(1)), fake.Pod("b", 16, fake.Bound("n2", 0), fake.Priority(1)))
		on1, on2 := preemption.Victims{Pods: []gpu.PodUID{"uid-a"}}, preemption.Victims{Pods: []gpu.PodUID{"uid-b"}}
		preempt := func(proposed, want victims) {
			t.Helper()
			got, err := f.Preempt(t.Context(), pod, proposed)
			if diff := cmp.Diff(want, got); diff != "" || err != nil {
				t.Errorf("%v (-want +got):\n%s", err, diff)
			}
		}
		preempt(victims{"n1": on1, "n2": on2}, victims{"n1": on1, "n2": on2})
		f.filter(pod, "n1")
		preempt(victims{"n2": on2}, nil)
		f.clock.Step(time.Minute) // The deletion has failed: the watch would have shown it by now.
		f.filter(pod, "n1")
		preempt(victims{"n2": on2}, victims{"n2": on2})
	})
}

// kube-scheduler asks again, because its cache still has the victims of the last call.
func TestPreemptRepeated(t *testing.T) {
	type victims = map[string]preemption.Victims
	on1, on2, both := preemption.Victims{Pods: []gpu.PodUID{"uid-a"}}, preemption.Victims{Pods: []gpu.PodUID{"uid-b"}}, []gpu.PodUID{"uid-a", "uid-c"}
	on3 := preemption.Victims{Pods: []gpu.PodUID{"uid-d"}} // For CPU: the pod has no GPU memory.
	gone := func(f *fixture, pod *corev1.Pod) { f.publishGone(pod) }
	leaves := func(f *fixture, pod *corev1.Pod) { f.publishObject(fake.Edited(pod, fake.Terminating(f.clock.Now()))) }
	for name, test := range map[string]struct {
		meanwhile func(f *fixture, a *corev1.Pod)
		again     victims
		want      victims
	}{
		"they are leaving":             {leaves, victims{"n1": on1, "n2": on2}, nil},
		"they are gone":                {gone, victims{"n1": on1, "n2": on2}, nil},
		"they still run":               {func(*fixture, *corev1.Pod) {}, victims{"n1": on1, "n2": on2}, victims{"n1": on1, "n2": on2}},
		"it rejects the node now":      {leaves, victims{"n2": on2}, victims{"n2": on2}},
		"another has no GPU memory":    {leaves, victims{"n3": on3}, victims{"n3": on3}},
		"the node needs a further one": {gone, victims{"n1": {Pods: both}}, victims{"n1": {Pods: both}}},
		"they were named long ago":     {func(f *fixture, a *corev1.Pod) { f.clock.Step(10 * time.Second); leaves(f, a) }, victims{"n1": on1}, victims{"n1": on1}},
	} {
		t.Run(name, bubble(func(t *testing.T) {
			pod, rival := fake.Pod("p", 16, fake.Priority(5)), fake.Pod("rival", 16, fake.Priority(5))
			a := fake.Pod("a", 16, fake.Bound("n1", 0), fake.Priority(1))
			f := start(t, Options{}, fake.Node("n1", 16), fake.Node("n2", 16), pod, rival, a,
				fake.Pod("b", 16, fake.Bound("n2", 0), fake.Priority(1)), fake.Pod("c", 0, fake.Bound("n1", 0), fake.Priority(1)),
				fake.Node("n3", 16), fake.Pod("d", 0, fake.Bound("n3", 0), fake.Priority(1)))
			preempt := func(proposed, want victims) {
				t.Helper()
				got, err := f.Preempt(t.Context(), pod, proposed)
				if diff := cmp.Diff(want, got); diff != "" || err != nil {
					t.Errorf("%v (-want +got):\n%s", err, diff)
				}
			}
			all := victims{"n1": on1, "n2": on2, "n3": on3}
			preempt(maps.Clone(all), all)
			test.meanwhile(f, a)
			preempt(test.again, test.want)
			if test.want == nil && f.fits(protocol.Pod(rival), "n1") {
				t.Error("a pod of equal priority may take the place")
			}
		}))
	}
}

// kube-scheduler clears the nomination of a pod for which it finds no victims. The place is kept until the victim is gone and the pod had
// time to take it.
func TestPlaceOfPreemptorIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		victim := fake.Pod("a", 16, fake.Bound("n1", 0), fake.Priority(1), fake.Terminating(begin))
		pod, rival := fake.Pod("p", 16, fake.Priority(5), fake.Nominated("n1")), fake.Pod("rival", 16, fake.Priority(5))
		f := start(t, Options{}, fake.Node("n1", 16), victim, pod, rival)
		f.filter(pod, "n1")
		cleared := fake.Edited(pod, fake.Nominated(""))
		f.publishObject(cleared)
		f.publishGone(victim)
		if got := f.filter(rival, "n1").Names(); len(got) != 0 {
			t.Errorf("a pod of equal priority may go to %v", got)
		}
		f.pass("the requeue", func() bool { return slices.Equal(f.requeued(), []string{"n1"}) })
		if got := f.filter(cleared, "n1").Names(); !slices.Equal(got, []string{"n1"}) {
			t.Errorf("the preemptor may go to %v", got)
		}
		f.pass("the end of the reservation", func() bool { return f.fits(protocol.Pod(rival), "n1") })
	})
}

// A new leader finds the place of a preemptor whose nomination an answer of the former one has cleared. It keeps the place, although nothing changes
// about the pod.
func TestPlaceOfPreemptorIsFound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		victim := fake.Pod("a", 16, fake.Bound("n1", 0), fake.Priority(1), fake.Terminating(begin))
		pod, rival := fake.Pod("p", 16, fake.Priority(5)), fake.Pod("rival", 16, fake.Priority(5))
		f := start(t, Options{}, fake.Node("n1", 16), victim, pod, rival)
		f.filter(pod, "n1")
		f.publishGone(victim)
		if got := f.filter(rival, "n1").Names(); len(got) != 0 {
			t.Errorf("a pod of equal priority may go to %v", got)
		}
	})
}

// While the extender frees a card for a pod, kube-scheduler preempts on no other node for it.
func TestPreemptDuringEviction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pod := fake.Pod("p", 8, fake.Priority(9))
		f := start(t, Options{EvictFragmented: true}, append(fragmented(), fake.Node("n2", 8), fake.Pod("c", 8, fake.Bound("n2", 0)), pod)...)
		proposed := map[string]preemption.Victims{"n1": {}, "n2": {Pods: []gpu.PodUID{"uid-c"}}}
		f.filter(pod, "n1")
		f.pass("the eviction", func() bool { return len(f.server.Calls().Evicted) == 2 })
		for range 2 {
			if got, err := f.Preempt(t.Context(), pod, proposed); len(got) > 0 || err != nil {
				t.Errorf("%v, %v", got, err)
			}
		}
	})
}
