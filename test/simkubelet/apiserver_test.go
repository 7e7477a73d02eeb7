package simkubelet

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/test/controlplane"
)

// TestLifeAgainstARealAPIServer has what the simulated kubelet writes judged by the validation of a real API server, and
// pods deleted by its rules: the other tests' API accepts anything.
func TestLifeAgainstARealAPIServer(t *testing.T) {
	plane := controlplane.StartForTest(t, controlplane.Options{WithoutScheduler: true})
	f := newFixture(t, func(o *Options) { o.Client, o.LiftNotReadyTaint = plane.Client, true })
	f.api = nil // Not the fake one.
	pods := plane.Client.CoreV1().Pods("default")
	phase := func(name string) corev1.PodPhase {
		pod, err := pods.Get(f.ctx, name, metav1.GetOptions{})
		if err != nil {
			return ""
		}
		return pod.Status.Phase
	}
	awaitPhase := func(name string, want corev1.PodPhase) {
		t.Helper()
		f.await(name+" is "+string(want), func() bool { return phase(name) == want })
	}
	allocatable := func(want int64) {
		t.Helper()
		f.await("the node shows the devices", func() bool {
			node, err := plane.Client.CoreV1().Nodes().Get(f.ctx, nodeName, metav1.GetOptions{})
			if err != nil {
				return false
			}
			quantity := node.Status.Allocatable[resourceName]
			return quantity.Value() == want && len(node.Spec.Taints) == 0
		})
	}
	create := func(pod *corev1.Pod) *corev1.Pod {
		t.Helper()
		pod.UID = ""
		for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
			for i := range containers {
				containers[i].Image = "simulated"
			}
		}
		pod.Spec.AutomountServiceAccountToken = new(false)
		created, err := pods.Create(f.ctx, pod, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return created
	}

	if err := f.kubelet.Start(f.ctx); err != nil {
		t.Fatal(err)
	}
	f.plug(&plugin{}, healthy(8))
	allocatable(8)

	whole := create(newPod("whole", initContainer("i", 2), sidecar("s", 1), app("a", 2), app("b", 1)))
	create(newPod("done", app("a", 1), annotated(AnnotationExitAfter, "1ms")))
	create(newPod("failed", app("a", 1), annotated(AnnotationExitAfter, "1ms"), annotated(AnnotationExitCode, "3")))
	create(newPod("big", app("a", 9)))
	awaitPhase("whole", corev1.PodRunning)
	awaitPhase("done", corev1.PodSucceeded)
	awaitPhase("failed", corev1.PodFailed)
	awaitPhase("big", corev1.PodFailed)
	if env := f.kubelet.Env(whole.UID, "b"); env["DEVICES"] == "" {
		t.Errorf("environment of whole/b: %v", env)
	}
	f.await("the rejection has an event", func() bool {
		events, err := plane.Client.CoreV1().Events("default").List(f.ctx, metav1.ListOptions{FieldSelector: "reason=" + reasonUnexpected})
		return err == nil && len(events.Items) == 1
	})

	// A pod that is bound, and one that is deleted, while the kubelet is away.
	create(newPod("stays", app("a", 1), annotated(AnnotationIgnoresSIGTERM, "true")))
	awaitPhase("stays", corev1.PodRunning)
	f.kubelet.Stop()
	if err := pods.Delete(f.ctx, "whole", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	create(newPod("late", app("a", 6)))
	f.clear()
	if err := f.kubelet.Start(f.ctx); err != nil {
		t.Fatal(err)
	}
	f.plug(&plugin{}, healthy(8))
	f.await("the deleted pod is gone", func() bool { return phase("whole") == "" })
	f.await("late was taken up", func() bool { return phase("late") != corev1.PodPending })

	for _, name := range []string{"stays", "done", "failed", "big", "late"} {
		if err := pods.Delete(f.ctx, name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(1))}); err != nil {
			t.Fatal(err)
		}
	}
	f.await("no pod is left, and no container", func() bool {
		list, err := pods.List(f.ctx, metav1.ListOptions{})
		return err == nil && len(list.Items) == 0 && len(f.kubelet.Containers()) == 0
	})
	if _, err := plane.Client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(f.ctx, nodeName, metav1.GetOptions{}); err != nil {
		t.Errorf("the node's lease: %v", err)
	}
}
