package scheduling

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"

	"github.com/gpushare/gpushare/pkg/apiserver/fake"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/preemption"
)

func TestPreempt(t *testing.T) {
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
}

// Preempt waits for the disruption budgets, filter and bind don't.
func TestPreemptWithoutBudgets(t *testing.T) {
	f := newFixture(t, Options{}, fake.Node("n1", 16))
	f.client.PrependReactor("list", "poddisruptionbudgets", func(clienttesting.Action) (bool, kruntime.Object, error) { return true, nil, errLost })
	f.run()
	f.await("the cache sync", func() bool { return f.Ready() == nil })
	if _, err := f.Preempt(t.Context(), fake.Pod("p", 16), nil); !errors.Is(err, clustercache.ErrNotSynced) {
		t.Errorf("%v, want ErrNotSynced", err)
	}
}

// Nobody reads the answer of a call that kube-scheduler has given up, so Preempt does nothing for it.
func TestPreemptGivenUp(t *testing.T) {
	f := start(t, Options{}, fake.Node("n1", 16), fake.Pod("a", 16, fake.Bound("n1", 0)))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	got, err := f.Preempt(ctx, fake.Pod("p", 16, fake.Priority(5)), map[string]preemption.Victims{"n1": {Pods: []gpu.PodUID{"uid-a"}}})
	if got != nil || !errors.Is(err, context.Canceled) {
		t.Errorf("%v, %v, want context.Canceled", got, err)
	}
}
