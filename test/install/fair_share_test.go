package install

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/eviction"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/framework"
	"github.com/gpushare/gpushare/test/pages"
)

const fairSharePage = "docs/fair-share.md"

// TestFairShare follows docs/fair-share.md with the installed rights, policies and scheduler: Bob submits many pods of high
// priority, and then Alice some. They alternate and end equal. Then fair sharing is turned off, and no pod stays gated.
func TestFairShare(t *testing.T) {
	c := start(t)
	on, err := pages.Commands(fairSharePage, "Share a cluster between teams")
	must(t, err)
	off, err := pages.Commands(fairSharePage, "Turn it off")
	must(t, err)
	c.helm.run(t, "install", "gpushare", chart, "--namespace="+namespace)
	c.helm.shell(t, on[0])
	c.newNamespace("alice", nil)
	c.newNamespace("bob", nil)
	c.newNamespace("free", map[string]string{protocol.LabelFairShare: protocol.FairShareOff})
	_, err = c.Client.SchedulingV1().PriorityClasses().Create(t.Context(), &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: "high"}, Value: 1000}, metav1.CreateOptions{})
	must(t, err)
	adds := c.addsGates()
	if adds {
		c.until("the policy adds gates", func(ctx context.Context) (bool, error) {
			pod := c.fairPod("bob", "probe", 1, false).Obj()
			created, err := c.Client.CoreV1().Pods("bob").Create(ctx, pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			return err == nil && len(created.Spec.SchedulingGates) > 0, err
		})
	}
	for i := range 20 {
		c.submit(c.fairPod("bob", fmt.Sprintf("bob-%02d", i), 4, !adds).PriorityClass("high"))
	}
	for i := range 6 {
		c.submit(c.fairPod("alice", fmt.Sprintf("alice-%d", i), 4, !adds))
	}
	free := c.submit(c.fairPod("free", "free", 1, false))
	if len(free.Spec.SchedulingGates) > 0 {
		t.Errorf("a pod of a namespace that takes no part has the gates %v", free.Spec.SchedulingGates)
	}
	must(t, c.Client.CoreV1().Pods("free").Delete(t.Context(), free.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))

	c.runPlugin()
	extender := c.runExtender()
	c.giveToScheduler(extender)
	t.Run("no pod is accepted that would need no turn", c.testTurns)
	t.Run("the tenants end equal", func(t *testing.T) { c.waitShares(t, map[string]int{"alice": 4, "bob": 4}) })
	t.Run("what becomes free goes to the one that has less, also while no extender ran", func(t *testing.T) {
		must(t, extender.process.Terminate(t.Context())) // Thus it gives its Lease up, and the next one leads at once.
		c.end(t, "alice", 2)
		gated := len(c.gated(t))
		must(t, extender.process.Start(t.Context()))
		c.waitShares(t, map[string]int{"alice": 4, "bob": 4})
		if left := len(c.gated(t)); left != gated-2 {
			t.Errorf("%d gates were opened, want 2", gated-left)
		}
		c.end(t, "alice", 4) // Alice has no more pods.
		c.waitShares(t, map[string]int{"bob": 8})
	})
	t.Run("the guard", c.testGuardOfGates)
	t.Run("the policies", c.testPolicyTypes)
	c.mustHaveForbiddenNothing()

	c.submit(c.fairPod("bob", "no-room", 16, !adds))
	c.helm.shell(t, off[0])
	if adds {
		c.until("no gates are added", func(ctx context.Context) (bool, error) {
			created, err := c.Client.CoreV1().Pods("bob").Create(ctx, c.fairPod("bob", "probe", 1, false).Obj(), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			return err == nil && len(created.Spec.SchedulingGates) == 0, err
		})
	}
	if left := c.gated(t); !slices.Contains(left, "no-room") {
		t.Errorf("gated before the command: %v", left)
	}
	c.helm.shell(t, off[1])
	if left := c.gated(t); len(left) > 0 {
		t.Errorf("still gated: %v", left)
	}
}

// TestReclaim has Bob fill the cluster before Alice comes: exactly the excess of his pods is evicted, and then nothing more. Her pods have a volume:
// the extender must have the right to read it and its claim.
func TestReclaim(t *testing.T) {
	c := start(t)
	c.helm.run(t, "install", "gpushare", chart, "--namespace="+namespace, "--set=extender.fairShare.mode=reclaim",
		"--set=extender.fairShare.reclaimAfter=2s", "--set=extender.fairShare.minRuntime=1s", "--set=extender.fairShare.addGate=false")
	c.newNamespace("alice", nil)
	c.newNamespace("bob", nil)
	c.runPlugin()
	c.giveToScheduler(c.runExtender())
	for i := range 10 {
		c.submit(c.fairPod("bob", fmt.Sprintf("bob-%02d", i), 4, true))
	}
	c.waitShares(t, map[string]int{"bob": 8})
	volume := c.boundClaim("alice", "data")
	for i := range 6 {
		pod := c.fairPod("alice", fmt.Sprintf("alice-%d", i), 4, true)
		pod.Spec.Volumes = append(pod.Spec.Volumes, volume)
		c.submit(pod)
	}
	c.waitShares(t, map[string]int{"alice": 4, "bob": 4})
	c.until("the Events of the evicted pods", func(context.Context) (bool, error) {
		evicted := c.evictedFor(t, "Evicted for pod alice/alice-", ": tenant alice has 0 of its share of 16, and tenant bob has 32 of its share of 16")
		return len(evicted) == 4, nil
	})
	c.end(t, "alice", 1)
	c.waitShares(t, map[string]int{"alice": 4, "bob": 4}) // Her next pod.
	c.end(t, "bob", 1)
	c.waitShares(t, map[string]int{"alice": 4, "bob": 4}) // One that has waited since the beginning.
	time.Sleep(5 * time.Second)                           // More than reclaimAfter and minRuntime together.
	if again := c.evictedFor(t, ""); len(again) != 4 {
		t.Errorf("evicted in the end: %v", again)
	}
	c.waitShares(t, map[string]int{"alice": 4, "bob": 4})
	c.mustHaveForbiddenNothing()
}

// boundClaim creates a claim with a volume that can be used on all nodes, and returns the claim as a volume of pods.
func (c *cluster) boundClaim(namespace, name string) corev1.Volume {
	c.t.Helper()
	size := corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}
	modes := []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}
	_, err := c.Client.CoreV1().PersistentVolumes().Create(c.t.Context(), &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeSpec{
			Capacity: size, AccessModes: modes,
			PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/" + name}},
		},
	}, metav1.CreateOptions{})
	must(c.t, err)
	_, err = c.Client.CoreV1().PersistentVolumeClaims(namespace).Create(c.t.Context(), &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{"pv.kubernetes.io/bind-completed": "yes"}},
		Spec: corev1.PersistentVolumeClaimSpec{
			VolumeName: name, AccessModes: modes, StorageClassName: new(""), Resources: corev1.VolumeResourceRequirements{Requests: size},
		},
	}, metav1.CreateOptions{})
	must(c.t, err)
	return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: name}}}
}

// evictedFor returns Bob's pods with an Event of their eviction for another tenant, whose message has the texts.
func (c *cluster) evictedFor(t *testing.T, texts ...string) (names []string) {
	t.Helper()
	events, err := c.Client.CoreV1().Events("bob").List(t.Context(), metav1.ListOptions{FieldSelector: "reason=" + eviction.EventReclaimed})
	must(t, err)
	for _, e := range events.Items {
		if !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(e.Message, text) }) {
			names = append(names, e.InvolvedObject.Name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func (c *cluster) newNamespace(name string, labels map[string]string) {
	c.t.Helper()
	_, err := c.Client.CoreV1().Namespaces().Create(c.t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}, metav1.CreateOptions{})
	must(c.t, err)
	c.until("namespace "+name+" has its ServiceAccount", func(ctx context.Context) (bool, error) {
		_, err := c.Client.CoreV1().ServiceAccounts(name).Get(ctx, "default", metav1.GetOptions{})
		return err == nil, err
	})
}

// addsGates reports whether the API server has MutatingAdmissionPolicies.
func (c *cluster) addsGates() bool {
	list, err := c.Client.Discovery().ServerResourcesForGroupVersion("admissionregistration.k8s.io/v1")
	must(c.t, err)
	return slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Name == "mutatingadmissionpolicies" })
}

func (c *cluster) fairPod(namespace, name string, memory int64, gate bool) *framework.PodWrapper {
	pod := framework.MakePod(name).Namespace(namespace).GPUMem(memory)
	if gate {
		pod.FairShareGate()
	}
	return pod
}

func (c *cluster) submit(pod *framework.PodWrapper) *corev1.Pod {
	c.t.Helper()
	created, err := c.Client.CoreV1().Pods(pod.Pod.Namespace).Create(c.t.Context(), pod.Obj(), metav1.CreateOptions{})
	must(c.t, err)
	return created
}

// waitShares waits until the tenants have as many bound pods as wanted, and no more are bound.
func (c *cluster) waitShares(t *testing.T, want map[string]int) {
	t.Helper()
	c.until(fmt.Sprintf("the pods are bound: %v", want), func(ctx context.Context) (bool, error) {
		got := map[string]int{}
		for _, tenant := range []string{"alice", "bob"} {
			pods, err := c.Client.CoreV1().Pods(tenant).List(ctx, metav1.ListOptions{})
			if err != nil {
				return false, err
			}
			for i := range pods.Items {
				if pods.Items[i].Spec.NodeName != "" {
					got[tenant]++
				}
			}
		}
		if !maps.Equal(got, want) {
			return false, fmt.Errorf("bound: %v", got)
		}
		return true, nil
	})
}

// end deletes as many bound pods of the tenant.
func (c *cluster) end(t *testing.T, tenant string, n int) {
	t.Helper()
	pods, err := c.Client.CoreV1().Pods(tenant).List(t.Context(), metav1.ListOptions{})
	must(t, err)
	for i := range pods.Items {
		if n > 0 && pods.Items[i].Spec.NodeName != "" {
			must(t, c.Client.CoreV1().Pods(tenant).Delete(t.Context(), pods.Items[i].Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
			n--
		}
	}
}

// gated returns the names of the pods that have the gate.
func (c *cluster) gated(t *testing.T) (names []string) {
	t.Helper()
	pods, err := c.Client.CoreV1().Pods(metav1.NamespaceAll).List(t.Context(), metav1.ListOptions{})
	must(t, err)
	for i := range pods.Items {
		for _, gate := range pods.Items[i].Spec.SchedulingGates {
			if gate.Name == protocol.GateFairShare {
				names = append(names, pods.Items[i].Name)
			}
		}
	}
	return names
}

// testTurns creates pods that kube-scheduler or the extender would not delay.
func (c *cluster) testTurns(t *testing.T) {
	plain := func(namespace string) *framework.PodWrapper {
		return framework.MakePod("turnless").Namespace(namespace)
	}
	request := func(namespace string) *framework.PodWrapper { return plain(namespace).GPUMem(1) }
	c.untilRefused("the guard of turns", request("bob").Node("gpu-1").Obj())
	const node, class = "a pod with spec.nodeName would not wait", "a pod of the classes system-cluster-critical and system-node-critical would not wait"
	for name, test := range map[string]struct {
		pod *framework.PodWrapper
		// rejected is a part of the rejection; empty if the pod is accepted.
		rejected string
	}{
		"with a node":                             {request("bob").Node("gpu-1"), node},
		"with a node, of computing only":          {plain("bob").Cores(10).Node("gpu-1"), node},
		"with a node, of an init container":       {plain("bob").InitContainer("init", 1).Node("gpu-1"), node},
		"of the class for the cluster":            {request("bob").PriorityClass("system-cluster-critical"), class},
		"of the class for nodes":                  {request("bob").PriorityClass("system-node-critical"), class},
		"of another class":                        {request("bob").PriorityClass("high"), ""},
		"with a node, in kube-system":             {request(metav1.NamespaceSystem).Node("gpu-1"), ""},
		"of the class, in kube-system":            {request(metav1.NamespaceSystem).PriorityClass("system-cluster-critical"), ""},
		"with a node, in an exempt namespace":     {request("free").Node("gpu-1"), ""},
		"of the class, in an exempt namespace":    {request("free").PriorityClass("system-cluster-critical"), ""},
		"with a node and the class, without GPUs": {plain("bob").Node("gpu-1").PriorityClass("system-cluster-critical"), ""},
	} {
		_, err := c.Client.CoreV1().Pods(test.pod.Pod.Namespace).Create(t.Context(), test.pod.Obj(), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if test.rejected == "" && err != nil || test.rejected != "" && (!apierrors.IsForbidden(err) || !strings.Contains(err.Error(), test.rejected)) {
			t.Errorf("a pod %s: got %v, want it rejected: %q", name, err, test.rejected)
		}
	}
	c.testMirrorPod(t, nil) // Static pods, too.
}

// testGuardOfGates tries everything that a right to patch pods allows, with the extender's account: only the gate can be removed.
func (c *cluster) testGuardOfGates(t *testing.T) {
	pod := c.fairPod("bob", "guarded", 1, true)
	pod.Spec.SchedulingGates = append(pod.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: "example.com/quota"})
	c.submit(pod)
	pods := c.clientOf(c.account(c.pod("extender"))).CoreV1().Pods("bob")
	patch := func(text string) error {
		_, err := pods.Patch(t.Context(), "guarded", types.StrategicMergePatchType, []byte(text), metav1.PatchOptions{})
		return err
	}
	toleration := func(of string) string { // Every pod has these, and the API server keeps them.
		return `{"key":"node.kubernetes.io/` + of + `","operator":"Exists","effect":"NoExecute","tolerationSeconds":300}`
	}
	for what, change := range map[string]string{
		"a label":           `{"metadata":{"labels":{"app":"other"}}}`,
		"an annotation":     `{"metadata":{"annotations":{"note":"mine"}}}`,
		"a finalizer":       `{"metadata":{"finalizers":["example.com/stay"]}}`,
		"an owner":          `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Pod","name":"x","uid":"x"}]}}`,
		"a node selector":   `{"spec":{"nodeSelector":{"disk":"ssd"}}}`,
		"a toleration":      `{"spec":{"tolerations":[` + toleration("not-ready") + "," + toleration("unreachable") + `,{"operator":"Exists"}]}}`,
		"an affinity":       `{"spec":{"affinity":{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"a","operator":"Exists"}]}]}}}}}`,
		"a deadline":        `{"spec":{"activeDeadlineSeconds":5}}`,
		"an image":          `{"spec":{"containers":[{"name":"main","image":"example.com/other"}]}}`,
		"another gate":      `{"spec":{"schedulingGates":[{"$patch":"delete","name":"example.com/quota"}]}}`,
		"the gate and more": `{"metadata":{"labels":{"app":"other"}},"spec":{"schedulingGates":[{"$patch":"delete","name":"gpushare.aliyun.com/fair-share"}]}}`,
	} {
		if err := patch(change); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "the extender ") {
			t.Errorf("%s: %v, want it rejected by the guard", what, err)
		}
	}
	must(t, patch(`{"spec":{"schedulingGates":[{"$patch":"delete","name":"gpushare.aliyun.com/fair-share"}]}}`))
	live, err := pods.Get(t.Context(), "guarded", metav1.GetOptions{})
	must(t, err)
	check.Equal(t, "the gates", []corev1.PodSchedulingGate{{Name: "example.com/quota"}}, live.Spec.SchedulingGates)
	must(t, c.Client.CoreV1().Pods("bob").Delete(t.Context(), "guarded", metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
}
