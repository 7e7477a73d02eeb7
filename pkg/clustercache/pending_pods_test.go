package clustercache

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// TestPending checks that the handler finds the list as it is after the change.
func TestPending(t *testing.T) {
	rejected := func(message string) fake.PodEdit {
		return func(pod *corev1.Pod) {
			pod.CreationTimestamp = metav1.NewTime(begin.Add(-time.Hour))
			pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: message}}
		}
	}
	f := start(t, fake.Pod("b", 10, rejected("no room")), fake.Pod("a", 10), fake.Pod("terminating", 10, fake.Terminating(begin)),
		fake.Pod("no GPU", 0), fake.Pod("ended", 10, fake.Phase(corev1.PodFailed)), fake.Pod("bound", 10, fake.Bound("n1", 0)))
	for range 6 {
		<-f.got.pods
	}
	type entry struct{ name, message string }
	want := func(want ...entry) {
		t.Helper()
		var got []entry
		for _, pod := range f.Pending() {
			got = append(got, entry{pod.Name, pod.Pending.Message})
		}
		wantEqual(t, "pending pods", want, got, cmp.AllowUnexported(entry{}))
	}
	a := entry{"a", `scheduler "default-scheduler" has not tried it yet`}
	want(a, entry{"b", "no room"})
	if pod, ok := f.PendingPod("uid-b"); !ok || !pod.Pending.Created.Equal(begin.Add(-time.Hour)) {
		t.Errorf("%+v, %v", pod, ok)
	}
	if _, ok := f.PendingPod("uid-bound"); ok {
		t.Error("a bound pod is pending")
	}

	f.publish(fake.Pod("b", 10, rejected("no room"), fake.Nominated("n1")))
	f.want(f.got.pods, "uid-b becomes uid-b")
	want(a, entry{"b", "no room"})
	if pod, _ := f.PendingPod("uid-b"); pod.NominatedNode != "n1" || pod.Pending.NominatedNode != "n1" {
		t.Errorf("the nomination is not kept: %+v", pod)
	}
	f.publish(fake.Pod("b", 10, rejected("another reason")))
	f.want(f.got.pods, "uid-b becomes uid-b")
	want(a, entry{"b", "another reason"})
	priority := int32(7)
	f.publish(fake.Pod("b", 10, rejected("another reason"), func(pod *corev1.Pod) { pod.Spec.Priority = &priority }))
	f.want(f.got.pods, "uid-b becomes uid-b")
	want(a, entry{"b", "another reason"})
	if pod, _ := f.PendingPod("uid-b"); pod.Priority != priority {
		t.Errorf("the priority is not kept: %+v", pod)
	}
	f.publish(fake.Pod("b", 10, fake.Bound("n1", 0)))
	f.want(f.got.pods, "uid-b becomes uid-b")
	want(a)
	f.publish(fake.Pod("a", 10, func(pod *corev1.Pod) { pod.UID = "another" }))
	f.want(f.got.pods, "uid-a becomes another")
	want(a)
	if _, ok := f.PendingPod("uid-a"); ok {
		t.Error("a pod is pending that was replaced by another one with its name")
	}
	check.Must(t, f.client.CoreV1().Pods("default").Delete(t.Context(), "a", metav1.DeleteOptions{}))
	f.want(f.got.pods, "deleted another")
	want()
}

// TestPendingFor checks that the time counts from the pod's creation, or from the removal of its last gate.
func TestPendingFor(t *testing.T) {
	gates := func(names ...string) fake.PodEdit {
		return func(pod *corev1.Pod) {
			for _, name := range names {
				pod.Spec.SchedulingGates = append(pod.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: name})
			}
		}
	}
	f := start(t, fake.Pod("plain", 10), fake.Pod("gated", 10, gates("a", "b")))
	for range 2 {
		<-f.got.pods
	}
	clock := f.Clock.(*clocktesting.FakeClock)
	// A second after each change, the pods have been pending for these times.
	for _, step := range []struct {
		change        *corev1.Pod
		plain, opened time.Duration
	}{
		{fake.Pod("plain", 10, fake.Priority(7)), time.Second, time.Second},
		{fake.Pod("gated", 10, gates("b")), 2 * time.Second, 2 * time.Second},
		{fake.Pod("gated", 10), 3 * time.Second, time.Second},
		{fake.Pod("gated", 10, fake.Priority(7)), 4 * time.Second, 2 * time.Second},
		{fake.Pod("plain", 10, fake.Bound("n1", 0)), 0, 3 * time.Second},
	} {
		f.publish(step.change)
		f.want(f.got.pods, fmt.Sprintf("%s becomes %[1]s", step.change.UID))
		clock.Step(time.Second)
		if plain, opened := f.PendingFor("uid-plain"), f.PendingFor("uid-gated"); plain != step.plain || opened != step.opened {
			t.Errorf("pending for %v and %v, want %v and %v", plain, opened, step.plain, step.opened)
		}
	}
}
