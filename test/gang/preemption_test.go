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
	"github.com/gpushare/gpushare/test/testbed"
)

// cpu makes a pod ask for processors; a node has 64.
func cpu(n int64) edit {
	return func(pod *corev1.Pod) {
		pod.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: *resource.NewQuantity(n, resource.DecimalSI)}
	}
}

// apart keeps the members of a group on nodes of their own.
func apart(group string) edit {
	return func(pod *corev1.Pod) {
		pod.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{
				TopologyKey: corev1.LabelHostname, LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"group": group}},
			}},
		}}
	}
}

// TestPreempted: while one of two members is held, since the other is kept off its only node, kube-scheduler evicts it for a
// pod of higher priority. Nobody of the group is bound then and nothing stays reserved; with room for both the group is whole.
func TestPreempted(t *testing.T) {
	bed := testbed.StartForTest(t, testbed.Options{MemoryUnit: "GiB"})
	_, err := bed.Client.SchedulingV1().PriorityClasses().Create(t.Context(), &schedulingv1.PriorityClass{
		ObjectMeta: metav1.ObjectMeta{Name: "important"}, Value: 1000,
	}, metav1.CreateOptions{})
	must(t, err)
	important := func(pod *corev1.Pod) { pod.Spec.PriorityClassName = "important" }
	s := newStage(t, bed, 2)
	held := 0
	for round := range form(2, 20) {
		group, first := fmt.Sprintf("g%d", round), fmt.Sprintf("first-%d", round)
		deleted := s.metric(`gpushare_extender_gang_failures_total{reason="deleted"}`)
		s.createGroup(group, 2, card, cpu(20), apart(group))
		s.eventually("the group has its places", func(context.Context) error {
			if s.metric(`gpushare_extender_gangs{state="placed"}`) != 1 {
				return errors.New("it hasn't")
			}
			return nil
		})
		s.create(first, 0, cpu(50), important)
		s.eventually("the pod of higher priority runs", func(ctx context.Context) error {
			pod, err := bed.Client.CoreV1().Pods(s.name).Get(ctx, first, metav1.GetOptions{})
			if err == nil && pod.Spec.NodeName == "" {
				err = errors.New(said(pod))
			}
			return err
		})
		s.awaitBound(map[string]int{"": 1})
		s.nothingReserved()
		evicted := ""
		for i := range 2 {
			name := fmt.Sprintf("%s-%d", group, i)
			if _, err := bed.Client.CoreV1().Pods(s.name).Get(t.Context(), name, metav1.GetOptions{}); apierrors.IsNotFound(err) {
				evicted = name
				held++
				s.event(name, "Preempted", "Preempted by pod")
				s.createMembers(group, 2, i, i+1, card, cpu(20), apart(group))
			}
		}
		if evicted == "" {
			t.Errorf("round %d: no member was evicted: then this shows nothing", round)
		}
		if n := s.metric(`gpushare_extender_gang_failures_total{reason="deleted"}`) - deleted; n < 1 {
			t.Errorf("round %d: the group's places weren't given up for the member that was deleted", round)
		}

		s.remove(first)
		another := fmt.Sprintf("%s-more-%d", s.name, round)
		must(t, bed.CreateNodes(t.Context(), controlplane.Node{
			Name: another, Unit: gpu.GiB, Cards: controlplane.EqualCards(1, card), Labels: map[string]string{stageLabel: s.name},
		}))
		s.awaitBound(map[string]int{group: 2})
		s.checkCards()
		s.removeGroup(group)
		s.awaitBound(map[string]int{})
		must(t, bed.Client.CoreV1().Nodes().Delete(t.Context(), another, metav1.DeleteOptions{}))
	}
	t.Logf("%d held members were evicted; each time nobody of the group was bound, and all of it later", held)
}
