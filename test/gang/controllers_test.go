package gang

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/test/framework"
)

// TestControllers: controllers that create more pods than the gang needs, or one after another.
func TestControllers(t *testing.T) {
	o := framework.Options{MemoryUnit: "GiB", ExtenderArgs: shortTimeouts}
	o.ControlPlane.ControllerManager = true
	bed := framework.StartForTest(t, o)
	f := newFixture(t, bed, 3)
	template := func(gang string, size int) corev1.PodTemplateSpec {
		pod := f.pod("", card, inGang(gang, size))
		return corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Annotations: pod.Annotations, Labels: pod.Labels}, Spec: pod.Spec}
	}
	gone := metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)}

	// Four pods at a time, of a gang of two, on three cards: two are bound together, then one more.
	job := &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Name: "many"},
		Spec:       batchv1.JobSpec{Parallelism: ptr.To[int32](4), Completions: ptr.To[int32](4), Template: template("many", 2)},
	}
	job.Spec.Template.Spec.RestartPolicy = corev1.RestartPolicyNever
	_, err := bed.Client.BatchV1().Jobs(f.namespace).Create(t.Context(), job, metav1.CreateOptions{})
	must(t, err)
	f.awaitBound(map[string]int{"many": 3})
	f.awaitRejected("many", 1, "Insufficient")
	must(t, bed.Client.BatchV1().Jobs(f.namespace).Delete(t.Context(), "many", gone))
	f.deleteGang("many")
	f.awaitBound(map[string]int{})

	// With OrderedReady, a StatefulSet creates its second pod when the first one is ready, but that waits for the
	// second one.
	for _, policy := range []appsv1.PodManagementPolicyType{appsv1.OrderedReadyPodManagement, appsv1.ParallelPodManagement} {
		set := &appsv1.StatefulSet{
			ObjectMeta: metav1.ObjectMeta{Name: "web"},
			Spec: appsv1.StatefulSetSpec{
				Replicas: ptr.To[int32](3), PodManagementPolicy: policy, Template: template("web", 3),
				Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"group": "web"}},
			},
		}
		_, err := bed.Client.AppsV1().StatefulSets(f.namespace).Create(t.Context(), set, metav1.CreateOptions{})
		must(t, err)
		if policy == appsv1.ParallelPodManagement {
			f.awaitBound(map[string]int{"web": 3})
		} else {
			f.awaitEvent("web-0", "GangIncomplete", "needs 3 members and only 1 exist")
			f.awaitBound(map[string]int{})
		}
		must(t, bed.Client.AppsV1().StatefulSets(f.namespace).Delete(t.Context(), "web", gone))
		f.deleteGang("web")
		f.awaitGone()
	}
}

// TestPolicyKeep: one member can't be bound. With --gang-failure-policy=keep the bound members stay, and that one
// follows once it can be bound.
func TestPolicyKeep(t *testing.T) {
	bed := framework.StartForTest(t, framework.Options{
		MemoryUnit: "GiB", ThroughProxy: true, ExtenderArgs: append([]string{"--gang-failure-policy=keep"}, shortTimeouts...),
	})
	f := newFixture(t, bed, 4, 4)
	const size = 6
	rounds := shortOrLong(2, 20)
	for round := range rounds {
		gang := fmt.Sprintf("g%d", round)
		never := f.rejectBinds(gang + "-2")
		f.createGang(gang, size, card)
		f.eventually("the Event GangPartial is recorded", func(ctx context.Context) error {
			list, err := f.bed.Client.CoreV1().Events(f.namespace).List(ctx, metav1.ListOptions{})
			if err != nil {
				return err
			}
			for i := range list.Items {
				if event := &list.Items[i]; event.Reason == "GangPartial" && strings.HasPrefix(event.InvolvedObject.Name, gang+"-") {
					return nil
				}
			}
			return errors.New(f.pendingReasons(ctx))
		})
		f.awaitBound(map[string]int{gang: size - 1}) // The last member, whose bind waited for the others, is placed like a single pod now.
		never.Lift()
		f.awaitBound(map[string]int{gang: size})
		f.checkCards()
		f.deleteGang(gang)
		f.awaitBound(map[string]int{})
		f.awaitNoReservations()
	}
	if n := f.metric("gpushare_extender_gang_evictions_total"); n > 0 {
		t.Errorf("%v members were evicted", n)
	}
	t.Logf("%d rounds: no member was evicted, the missing one followed", rounds)
}

// awaitGone waits until the namespace has no pods.
func (f *fixture) awaitGone() {
	f.Helper()
	f.eventually("all pods are gone", func(ctx context.Context) error {
		pods, err := f.pods(ctx)
		if err == nil && len(pods) > 0 {
			err = fmt.Errorf("%d pods exist", len(pods))
		}
		return err
	})
}
