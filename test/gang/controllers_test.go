package gang

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
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

// TestSuspendedJobs: Jobs that a queue in front of the scheduler suspends and resumes, as kueue does. A Job that is resumed starts all or
// none of its group, also for the second time; one that is suspended gives its cards back.
func TestSuspendedJobs(t *testing.T) {
	c := controlled.Start(t)
	f := newFixture(t, c, 3)
	jobs := c.Client.BatchV1().Jobs(f.ID)
	suspend := func(name string, suspend bool) {
		t.Helper()
		patch := fmt.Appendf(nil, `{"spec":{"suspend":%t}}`, suspend)
		_, err := jobs.Patch(t.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{})
		must(t, err)
	}
	for _, name := range []string{"one", "two"} {
		pod := f.member(name, 3, 0, card).GracePeriod(0) // No kubelet confirms that it has ended.
		pod.Spec.RestartPolicy = corev1.RestartPolicyNever
		_, err := jobs.Create(t.Context(), &batchv1.Job{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: batchv1.JobSpec{Suspend: new(true), Parallelism: ptr.To[int32](3), Completions: ptr.To[int32](3), Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Annotations: pod.ObjectMeta.Annotations, Labels: pod.Labels}, Spec: pod.Spec,
			}},
		}, metav1.CreateOptions{})
		must(t, err)
	}
	suspend("one", false)
	f.waitBound(map[string]int{"one": 3})
	// The queue takes the quota back for the other Job.
	suspend("one", true)
	suspend("two", false)
	f.waitBound(map[string]int{"two": 3})
	// Quota can be free while cards aren't: two of three.
	f.Create(f.Pod("single", card).Label(framework.LabelGroup, "single"))
	suspend("two", true)
	f.waitBound(map[string]int{"single": 1})
	suspend("one", false)
	f.staysPending(3, map[string]int{"single": 1})
	f.Delete("single")
	f.waitBound(map[string]int{"one": 3})
	for _, name := range []string{"one", "two"} {
		must(t, jobs.Delete(t.Context(), name, background))
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

// TestRollout: the default rolling update of a Deployment whose pods are one group.
func TestRollout(t *testing.T) {
	c := controlled.Start(t)
	f := newFixture(t, c, 8)
	pod := f.member("serve", 4, 0, 4).GracePeriod(0)
	deployments := c.Client.AppsV1().Deployments(f.ID)
	_, err := deployments.Create(t.Context(), &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "serve"},
		Spec: appsv1.DeploymentSpec{
			Replicas: ptr.To[int32](4), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{framework.LabelGroup: "serve"}},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Annotations: pod.ObjectMeta.Annotations, Labels: pod.Labels}, Spec: pod.Spec,
			},
		},
	}, metav1.CreateOptions{})
	must(t, err)
	defer func() { must(t, deployments.Delete(context.Background(), "serve", background)) }()
	f.waitBound(map[string]int{"serve": 4})
	_, err = deployments.Patch(t.Context(), "serve", types.MergePatchType,
		[]byte(`{"spec":{"template":{"metadata":{"annotations":{"restarted":"1"}}}}}`), metav1.PatchOptions{})
	must(t, err)
	f.waitRolled("serve", 4)
}

// TestFullCards: a Deployment of three replicas has all cards. Its default rollout stays pending; one that ends old pods first finishes. When
// its node is drained, the replacement of an evicted pod waits for another card, and a PodDisruptionBudget holds the drain back until then
// (docs/user-guide.md).
func TestFullCards(t *testing.T) {
	c := controlled.Start(t)
	f := newFixture(t, c, 3)
	pod := f.Pod("", card).Label(framework.LabelGroup, "full").GracePeriod(0)
	selector := &metav1.LabelSelector{MatchLabels: map[string]string{framework.LabelGroup: "full"}}
	deployments := c.Client.AppsV1().Deployments(f.ID)
	_, err := deployments.Create(t.Context(), &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "full"},
		Spec: appsv1.DeploymentSpec{
			Replicas: ptr.To[int32](3), Selector: selector,
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: pod.Labels}, Spec: pod.Spec},
		},
	}, metav1.CreateOptions{})
	must(t, err)
	defer func() { must(t, deployments.Delete(context.Background(), "full", background)) }()
	f.waitRolled("full", 3)

	// roll changes the template, and the strategy unless it is "".
	roll := func(revision, strategy string) {
		t.Helper()
		if strategy != "" {
			strategy = `"strategy":` + strategy + `,`
		}
		_, err := deployments.Patch(t.Context(), "full", types.MergePatchType,
			fmt.Appendf(nil, `{"spec":{%s"template":{"metadata":{"annotations":{"revision":%q}}}}}`, strategy, revision), metav1.PatchOptions{})
		must(t, err)
	}
	roll("2", "")
	f.staysPending(1, map[string]int{"full": 3})
	pods, err := f.List(t.Context())
	must(t, err)
	for i := range pods {
		if isNew := pods[i].Annotations["revision"] == "2"; isNew == (pods[i].Spec.NodeName != "") {
			t.Errorf("pod %s of revision %q is on node %q", pods[i].Name, pods[i].Annotations["revision"], pods[i].Spec.NodeName)
		}
	}
	roll("3", `{"rollingUpdate":{"maxSurge":0,"maxUnavailable":1}}`)
	f.waitRolled("full", 3)
	roll("4", `{"type":"Recreate","rollingUpdate":null}`)
	f.waitRolled("full", 3)

	budgets := c.Client.PolicyV1().PodDisruptionBudgets(f.ID)
	_, err = budgets.Create(t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "full"},
		Spec:       policyv1.PodDisruptionBudgetSpec{Selector: selector, MaxUnavailable: new(intstr.FromInt32(1))},
	}, metav1.CreateOptions{})
	must(t, err)
	f.Eventually("the budget allows a disruption", func(ctx context.Context) error {
		budget, err := budgets.Get(ctx, "full", metav1.GetOptions{})
		if err == nil && budget.Status.DisruptionsAllowed != 1 {
			err = fmt.Errorf("%+v", budget.Status)
		}
		return err
	})
	_, err = c.Client.CoreV1().Nodes().Patch(t.Context(), f.NodeName("n0"), types.MergePatchType, []byte(`{"spec":{"unschedulable":true}}`), metav1.PatchOptions{})
	must(t, err)
	pods, err = f.List(t.Context())
	must(t, err)
	evict := func(i int) error {
		return f.Pods().EvictV1(t.Context(), &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: f.ID, Name: pods[i].Name}})
	}
	must(t, evict(0))
	f.staysPending(1, map[string]int{"full": 2})
	if err := evict(1); !apierrors.IsTooManyRequests(err) {
		t.Errorf("a second eviction while the replacement is pending: %v, want it held back", err)
	}
	f.AddNodes(f.node(1, 1))
	f.waitRolled("full", 3)
	f.waitBound(map[string]int{"full": 3})
	f.Eventually("the drain continues", func(context.Context) error { return evict(1) })
}

// TestDaemonSet: the pods of a DaemonSet wait for a card of their own node. A pending one holds back an update, which otherwise ends each old
// pod before its successor starts (docs/user-guide.md).
func TestDaemonSet(t *testing.T) {
	c := controlled.Start(t)
	f := newFixture(t, c, 1, 1)
	f.AddNodes(framework.MakeNode("plain"))
	f.Create(f.Pod("other", card).Label(framework.LabelGroup, "other").NodeSelector(corev1.LabelHostname, f.NodeName("n1")).GracePeriod(0))
	f.waitBound(map[string]int{"other": 1})
	pod := f.Pod("", card).Label(framework.LabelGroup, "each").GracePeriod(0)
	sets := c.Client.AppsV1().DaemonSets(f.ID)
	_, err := sets.Create(t.Context(), &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: "each"},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: pod.Labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: pod.Labels}, Spec: pod.Spec},
		},
	}, metav1.CreateOptions{})
	must(t, err)
	defer func() { must(t, sets.Delete(context.Background(), "each", background)) }()
	waitReady := func(want func(appsv1.DaemonSetStatus) bool) {
		t.Helper()
		f.Eventually("the DaemonSet's pods", func(ctx context.Context) error {
			err := f.runBound(ctx)
			set, getErr := sets.Get(ctx, "each", metav1.GetOptions{})
			if err = errors.Join(err, getErr); err == nil && (set.Status.ObservedGeneration != set.Generation || !want(set.Status)) {
				err = fmt.Errorf("%+v", set.Status)
			}
			return err
		})
	}
	// roll changes the template.
	roll := func(template string) {
		t.Helper()
		_, err := sets.Patch(t.Context(), "each", types.MergePatchType, []byte(`{"spec":{"template":`+template+`}}`), metav1.PatchOptions{})
		must(t, err)
	}
	waitReady(func(s appsv1.DaemonSetStatus) bool { return s.DesiredNumberScheduled == 3 && s.NumberAvailable == 1 })
	f.staysPending(2, map[string]int{"other": 1, "each": 1})
	was := f.onNode("n0")
	roll(`{"metadata":{"annotations":{"revision":"2"}}}`)
	waitReady(func(s appsv1.DaemonSetStatus) bool { return s.UpdatedNumberScheduled == 2 })
	f.staysPending(2, map[string]int{"other": 1, "each": 1})
	if now := f.onNode("n0"); now != was {
		t.Errorf("the update went on while pods were pending: pod %s instead of %s", now, was)
	}
	f.Delete("other")
	waitReady(func(s appsv1.DaemonSetStatus) bool { return s.NumberAvailable == 2 })
	roll(`{"spec":{"nodeSelector":{"gpushare":"true"}}}`)
	waitReady(func(s appsv1.DaemonSetStatus) bool {
		return s.DesiredNumberScheduled == 2 && s.UpdatedNumberScheduled == 2 && s.NumberAvailable == 2
	})
	if now := f.onNode("n0"); now == was {
		t.Errorf("pod %s was not updated", was)
	}
}

// onNode returns the name of the only pod on a node.
func (f *fixture) onNode(node string) (name string) {
	f.Helper()
	pods, err := f.List(f.Context())
	must(f, err)
	for i := range pods {
		if pods[i].Spec.NodeName == f.NodeName(node) {
			name += pods[i].Name
		}
	}
	return name
}

// runBound makes the bound pods run. There are no kubelets.
func (f *fixture) runBound(ctx context.Context) error {
	pods, err := f.List(ctx)
	return errors.Join(err, f.SetRunning(ctx, slices.DeleteFunc(pods, func(pod corev1.Pod) bool {
		return pod.Spec.NodeName == "" || pod.Status.Phase == corev1.PodRunning
	})...))
}

// waitRolled waits until all pods of the Deployment are of its template and run.
func (f *fixture) waitRolled(name string, replicas int32) {
	f.Helper()
	f.Eventually("the Deployment is rolled", func(ctx context.Context) error {
		err := f.runBound(ctx)
		d, getErr := f.Cluster.Client.AppsV1().Deployments(f.ID).Get(ctx, name, metav1.GetOptions{})
		if err = errors.Join(err, getErr); err != nil {
			return err
		}
		if s := d.Status; s.ObservedGeneration != d.Generation || s.UpdatedReplicas != replicas || s.AvailableReplicas != replicas || s.Replicas != replicas {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
}

// TestLastIndex: of the four pods of an indexed Job three have completed and were removed. The last pod fails, and the Job replaces it.
func TestLastIndex(t *testing.T) {
	c := controlled.Start(t)
	f := newFixture(t, c, 4)
	pod := f.member("late", 4, 0, card).GracePeriod(0)
	pod.Spec.RestartPolicy = corev1.RestartPolicyNever
	jobs := c.Client.BatchV1().Jobs(f.ID)
	_, err := jobs.Create(t.Context(), &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Name: "late"},
		Spec: batchv1.JobSpec{
			Parallelism: ptr.To[int32](4), Completions: ptr.To[int32](4), CompletionMode: ptr.To(batchv1.IndexedCompletion),
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Annotations: pod.ObjectMeta.Annotations, Labels: pod.Labels}, Spec: pod.Spec,
			},
		},
	}, metav1.CreateOptions{})
	must(t, err)
	defer func() { must(t, jobs.Delete(context.Background(), "late", background)) }()
	f.waitBound(map[string]int{"late": 4})
	pods, err := f.List(t.Context())
	must(t, err)
	for i := range pods[:3] {
		f.Patch(pods[i].Name, map[string]any{"status": map[string]any{"phase": "Succeeded"}}, "status")
	}
	f.Eventually("three indexes are completed", func(ctx context.Context) error {
		job, err := jobs.Get(ctx, "late", metav1.GetOptions{})
		if err == nil && (job.Status.Succeeded != 3 || job.Status.UncountedTerminatedPods != nil && len(job.Status.UncountedTerminatedPods.Succeeded) > 0) {
			err = fmt.Errorf("%+v", job.Status)
		}
		return err
	})
	for i := range pods[:3] {
		f.Delete(pods[i].Name)
	}
	f.Patch(pods[3].Name, map[string]any{"status": map[string]any{"phase": "Failed"}}, "status")
	f.Eventually("the replacement is bound", func(ctx context.Context) error {
		now, err := f.List(ctx)
		for i := range now {
			if now[i].UID != pods[3].UID && now[i].Spec.NodeName != "" && now[i].Status.Phase == corev1.PodPending {
				return nil
			}
		}
		return errors.Join(err, errors.New("not yet"))
	})
}
