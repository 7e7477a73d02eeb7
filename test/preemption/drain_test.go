package preemption

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/apiserver"
	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/eviction"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/fake"
	"github.com/gpushare/gpushare/test/framework"
)

// synced is all that an Executor asks of its cache. It shows what the API server has.
type synced struct {
	eviction.Cache
	*framework.Namespace
}

func (synced) Ready() error { return nil }

func (s synced) Pod(_, name string) (*clustercache.PodInfo, bool) {
	return clustercache.NewPodInfo(s.Get(name)), true
}

// createForRound creates a pod of a group (g1), a single one (s), both of which run on a node without a kubelet, so that they never end, or one that
// waits (w).
func createForRound(s *framework.Namespace, name string) gpu.Pod {
	s.Helper()
	pod := s.Pod(name, 1).GracePeriod(300).Obj()
	switch name[0] {
	case 'w':
		pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "test/waits"}}
	case 'g':
		pod.Labels = map[string]string{"app": "group"}
	}
	if name != "w" {
		pod.Spec.NodeName = "none"
	}
	pod, err := s.Pods().Create(s.Context(), pod, metav1.CreateOptions{})
	must(s, err)
	if name != "w" {
		pod.Status.Phase, pod.Status.Conditions = corev1.PodRunning, []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		pod, err = s.Pods().UpdateStatus(s.Context(), pod, metav1.UpdateOptions{})
		must(s, err)
	}
	return protocol.Pod(pod)
}

// TestLeaderDiesBesideDrain lets the leader die after each call to the API server with which it evicts a group of three pods and a single one,
// while a drain evicts two of these too. A disruption budget allows two evictions of the group, and later more. The next leader evicts the rest of the
// group: no pod is evicted again, and no part of the group stays if the leader has evicted another part.
func TestLeaderDiesBesideDrain(t *testing.T) {
	c := shared.Start(t)
	api := apiserver.New(c.Client)
	outcomes := map[string]int{}
	const calls = 22 // The evictions need 19.
	for n := 1; n <= calls; n += controlplane.Times(3, 1) {
		for _, drained := range []string{"", "g2 s"} {
			s := c.NewNamespace(t)
			budgets := c.Client.PolicyV1().PodDisruptionBudgets(s.ID)
			allow := func(disruptions int32) {
				budget, err := budgets.Get(t.Context(), "group", metav1.GetOptions{})
				must(t, err)
				budget.Status = policyv1.PodDisruptionBudgetStatus{ObservedGeneration: budget.Generation, DisruptionsAllowed: disruptions, DesiredHealthy: 1, CurrentHealthy: 3, ExpectedPods: 3}
				_, err = budgets.UpdateStatus(t.Context(), budget, metav1.UpdateOptions{})
				must(t, err)
			}
			_, err := budgets.Create(t.Context(), &policyv1.PodDisruptionBudget{
				ObjectMeta: metav1.ObjectMeta{Name: "group"},
				Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "group"}}},
			}, metav1.CreateOptions{})
			must(t, err)
			allow(2)
			pods := map[string]gpu.Pod{}
			for _, name := range []string{"g1", "g2", "g3", "s", "w"} {
				pods[name] = createForRound(s, name)
			}
			waits := eviction.IDs(pods["w"])[0]
			victim := func(pods ...gpu.Pod) eviction.Victim {
				return eviction.Victim{Pods: eviction.IDs(pods...), For: waits, Message: "Evicted", Cause: eviction.ByShare}
			}
			victims := []eviction.Victim{victim(pods["g1"], pods["g2"], pods["g3"]), victim(pods["s"])}
			var evicted []string
			clock := clocktesting.NewFakeClock(time.Now())
			lead := func(left int) *eviction.Executor {
				return eviction.NewExecutor(eviction.Options{
					API: &fake.Mortal{EvictionAPI: api, Left: left, After: true, Evicted: &evicted}, Cache: synced{Namespace: s},
					Recorder: record.NewFakeRecorder(100), Observer: &fake.Observer{}, Reclaims: &fake.Observer{},
					AnswerLost: time.Minute, Leading: func() error { return nil }, Clock: clock, NewGroup: background.Goroutines,
				}, types.NamespacedName{Namespace: s.ID, Name: "evictions"})
			}
			first := lead(n)
			first.Tick(t.Context())
			var drain sync.WaitGroup
			for name := range strings.FieldsSeq(drained) {
				drain.Go(func() { _ = api.Evict(context.Background(), pods[name], nil, false) }) // A budget can forbid it.
			}
			if first.DryRun(t.Context(), victims) == nil {
				_, _ = first.Evict(t.Context(), victims)
			}
			drain.Wait()
			before := slices.Clone(evicted)
			allow(3)
			second := lead(1 << 30)
			for range 3 * 60 {
				second.Tick(t.Context())
				clock.Step(time.Second)
			}
			var running []string
			for _, name := range []string{"g1", "g2", "g3", "s"} {
				if s.Get(name).DeletionTimestamp == nil {
					running = append(running, name)
				}
			}
			outcomes[fmt.Sprint(running)]++
			for _, name := range evicted {
				if i := slices.Index(evicted, name); slices.Contains(evicted[i+1:], name) {
					t.Errorf("dead after call %d, drain of %q: %s was evicted twice: %v", n, drained, name, evicted)
				}
			}
			part := slices.ContainsFunc(evicted, func(name string) bool { return strings.HasPrefix(name, "g") })
			if part && slices.ContainsFunc(running, func(name string) bool { return strings.HasPrefix(name, "g") }) {
				t.Errorf("dead after call %d, drain of %q: %v evicted before the leader died, %v at all, and %v run", n, drained, before, evicted, running)
			}
		}
	}
	t.Logf("pods that run in the end: %v", outcomes)
	if len(outcomes) < 2 {
		t.Error("the leader died always before the first eviction, or never: the test shows nothing")
	}
}
