package gang

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// background makes the garbage collector delete the pods of a deleted controller.
var background = metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)}

// TestControllers covers controllers that create more pods than the gang needs, or one after another.
func TestControllers(t *testing.T) {
	c := controlled.Start(t)
	f := newFixture(t, c, 3)
	template := func(gang string, size int) corev1.PodTemplateSpec {
		pod := f.member(gang, size, 0, card)
		return corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Annotations: pod.ObjectMeta.Annotations, Labels: pod.Labels}, Spec: pod.Spec}
	}

	// Four pods at a time, of a gang of two, on three cards: two are bound together, then one more.
	job := &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Name: "many"},
		Spec:       batchv1.JobSpec{Parallelism: ptr.To[int32](4), Completions: ptr.To[int32](4), Template: template("many", 2)},
	}
	job.Spec.Template.Spec.RestartPolicy = corev1.RestartPolicyNever
	_, err := c.Client.BatchV1().Jobs(f.ID).Create(t.Context(), job, metav1.CreateOptions{})
	must(t, err)
	f.waitBound(map[string]int{"many": 3})
	f.waitRejected("many", 1, "Insufficient")
	must(t, c.Client.BatchV1().Jobs(f.ID).Delete(t.Context(), "many", background))
	f.endGang("many")

	// With OrderedReady, a StatefulSet creates its second pod when the first one is ready, but that one waits for the second.
	for _, policy := range []appsv1.PodManagementPolicyType{appsv1.OrderedReadyPodManagement, appsv1.ParallelPodManagement} {
		set := &appsv1.StatefulSet{
			ObjectMeta: metav1.ObjectMeta{Name: "web"},
			Spec: appsv1.StatefulSetSpec{
				Replicas: ptr.To[int32](3), PodManagementPolicy: policy, Template: template("web", 3),
				Selector: &metav1.LabelSelector{MatchLabels: map[string]string{framework.LabelGroup: "web"}},
			},
		}
		_, err := c.Client.AppsV1().StatefulSets(f.ID).Create(t.Context(), set, metav1.CreateOptions{})
		must(t, err)
		if policy == appsv1.ParallelPodManagement {
			f.waitBound(map[string]int{"web": 3})
		} else {
			f.WaitEvent("web-0", "GangIncomplete", "1 of 3 members exist; a StatefulSet creates all pods at once only with podManagementPolicy Parallel")
			f.waitBound(map[string]int{})
		}
		must(t, c.Client.AppsV1().StatefulSets(f.ID).Delete(t.Context(), "web", background))
		must(t, f.DeleteAll(t.Context()))
	}
}

// TestSample runs the Job of the documentation: its four workers wait for a fourth card and are bound together, and a failed
// one is replaced without the others.
func TestSample(t *testing.T) {
	c := controlled.Start(t)
	root := controlplane.Repository(t)
	f := &fixture{c.DefaultNamespace(t)}
	groups := func(columns ...string) {
		t.Helper()
		f.Eventually(fmt.Sprintf("kubectl inspect gpushare --groups prints %q", columns), func(ctx context.Context) error {
			out, err := exec.CommandContext(ctx, c.Binary("kubectl-inspect-gpushare"), "--kubeconfig="+c.KubeconfigPath, "--groups").CombinedOutput()
			if got := strings.Join(strings.Fields(string(out)), " "); err != nil || !strings.Contains(got, strings.Join(columns, " ")) {
				return fmt.Errorf("it prints %s (%w)", out, err)
			}
			return nil
		})
	}
	f.AddNodes(framework.MakeNode("three-cards").Unit(gpu.GiB).Cards(3, card))
	must(t, c.Apply(t.Context(), filepath.Join(root, "deploy", "samples", "gang.yaml")))
	groups("default", "train", "4", "4", "0", "Pending")
	groups("there is no room for all members at once")
	f.waitBound(map[string]int{})

	f.AddNodes(framework.MakeNode("another-card").Unit(gpu.GiB).Cards(1, card))
	groups("default", "train", "4", "4", "4", "Running")
	pods, err := f.List(t.Context())
	must(t, err)
	// The oldest pod, in the extender's order.
	first := slices.MinFunc(pods, func(a, b corev1.Pod) int {
		if order := a.CreationTimestamp.Compare(b.CreationTimestamp.Time); order != 0 {
			return order
		}
		return strings.Compare(a.Name, b.Name)
	}).Name
	f.WaitEvent(first, "GangBound", "All members of the group are bound")

	f.Delete(first)
	groups("default", "train", "4", "4", "4", "Running")
	f.waitBound(map[string]int{"": 4}) // The Job's pods have no label "group".
	must(t, c.Client.BatchV1().Jobs(f.ID).Delete(t.Context(), "train", background))
}
