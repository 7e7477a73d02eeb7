package gang

import (
	"context"
	"errors"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// cpu sets the CPU request. A node has 64 CPUs.
func cpu(n int64) edit {
	return func(pod *corev1.Pod) {
		pod.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: *resource.NewQuantity(n, resource.DecimalSI)}
	}
}

// onSeparateNodes places each member of a gang on another node, by required anti-affinity.
func onSeparateNodes(gang string) edit {
	return func(pod *corev1.Pod) {
		pod.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{
				TopologyKey: corev1.LabelHostname, LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"group": gang}},
			}},
		}}
	}
}

// TestPreempted: kube-scheduler evicts a member whose bind is held, for a pod of higher priority. The other member has
// no eligible node. No member is bound then and nothing remains reserved. With room for both members the gang becomes
// whole.
func TestPreempted(t *testing.T) {
	bed := framework.StartForTest(t, framework.Options{MemoryUnit: "GiB"})
	_, err := bed.Client.SchedulingV1().PriorityClasses().Create(t.Context(), &schedulingv1.PriorityClass{
		ObjectMeta: metav1.ObjectMeta{Name: "important"}, Value: 1000,
	}, metav1.CreateOptions{})
	must(t, err)
	important := func(pod *corev1.Pod) { pod.Spec.PriorityClassName = "important" }
	f := newFixture(t, bed, 2)
	held := 0
	for round := range shortOrLong(2, 20) {
		gang, first := fmt.Sprintf("g%d", round), fmt.Sprintf("first-%d", round)
		deleted := f.metric(`gpushare_extender_gang_failures_total{reason="deleted"}`)
		f.createGang(gang, 2, card, cpu(20), onSeparateNodes(gang))
		f.eventually("the gang has a plan", func(context.Context) error {
			if f.metric(`gpushare_extender_gangs{state="placed"}`) != 1 {
				return errors.New("it has none")
			}
			return nil
		})
		f.create(first, 0, cpu(50), important)
		f.eventually("the pod of higher priority runs", func(ctx context.Context) error {
			pod, err := bed.Client.CoreV1().Pods(f.namespace).Get(ctx, first, metav1.GetOptions{})
			if err == nil && pod.Spec.NodeName == "" {
				err = errors.New(schedulerMessage(pod))
			}
			return err
		})
		f.awaitBound(map[string]int{"": 1})
		f.awaitNoReservations()
		evicted := ""
		for i := range 2 {
			name := fmt.Sprintf("%s-%d", gang, i)
			if _, err := bed.Client.CoreV1().Pods(f.namespace).Get(t.Context(), name, metav1.GetOptions{}); apierrors.IsNotFound(err) {
				evicted = name
				held++
				f.awaitEvent(name, "Preempted", "Preempted by pod")
				f.createMembers(gang, 2, i, i+1, card, cpu(20), onSeparateNodes(gang))
			}
		}
		if evicted == "" {
			t.Errorf("round %d: no member was evicted: the test shows nothing", round)
		}
		if n := f.metric(`gpushare_extender_gang_failures_total{reason="deleted"}`) - deleted; n < 1 {
			t.Errorf("round %d: the plan wasn't dropped for the deleted member", round)
		}

		f.deletePods(first)
		another := fmt.Sprintf("%s-more-%d", f.namespace, round)
		must(t, bed.CreateNodes(t.Context(), controlplane.Node{
			Name: another, Unit: gpu.GiB, Cards: controlplane.EqualCards(1, card), Labels: map[string]string{fixtureLabel: f.namespace},
		}))
		f.awaitBound(map[string]int{gang: 2})
		f.checkCards()
		f.deleteGang(gang)
		f.awaitBound(map[string]int{})
		must(t, bed.Client.CoreV1().Nodes().Delete(t.Context(), another, metav1.DeleteOptions{}))
	}
	t.Logf("%d held members were evicted; each time no member was bound then, and all of them later", held)
}
