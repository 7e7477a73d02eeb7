package install

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// testGuard tries to forge annotations by every request that can change a pod. plugin is the device plugin's pod.
func (c *cluster) testGuard(t *testing.T, plugin *corev1.Pod) {
	ctx := t.Context()
	pods := c.Client.CoreV1().Pods(metav1.NamespaceDefault)
	forged := map[string]string{protocol.AnnotationIndex: "1"}
	patch := func(annotations map[string]any) []byte {
		data, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": annotations}})
		must(t, err)
		return data
	}
	probe := gpuPod("probe", "none", 1)
	probe.Annotations = forged
	c.untilRefused("the guard", probe)
	victim := c.create(t, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "victim"}})
	running, err := pods.Get(ctx, "first", metav1.GetOptions{})
	must(t, err)

	refused := map[string]func() error{
		"a pod with the annotation of a mirror pod": func() error {
			pod := gpuPod("forged", "", 1)
			pod.Annotations = map[string]string{protocol.AnnotationIndex: "1", corev1.MirrorPodAnnotationKey: "x"}
			pod.Spec.NodeName = node
			_, err := pods.Create(ctx, pod, metav1.CreateOptions{})
			return err
		},
		"a patch that adds one": func() error {
			_, err := pods.Patch(ctx, victim.Name, types.MergePatchType, patch(map[string]any{protocol.AnnotationIndex: "0"}), metav1.PatchOptions{})
			return err
		},
		"a patch that changes one": func() error {
			_, err := pods.Patch(ctx, running.Name, types.MergePatchType, patch(map[string]any{protocol.AnnotationIndex: "7"}), metav1.PatchOptions{})
			return err
		},
		"a patch that removes one": func() error {
			_, err := pods.Patch(ctx, running.Name, types.MergePatchType, patch(map[string]any{protocol.AnnotationAssigned: nil}), metav1.PatchOptions{})
			return err
		},
		"server-side apply": func() error {
			data := []byte(`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"` + victim.Name + `","annotations":{"ALIYUN_COM_GPU_MEM_POD":"1"}}}`)
			_, err := pods.Patch(ctx, victim.Name, types.ApplyPatchType, data, metav1.PatchOptions{FieldManager: "forger", Force: new(true)})
			return err
		},
		"an update": func() error {
			pod := running.DeepCopy()
			pod.ResourceVersion = ""
			delete(pod.Annotations, protocol.AnnotationIndex)
			_, err := pods.Update(ctx, pod, metav1.UpdateOptions{})
			return err
		},
		"an update of the status": func() error {
			_, err := pods.Patch(ctx, running.Name, types.MergePatchType, patch(map[string]any{protocol.AnnotationIndex: "7"}), metav1.PatchOptions{}, "status")
			return err
		},
		"a Binding": func() error {
			return pods.Bind(ctx, c.binding(victim, forged), metav1.CreateOptions{})
		},
		"a Binding by the older path": func() error {
			return c.Client.CoreV1().RESTClient().Post().Namespace(victim.Namespace).Resource("bindings").
				Body(c.binding(victim, forged)).Do(ctx).Error()
		},
	}
	for name, annotations := range map[string]map[string]string{
		"annotations":                     forged,
		"another scheduler's annotation":  {protocol.AnnotationAllocation: "{}"},
		"the annotation of a whole group": {protocol.AnnotationGroupWhole: "true"},
		"the annotation of a group's run": {protocol.AnnotationGroupRun: "uid"},
		"the annotation of limits":        {protocol.AnnotationIsolation: "driver"},
		"the annotation of use":           {protocol.AnnotationOveruse: "{}"},
		"the annotation of lost cards":    {protocol.AnnotationLostCards: "GPU-0"},
	} {
		refused["a pod with "+name] = func() error {
			pod := gpuPod("forged", "", 1)
			pod.Annotations = annotations
			_, err := pods.Create(ctx, pod, metav1.CreateOptions{})
			return err
		}
	}
	for name, try := range refused {
		t.Run("rejects "+name, func(t *testing.T) {
			err := try()
			if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "say which GPU card and group a pod has") {
				t.Errorf("got %v, want it rejected with the reason", err)
			}
		})
	}
	t.Run("the label for adapters is fixed once the pod has a node", c.testGuardAdapters)
	// The API server itself accepts only the spec from these two.
	for _, subresource := range []string{"ephemeralcontainers", "resize"} {
		data := patch(map[string]any{protocol.AnnotationIndex: "7"})
		if _, err := pods.Patch(ctx, running.Name, types.MergePatchType, data, metav1.PatchOptions{}, subresource); err != nil && !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) {
			t.Errorf("%s: %v", subresource, err)
		}
	}
	now, err := pods.Get(ctx, running.Name, metav1.GetOptions{})
	must(t, err)
	if now.Annotations[protocol.AnnotationIndex] != running.Annotations[protocol.AnnotationIndex] {
		t.Error("an annotation has changed")
	}

	t.Run("accepts everything else", func(t *testing.T) {
		_, err := pods.Patch(ctx, running.Name, types.MergePatchType, patch(map[string]any{"note": "mine"}), metav1.PatchOptions{})
		must(t, err)
		must(t, pods.Bind(ctx, c.binding(victim, map[string]string{"note": "mine"}), metav1.CreateOptions{}))
		must(t, pods.Delete(ctx, victim.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
	})

	t.Run("its policies fit the types of the API", c.testPolicyTypes)
	t.Run("a Deployment with a forged template has the reason in its status", func(t *testing.T) { c.testForgedTemplate(t, forged) })
	t.Run("a kubelet creates mirror pods", func(t *testing.T) { c.testMirrorPod(t, forged) })
	t.Run("a pod's environment names no card", func(t *testing.T) { c.testEnvironment(t, running) })
	t.Run("kubectl debug gets no card of the pod", func(t *testing.T) { c.testDebug(t, running) })
	t.Run("a request is a number of units", c.testQuantities)
	t.Run("a pod isn't too large", c.testLargePods)
	t.Run("a device plugin changes only its node", func(t *testing.T) { c.testPluginsReach(t, plugin, patch) })
	t.Run("the extender changes only the nominated node of a status", c.testExtendersReach)
	t.Run("the extender's Bindings have only its annotations", c.testExtendersBindings)
	t.Run("the extender writes only its own EndpointSlice", c.testExtendersSlices)
	t.Run("the list of allowed users", func(t *testing.T) {
		c.helm.run(t, "upgrade", "gpushare", chart, "--namespace="+namespace, "--reset-then-reuse-values",
			"--set=guard.allow.users[0]=restorer,guard.allow.serviceAccounts[0]=velero/velero,guard.allow.groups[0]=restorers,guard.allow.bindingKeys[0]=example.com/rack")
		for name, client := range map[string]kubernetes.Interface{
			"user":            c.user(t, "restorer", "system:masters"),
			"service-account": c.user(t, "system:serviceaccount:velero:velero", "system:masters"),
			"group":           c.user(t, "other", "system:masters", "restorers"),
		} {
			// The API server needs a moment to load the new policy.
			c.until("the policy allows a "+name, func(ctx context.Context) (bool, error) {
				pod := gpuPod("restored-"+name, "none", 1)
				pod.Annotations = forged
				_, err := client.CoreV1().Pods(metav1.NamespaceDefault).Create(ctx, pod, metav1.CreateOptions{})
				return err == nil, err
			})
			must(t, pods.Delete(ctx, "restored-"+name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
		}
		other := c.user(t, "system:serviceaccount:velero:other", "system:masters")
		pod := gpuPod("restored", "none", 1)
		pod.Annotations = forged
		if _, err := other.CoreV1().Pods(metav1.NamespaceDefault).Create(ctx, pod, metav1.CreateOptions{}); !apierrors.IsForbidden(err) {
			t.Errorf("a user that isn't on it: got %v, want it rejected", err)
		}
		// As a webhook changes the extender's Bindings.
		bound := c.create(t, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "with-rack"}})
		binding := c.binding(bound, map[string]string{protocol.AnnotationIndex: "0", "example.com/rack": "r"})
		binding.Labels = map[string]string{"example.com/rack": "r"}
		extender := c.clientOf(c.account(c.pod("extender")))
		c.until("the policy allows the key in Bindings", func(ctx context.Context) (bool, error) {
			err := extender.CoreV1().Pods(bound.Namespace).Bind(ctx, binding, metav1.CreateOptions{})
			return err == nil, err
		})
		must(t, pods.Delete(ctx, bound.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
		c.helm.run(t, "rollback", "gpushare", "1", "--namespace="+namespace)
	})
}

// untilRefused waits until a policy is in force. The API server loads policies once per second.
func (c *cluster) untilRefused(policy string, pod *corev1.Pod) {
	c.t.Helper()
	c.until(policy+" is in force", func(ctx context.Context) (bool, error) {
		_, err := c.Client.CoreV1().Pods(pod.Namespace).Create(ctx, pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return apierrors.IsForbidden(err) || apierrors.IsInvalid(err), nil
	})
}

// create creates a pod that requests no GPU memory and that no scheduler handles.
func (c *cluster) create(t *testing.T, pod *corev1.Pod) *corev1.Pod {
	t.Helper()
	if pod.Namespace == "" {
		pod.Namespace = metav1.NamespaceDefault
	}
	if pod.Spec.NodeName == "" {
		pod.Spec.SchedulerName = "none"
	}
	pod.Spec.Containers = []corev1.Container{{Name: "main", Image: "example.com/none"}}
	pod, err := c.Client.CoreV1().Pods(pod.Namespace).Create(t.Context(), pod, metav1.CreateOptions{})
	must(t, err)
	return pod
}

func (c *cluster) binding(pod *corev1.Pod, annotations map[string]string) *corev1.Binding {
	return &corev1.Binding{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Binding"},
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, Annotations: annotations},
		Target:     corev1.ObjectReference{Kind: "Node", Name: node},
	}
}

func (c *cluster) user(t *testing.T, name string, groups ...string) kubernetes.Interface {
	t.Helper()
	path, err := c.Kubeconfig(name, groups...)
	must(t, err)
	return c.clientOf(path)
}

func (c *cluster) testForgedTemplate(t *testing.T, forged map[string]string) {
	deployments := c.Client.AppsV1().Deployments(metav1.NamespaceDefault)
	match := map[string]string{"app": "forged"}
	_, err := deployments.Create(t.Context(), &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "forged"},
		Spec: appsv1.DeploymentSpec{
			Selector: &metav1.LabelSelector{MatchLabels: match},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: match, Annotations: forged},
				Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "example.com/none"}}},
			},
		},
	}, metav1.CreateOptions{})
	must(t, err)
	c.until("the Deployment has the reason", func(ctx context.Context) (bool, error) {
		d, err := deployments.Get(ctx, "forged", metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		for _, condition := range d.Status.Conditions {
			if condition.Type == appsv1.DeploymentReplicaFailure && strings.Contains(condition.Message, "leave them out of the pod and of the template") {
				return true, nil
			}
		}
		return false, nil
	})
	must(t, deployments.Delete(t.Context(), "forged", metav1.DeleteOptions{}))
}

// testMirrorPod: a kubelet may create the mirror pod of a static pod. NodeRestriction limits it to its own node.
func (c *cluster) testMirrorPod(t *testing.T, annotations map[string]string) {
	const host = "static" // not the simulated kubelet's node: it deletes mirror pods that it doesn't know
	kubelet := c.user(t, "system:node:"+host, "system:nodes")
	object, err := c.Client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: host}}, metav1.CreateOptions{})
	must(t, err)
	mirror := func(name string) *corev1.Pod {
		pod := gpuPod(name, "", 1)
		pod.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x", "kubernetes.io/config.source": "file"}
		maps.Copy(pod.Annotations, annotations)
		pod.Spec.NodeName = host
		pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: host, UID: object.UID, Controller: new(true)}}
		return pod
	}
	pods := kubelet.CoreV1().Pods(metav1.NamespaceDefault)
	_, err = pods.Create(t.Context(), mirror("static"), metav1.CreateOptions{})
	must(t, err)
	data := []byte(`{"metadata":{"annotations":{"ALIYUN_COM_GPU_MEM_IDX":"7"}}}`)
	if _, err := pods.Patch(t.Context(), "static", types.MergePatchType, data, metav1.PatchOptions{}, "status"); !apierrors.IsForbidden(err) {
		t.Errorf("changing it later: got %v, want forbidden", err)
	}
	must(t, c.Client.CoreV1().Pods(metav1.NamespaceDefault).Delete(t.Context(), "static", metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
	must(t, c.Client.CoreV1().Nodes().Delete(t.Context(), host, metav1.DeleteOptions{}))
}

// testPluginsReach uses the plugin's own token for requests that the plugin itself never makes.
func (c *cluster) testPluginsReach(t *testing.T, plugin *corev1.Pod, patch func(map[string]any) []byte) {
	ctx := t.Context()
	other := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "other"}}
	_, err := c.Client.CoreV1().Nodes().Create(ctx, other, metav1.CreateOptions{})
	must(t, err)
	theirs := c.create(t, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "theirs"}, Spec: corev1.PodSpec{NodeName: "other"}})
	mine := c.create(t, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "mine"}, Spec: corev1.PodSpec{NodeName: node}})

	bound := c.clientOf(c.account(plugin))
	path, err := c.ServiceAccountKubeconfig(ctx, namespace, "gpushare-device-plugin")
	must(t, err)
	unbound := c.clientOf(path)

	card := patch(map[string]any{protocol.AnnotationIndex: "0"})
	inventory := patch(map[string]any{"gpushare.aliyun.com/test": "1"})
	pod := func(client kubernetes.Interface, name string, data []byte) error {
		_, err := client.CoreV1().Pods(metav1.NamespaceDefault).Patch(ctx, name, types.StrategicMergePatchType, data, metav1.PatchOptions{})
		return err
	}
	onNode := func(client kubernetes.Interface, name string, data []byte, subresources ...string) error {
		_, err := client.CoreV1().Nodes().Patch(ctx, name, types.StrategicMergePatchType, data, metav1.PatchOptions{}, subresources...)
		return err
	}
	count := []byte(`{"status":{"capacity":{"aliyun.com/gpu-count":"2","aliyun.com/gpu-core.percentage":"200"},
		"allocatable":{"aliyun.com/gpu-count":"2","aliyun.com/gpu-core.percentage":"200"}}}`)

	must(t, pod(bound, mine.Name, card))
	must(t, pod(bound, mine.Name, patch(map[string]any{protocol.AnnotationAllocation: `{"0":{"0":1,"1":1}}`})))
	must(t, pod(bound, mine.Name, patch(map[string]any{protocol.AnnotationIsolation: "driver"})))
	must(t, pod(bound, mine.Name, patch(map[string]any{protocol.AnnotationIsolation: nil})))
	must(t, pod(bound, mine.Name, patch(map[string]any{protocol.AnnotationOveruse: "{}"})))
	must(t, pod(bound, mine.Name, patch(map[string]any{protocol.AnnotationLostCards: "GPU-0"})))
	must(t, onNode(bound, node, inventory, "status"))
	must(t, onNode(bound, node, count, "status"))
	must(t, onNode(bound, node, patch(map[string]any{"gpushare.aliyun.com/test": nil}), "status"))

	extender := c.clientOf(c.account(c.pod("extender")))
	must(t, onNode(extender, "other", patch(map[string]any{protocol.AnnotationFreed: "1"})))

	for name, test := range map[string]struct {
		err  error
		want string
	}{
		"a pod of another node":            {pod(bound, theirs.Name, card), `"gpu-1" changes no pod of node "other"`},
		"a pod, with a token of no pod":    {pod(unbound, mine.Name, card), `node "" changes no pod of node "gpu-1"`},
		"another node":                     {onNode(bound, "other", inventory, "status"), `changes no node but its own, not "other"`},
		"another node's cards":             {onNode(bound, "other", count, "status"), `changes no node but its own, not "other"`},
		"a node, with a token of no pod":   {onNode(unbound, node, inventory, "status"), `changes no node but its own`},
		"a pod's labels":                   {pod(bound, mine.Name, []byte(`{"metadata":{"labels":{"app":"stolen"}}}`)), "nothing of a pod but its annotations"},
		"a pod's image":                    {pod(bound, mine.Name, []byte(`{"spec":{"containers":[{"name":"main","image":"example.com/evil"}]}}`)), "nothing of a pod but its annotations"},
		"a pod's other annotations":        {pod(bound, mine.Name, patch(map[string]any{"note": "theirs"})), "nothing of a pod but its annotations"},
		"a node's taints":                  {onNode(bound, node, []byte(`{"spec":{"unschedulable":true}}`)), `cannot patch resource "nodes"`},
		"a node's other annotations":       {onNode(bound, node, patch(map[string]any{"note": "theirs"}), "status"), "nothing of a node but its annotations"},
		"a node's labels":                  {onNode(bound, node, []byte(`{"metadata":{"labels":{"zone":"mine"}}}`), "status"), "nothing of a node but its annotations"},
		"a node's taints, by the extender": {onNode(extender, "other", []byte(`{"spec":{"unschedulable":true}}`)), "nothing of a node but its annotations"},
	} {
		if !apierrors.IsForbidden(test.err) || !strings.Contains(test.err.Error(), test.want) {
			t.Errorf("%s: got %v, want it rejected: %s", name, test.err, test.want)
		}
	}
	tooMany := strings.ReplaceAll(string(count), `gpu-count":"2"`, `gpu-count":"257"`)
	if err := onNode(bound, node, []byte(tooMany), "status"); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "at most 256 cards") {
		t.Errorf("257 cards: got %v, want it rejected", err)
	}
	// Neither account can cause the deletion of a node, redirect its traffic, or change its resources.
	for what, test := range map[string]struct{ patch, subresource string }{
		"an owner":                {`{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Node","name":"gone","uid":"1"}]}}`, ""},
		"an owner, by the status": {`{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Node","name":"gone","uid":"1"}]}}`, "status"},
		"a finalizer":             {`{"metadata":{"finalizers":["example.com/stays"]}}`, ""},
		"an address":              {`{"status":{"addresses":[{"type":"InternalIP","address":"192.0.2.66"}]}}`, "status"},
		"the kubelet's port":      {`{"status":{"daemonEndpoints":{"kubeletEndpoint":{"Port":4444}}}}`, "status"},
		"a condition":             {`{"status":{"conditions":[{"type":"Ready","status":"False","reason":"Forged"}]}}`, "status"},
		"node information":        {`{"status":{"nodeInfo":{"kubeletVersion":"v9"}}}`, "status"},
		"a volume":                {`{"status":{"volumesAttached":[{"name":"forged","devicePath":"/dev/sda"}]}}`, "status"},
		"an image":                {`{"status":{"images":[{"names":["example.com/forged"],"sizeBytes":1}]}}`, "status"},
		"another capacity":        {`{"status":{"capacity":{"nvidia.com/gpu":"8"}}}`, "status"},
		"another allocatable":     {`{"status":{"allocatable":{"cpu":"9999"}}}`, "status"},
		"a capacity less":         {`{"status":{"capacity":{"aliyun.com/gpu-mem":null}}}`, "status"},
	} {
		// The device plugin may patch only a node's status, the extender only the rest.
		client, who, name := bound, "the device plugin", node
		if test.subresource == "" {
			client, who, name = extender, "the extender", "other"
		}
		err := onNode(client, name, []byte(test.patch), strings.Fields(test.subresource)...)
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "nothing of a node but its annotations") {
			t.Errorf("%s, by %s: got %v, want it rejected", what, who, err)
		}
	}
	must(t, onNode(bound, node, []byte(`{"status":{"capacity":{"aliyun.com/gpu-count":null},"allocatable":{"aliyun.com/gpu-count":null}}}`), "status"))
	must(t, onNode(bound, node, count, "status"))
	must(t, c.Client.CoreV1().Pods(metav1.NamespaceDefault).Delete(ctx, "mine", metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
	must(t, c.Client.CoreV1().Pods(metav1.NamespaceDefault).Delete(ctx, "theirs", metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
	must(t, c.Client.CoreV1().Nodes().Delete(ctx, "other", metav1.DeleteOptions{}))
}

// testExtendersReach uses the extender's own token for changes of the status of pods that the extender itself never makes.
func (c *cluster) testExtendersReach(t *testing.T) {
	ctx := t.Context()
	pods := c.Client.CoreV1().Pods(metav1.NamespaceDefault)
	_, err := pods.Create(ctx, gpuPod("queued", "none", 1), metav1.CreateOptions{})
	must(t, err)
	c.create(t, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "plain"}})
	extender := c.clientOf(c.account(c.pod("extender"))).CoreV1().Pods(metav1.NamespaceDefault)
	status := func(pod, patch string) error {
		_, err := extender.Patch(ctx, pod, types.MergePatchType, []byte(patch), metav1.PatchOptions{}, "status")
		return err
	}
	must(t, status("queued", `{"status":{"nominatedNodeName":"gpu-1"}}`))
	for name, test := range map[string]struct{ pod, patch, want string }{
		"another node":            {"queued", `{"status":{"nominatedNodeName":"gpu-2"}}`, "nominates no pod that is nominated already"},
		"a condition":             {"queued", `{"status":{"conditions":[{"type":"Ready","status":"True"}]}}`, "nothing of a pod's status but the nominated node"},
		"the phase":               {"queued", `{"status":{"phase":"Failed"}}`, "nothing of a pod's status but the nominated node"},
		"an annotation":           {"queued", `{"metadata":{"annotations":{"note":"mine"}}}`, "nothing of a pod's status but the nominated node"},
		"a pod without a request": {"plain", `{"status":{"nominatedNodeName":"gpu-1"}}`, "nothing of a pod's status but the nominated node"},
	} {
		if err := status(test.pod, test.patch); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want it rejected: %s", name, err, test.want)
		}
	}
	must(t, status("queued", `{"status":{"nominatedNodeName":null}}`))
	for _, name := range []string{"queued", "plain"} {
		must(t, pods.Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
	}
}

// testExtendersBindings uses the extender's own token for Bindings that the extender itself never makes.
func (c *cluster) testExtendersBindings(t *testing.T) {
	ctx := t.Context()
	client := c.clientOf(c.account(c.pod("extender"))).CoreV1()
	bind := map[string]func(*corev1.Binding) error{
		"the pod's subresource": func(b *corev1.Binding) error {
			return client.Pods(b.Namespace).Bind(ctx, b, metav1.CreateOptions{})
		},
		"the older path": func(b *corev1.Binding) error {
			return client.RESTClient().Post().Namespace(b.Namespace).Resource("bindings").Body(b).Do(ctx).Error()
		},
	}
	pod := c.create(t, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "to-bind"}})
	for name, change := range map[string]func(*corev1.Binding){
		"a CDI device": func(b *corev1.Binding) { b.Annotations["cdi.k8s.io/forged"] = "nvidia.com/gpu=all" },
		"a profile": func(b *corev1.Binding) {
			b.Annotations[corev1.DeprecatedAppArmorBetaContainerAnnotationKeyPrefix+"main"] = "unconfined"
		},
		"the plugin's own key": func(b *corev1.Binding) { b.Annotations[protocol.AnnotationIsolation] = "driver" },
		"a label":              func(b *corev1.Binding) { b.Labels = map[string]string{"app": "database"} },
	} {
		for path, bind := range bind {
			binding := c.binding(pod, map[string]string{protocol.AnnotationIndex: "0"})
			change(binding)
			err := bind(binding)
			// The role doesn't contain the older path at all.
			if !apierrors.IsForbidden(err) || path == "the pod's subresource" && !strings.Contains(err.Error(), "the extender's Bindings have no labels") {
				t.Errorf("%s, by %s: got %v, want it rejected with the reason", name, path, err)
			}
		}
	}
	// The API server adds the labels of the node's zone to a Binding.
	_, err := c.Client.CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, []byte(`{"metadata":{"labels":{"topology.kubernetes.io/zone":"z"}}}`), metav1.PatchOptions{})
	must(t, err)
	must(t, bind["the pod's subresource"](c.binding(pod, map[string]string{
		protocol.AnnotationIndex: "0", protocol.AnnotationAllocation: "{}", protocol.AnnotationGroupRun: "uid", protocol.AnnotationGroupWhole: "true",
	})))
	must(t, c.Client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
}

// testExtendersSlices uses the extender's own token for EndpointSlices that would redirect another Service.
func (c *cluster) testExtendersSlices(t *testing.T) {
	ctx := t.Context()
	slices := c.clientOf(c.account(c.pod("extender"))).DiscoveryV1().EndpointSlices(namespace)
	own, err := slices.Get(ctx, "gpushare-extender", metav1.GetOptions{})
	must(t, err)
	for name, change := range map[string]func(*discoveryv1.EndpointSlice){
		"of another Service":  func(s *discoveryv1.EndpointSlice) { s.Labels[discoveryv1.LabelServiceName] = "kube-dns" },
		"of no Service":       func(s *discoveryv1.EndpointSlice) { delete(s.Labels, discoveryv1.LabelServiceName) },
		"without labels":      func(s *discoveryv1.EndpointSlice) { s.Labels = nil },
		"with another owner":  func(s *discoveryv1.EndpointSlice) { s.OwnerReferences[0].Name = "kube-dns" },
		"with an owning Node": func(s *discoveryv1.EndpointSlice) { s.OwnerReferences[0].Kind = "Node" },
		"with a second owner": func(s *discoveryv1.EndpointSlice) {
			s.OwnerReferences = append(s.OwnerReferences, metav1.OwnerReference{APIVersion: "v1", Kind: "Service", Name: "kube-dns", UID: "x"})
		},
	} {
		forged := own.DeepCopy()
		change(forged)
		_, err := slices.Update(ctx, forged, metav1.UpdateOptions{})
		mustBeItsOwnSlice(t, "its own slice, "+name, err)
		forged.ResourceVersion = ""
		_, err = slices.Create(ctx, forged, metav1.CreateOptions{})
		mustBeItsOwnSlice(t, "a new slice of its name, "+name, err)
	}
	for _, create := range []func(*discoveryv1.EndpointSlice){
		func(s *discoveryv1.EndpointSlice) { s.Name = "kube-dns-1" },
		func(s *discoveryv1.EndpointSlice) { s.Name, s.GenerateName = "", "gpushare-extender" },
	} {
		forged := own.DeepCopy()
		forged.ResourceVersion = ""
		create(forged)
		_, err := slices.Create(ctx, forged, metav1.CreateOptions{})
		mustBeItsOwnSlice(t, "a slice of another name", err)
	}
}

func mustBeItsOwnSlice(t *testing.T, what string, err error) {
	t.Helper()
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "the extender writes no EndpointSlice but gpushare-extender") {
		t.Errorf("%s: got %v, want it rejected with the reason", what, err)
	}
}

// testPolicyTypes waits for the result of kube-controller-manager's type check of the policies.
func (c *cluster) testPolicyTypes(t *testing.T) {
	c.until("all policies are checked", func(ctx context.Context) (bool, error) {
		list, err := c.Client.AdmissionregistrationV1().ValidatingAdmissionPolicies().List(ctx, metav1.ListOptions{LabelSelector: ours})
		if err != nil {
			return false, err
		}
		for _, policy := range list.Items {
			if policy.Status.ObservedGeneration != policy.Generation {
				return false, nil
			}
			if checked := policy.Status.TypeChecking; checked != nil && len(checked.ExpressionWarnings) > 0 {
				t.Errorf("%s: %v", policy.Name, checked.ExpressionWarnings)
			}
		}
		return len(list.Items) > 0, nil
	})
}

// testEnvironment sets NVIDIA_VISIBLE_DEVICES in every kind of container. running is a pod that requests GPU memory.
func (c *cluster) testEnvironment(t *testing.T, running *corev1.Pod) {
	ctx := t.Context()
	pods := c.Client.CoreV1().Pods(metav1.NamespaceDefault)
	visible := func(value string) []corev1.EnvVar {
		return []corev1.EnvVar{{Name: protocol.EnvVisibleDevices, Value: value}}
	}
	with := func(change func(*corev1.PodSpec)) *corev1.Pod {
		pod := gpuPod("environment", "none", 1)
		change(&pod.Spec)
		return pod
	}
	sidecar := func(spec *corev1.PodSpec, env []corev1.EnvVar) {
		spec.Containers = append(spec.Containers, corev1.Container{Name: "sidecar", Image: "example.com/none", Env: env})
	}
	for name, test := range map[string]struct {
		pod *corev1.Pod
		// rejected is the container that the rejection names; empty if the pod is accepted.
		rejected string
	}{
		"the container that requests memory": {with(func(s *corev1.PodSpec) { s.Containers[0].Env = visible("all") }), "main"},
		"another container":                  {with(func(s *corev1.PodSpec) { sidecar(s, visible("0")) }), "sidecar"},
		"an init container": {with(func(s *corev1.PodSpec) {
			s.InitContainers = []corev1.Container{{Name: "init", Image: "example.com/none", Env: visible("GPU-0")}}
		}), "init"},
		"a value from elsewhere": {with(func(s *corev1.PodSpec) {
			s.Containers[0].Env = []corev1.EnvVar{{Name: protocol.EnvVisibleDevices, ValueFrom: &corev1.EnvVarSource{
				FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.labels['cards']"},
			}}}
		}), "main"},
		"a pod of which only the init container requests memory": {with(func(s *corev1.PodSpec) {
			s.InitContainers = []corev1.Container{{Name: "init", Image: "example.com/none", Resources: s.Containers[0].Resources}}
			s.Containers[0].Resources = corev1.ResourceRequirements{}
			s.Containers[0].Env = visible("all")
		}), "main"},
		"a value that hides all cards": {with(func(s *corev1.PodSpec) { sidecar(s, visible("void")) }), ""},
		"a variable of NVIDIA's hook": {with(func(s *corev1.PodSpec) {
			s.Containers[0].Env = []corev1.EnvVar{{Name: "NVIDIA_GPU_MEMORY_LIMIT", Value: "99999"}}
		}), "main"},
		"a variable of MPS": {with(func(s *corev1.PodSpec) {
			sidecar(s, []corev1.EnvVar{{Name: "CUDA_MPS_PIPE_DIRECTORY", Value: "/nowhere"}})
		}), "sidecar"},
		"another variable": {with(func(s *corev1.PodSpec) {
			s.Containers[0].Env = []corev1.EnvVar{{Name: "NVIDIA_DRIVER_CAPABILITIES", Value: "all"}}
		}), ""},
		"a pod that requests no GPU memory": {with(func(s *corev1.PodSpec) {
			s.Containers[0].Resources, s.Containers[0].Env = corev1.ResourceRequirements{}, visible("all")
		}), ""},
	} {
		_, err := pods.Create(ctx, test.pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		mustNameTheContainer(t, name, err, test.rejected)
	}
	for value, refused := range map[string]string{"all": "debug", "none": ""} {
		pod := running.DeepCopy()
		pod.ResourceVersion = ""
		pod.Spec.EphemeralContainers = []corev1.EphemeralContainer{{EphemeralContainerCommon: corev1.EphemeralContainerCommon{
			Name: "debug", Image: "example.com/none", Env: visible(value), TerminationMessagePolicy: corev1.TerminationMessageReadFile,
		}}}
		_, err := pods.UpdateEphemeralContainers(ctx, pod.Name, pod, metav1.UpdateOptions{DryRun: []string{metav1.DryRunAll}})
		mustNameTheContainer(t, "an ephemeral container with the value "+value, err, refused)
	}
}

// testDebug runs the commands of docs/user-guide.md for a pod with a card. The API server lets no ephemeral container request memory of the
// card, and a copy of the pod is a pod without a card.
func (c *cluster) testDebug(t *testing.T, running *corev1.Pod) {
	pods := c.Client.CoreV1().Pods(running.Namespace)
	debug := "kubectl debug --image=example.com/none " + running.Name + " "
	c.helm.shell(t, debug+"--container=debugger --target=main")
	pod, err := pods.Get(t.Context(), running.Name, metav1.GetOptions{})
	must(t, err)
	if n := len(pod.Spec.EphemeralContainers); n != 1 || len(pod.Spec.EphemeralContainers[0].Resources.Limits) > 0 {
		t.Errorf("the ephemeral containers are %+v", pod.Spec.EphemeralContainers)
	}
	custom := filepath.Join(t.TempDir(), "custom.json")
	must(t, os.WriteFile(custom, []byte(`{"resources": {"limits": {"aliyun.com/gpu-mem": "1"}}}`), 0o600))
	out, err := c.helm.tryShell(t, debug+"--custom="+custom)
	if err == nil || !strings.Contains(out+err.Error(), "spec.ephemeralContainers[1].resources: Forbidden") {
		t.Errorf("an ephemeral container that requests GPU memory: %v\n%s", err, out)
	}
	out, err = c.helm.tryShell(t, debug+"--copy-to=kept --keep-annotations")
	if err == nil || !strings.Contains(out+err.Error(), "say which GPU card and group a pod has") {
		t.Errorf("a copy with the annotations: %v\n%s", err, out)
	}
	c.helm.shell(t, debug+"--copy-to=copy")
	pod, err = pods.Get(t.Context(), "copy", metav1.GetOptions{})
	must(t, err)
	if pod.Spec.NodeName != "" || len(pod.Annotations) > 0 || len(pod.Labels) > 0 || protocol.PodRequest(pod) != protocol.PodRequest(running) {
		t.Errorf("the copy is %+v", pod)
	}
	must(t, pods.Delete(t.Context(), "copy", metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
}

// testGuardAdapters changes the label for RDMA adapters of pods with and without a node, and with the label and without it.
func (c *cluster) testGuardAdapters(t *testing.T) {
	pods := c.Client.CoreV1().Pods(metav1.NamespaceDefault)
	create := func(name, node string, labels map[string]string) {
		t.Helper()
		c.create(t, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}, Spec: corev1.PodSpec{NodeName: node}})
		t.Cleanup(func() {
			must(t, pods.Delete(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
		})
	}
	required := map[string]string{protocol.LabelRDMA: protocol.RDMARequired}
	create("unlabelled", node, nil)
	create("labelled", node, required)
	create("pending", "", required)
	for name, test := range map[string]struct {
		pod, labels string
		subresource string
		rejected    bool
	}{
		"adds it":                        {"unlabelled", `{"gpushare.aliyun.com/rdma":"preferred"}`, "", true},
		"adds it, by the status":         {"unlabelled", `{"gpushare.aliyun.com/rdma":"preferred"}`, "status", true},
		"adds it without a value":        {"unlabelled", `{"gpushare.aliyun.com/rdma":""}`, "", true},
		"changes it":                     {"labelled", `{"gpushare.aliyun.com/rdma":"preferred"}`, "", true},
		"removes it":                     {"labelled", `{"gpushare.aliyun.com/rdma":null}`, "", true},
		"removes all labels":             {"labelled", `null`, "", true},
		"sets what it is":                {"labelled", `{"gpushare.aliyun.com/rdma":"required","app":"x"}`, "", false},
		"adds another":                   {"unlabelled", `{"app":"x"}`, "", false},
		"changes it, of a pending pod":   {"pending", `{"gpushare.aliyun.com/rdma":"preferred"}`, "", false},
		"removes it, from a pending pod": {"pending", `{"gpushare.aliyun.com/rdma":null}`, "", false},
	} {
		_, err := pods.Patch(t.Context(), test.pod, types.MergePatchType, []byte(`{"metadata":{"labels":`+test.labels+`}}`),
			metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}}, strings.Fields(test.subresource)...)
		switch {
		case !test.rejected && err != nil:
			t.Errorf("%s: got %v, want it accepted", name, err)
		case test.rejected && (!apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "can't be changed once the pod has a node")):
			t.Errorf("%s: got %v, want it rejected with the reason", name, err)
		}
	}
}

// testQuantities requests GPU memory in several notations. The API server rewrites a quantity before a policy sees it.
func (c *cluster) testQuantities(t *testing.T) {
	limit := func(quantity string) corev1.ResourceRequirements {
		return corev1.ResourceRequirements{Limits: corev1.ResourceList{protocol.ResourceMemory: resource.MustParse(quantity)}}
	}
	for quantity, rejected := range map[string]string{
		"2Gi":         "requests 2Gi of aliyun.com/gpu-mem, which is 2147483648 units",
		"2048Mi":      "requests 2Gi of aliyun.com/gpu-mem, which is 2147483648 units",
		"1.5Gi":       "requests 1536Mi of aliyun.com/gpu-mem, which is 1610612736 units",
		"1024Ki":      "requests 1Mi of aliyun.com/gpu-mem, which is 1048576 units",
		"1Ti":         "requests 1Ti of aliyun.com/gpu-mem, which is 1099511627776 units",
		"2":           "",
		"2048":        "",
		"4000":        "",
		"1048576":     "",
		"2147483648":  "",
		"20000000000": "",
		"4k":          "",
		"4e3":         "",
		"2Ki":         "", // 2048 units of 1 MiB
		"2G":          "", // not to be distinguished from 2000000000
		"0":           "",
	} {
		for _, where := range []string{"main", "init"} {
			pod := gpuPod("quantity", "none", 1)
			pod.Spec.Containers[0].Resources = limit(quantity)
			if where == "init" {
				pod.Spec.InitContainers = []corev1.Container{{Name: "init", Image: "example.com/none", Resources: limit(quantity)}}
				pod.Spec.Containers[0].Resources = corev1.ResourceRequirements{}
			}
			_, err := c.Client.CoreV1().Pods(pod.Namespace).Create(t.Context(), pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			switch {
			case rejected == "" && err != nil:
				t.Errorf("%s of container %s: got %v, want it accepted", quantity, where, err)
			case rejected != "" && (!apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "container "+where+" "+rejected)):
				t.Errorf("%s of container %s: got %v, want it rejected: %s", quantity, where, err, rejected)
			}
		}
	}
}

// testLargePods requests GPU memory in pods of which one part is nearly as large as the extender takes it, and in pods of which it is larger.
func (c *cluster) testLargePods(t *testing.T) {
	terms := func(n int) *corev1.Affinity {
		term := corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "a", Operator: corev1.NodeSelectorOpExists}}}
		return &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: slices.Repeat([]corev1.NodeSelectorTerm{term}, n)},
		}}
	}
	keys := func(n int) map[string]string {
		all := map[string]string{}
		for i := range n {
			all[fmt.Sprint("k", i)] = ""
		}
		return all
	}
	for name, test := range map[string]struct {
		usual, tooMany, most int
		set                  func(pod *corev1.Pod, n int)
	}{
		"labels":        {400, 513, 20_000, func(pod *corev1.Pod, n int) { pod.Labels = keys(n) }},
		"node selector": {200, 257, 20_000, func(pod *corev1.Pod, n int) { pod.Spec.NodeSelector = keys(n) }},
		"terms":         {20, 33, 50_000, func(pod *corev1.Pod, n int) { pod.Spec.Affinity = terms(n) }},
		"expressions": {100, 129, 50_000, func(pod *corev1.Pod, n int) {
			pod.Spec.Affinity = terms(1)
			term := &pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0]
			term.MatchExpressions = slices.Repeat(term.MatchExpressions, n)
		}},
		"values": {300, 513, 100_000, func(pod *corev1.Pod, n int) {
			pod.Spec.Affinity = terms(1)
			expression := &pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0].MatchExpressions[0]
			expression.Operator, expression.Values = corev1.NodeSelectorOpIn, slices.Repeat([]string{"v"}, n)
		}},
		"tolerations": {200, 257, 50_000, func(pod *corev1.Pod, n int) {
			pod.Spec.Tolerations = slices.Repeat([]corev1.Toleration{{Key: "k", Operator: corev1.TolerationOpExists}}, n)
		}},
		"ports": {800, 1025, 20_000, func(pod *corev1.Pod, n int) {
			for i := range n {
				pod.Spec.Containers[0].Ports = append(pod.Spec.Containers[0].Ports, corev1.ContainerPort{ContainerPort: int32(i + 1)})
			}
		}},
		"resources": {20, 40, 5_000, func(pod *corev1.Pod, n int) {
			for i := range n {
				pod.Spec.Containers[0].Resources.Limits[corev1.ResourceName(fmt.Sprint("example.com/r", i))] = resource.MustParse("1")
			}
		}},
		"gates": {300, 513, 10_000, func(pod *corev1.Pod, n int) {
			for i := range n {
				pod.Spec.SchedulingGates = append(pod.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: fmt.Sprint("g", i)})
			}
		}},
	} {
		for _, n := range []int{test.usual, test.tooMany, test.most} {
			for _, request := range []bool{true, false} {
				pod := gpuPod("large", "none", 1)
				if !request {
					delete(pod.Spec.Containers[0].Resources.Limits, protocol.ResourceMemory)
				}
				test.set(pod, n)
				if tooLarge := protocol.CheckSize(pod) != nil; tooLarge != (n > test.usual) {
					t.Fatalf("%d %s: too large for the extender: %v", n, name, tooLarge)
				}
				_, err := c.Client.CoreV1().Pods(pod.Namespace).Create(t.Context(), pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
				switch rejected := request && n > test.usual; {
				case !rejected && err != nil:
					t.Errorf("%d %s, requests GPU memory: %v: got %.300v, want it accepted", n, name, request, err)
				case rejected && (!apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "is too large for gpushare")):
					t.Errorf("%d %s: got %.300v, want it rejected", n, name, err)
				}
			}
		}
	}
}

// warnings keeps the warnings of the API server.
type warnings struct{ texts []string }

func (w *warnings) HandleWarningHeader(_ int, _ string, text string) { w.texts = append(w.texts, text) }

// testGuardTemplateKeys: a user who puts the keys of a group, the number of cards, or a limit on a Job or a Deployment, where nothing reads them, is
// warned.
func (c *cluster) testGuardTemplateKeys(t *testing.T) {
	keys := map[string]string{protocol.AnnotationGroupName: "train", protocol.AnnotationGroupSize: "2"}
	count, limits := map[string]string{protocol.LabelCount: "2"}, map[string]string{protocol.AnnotationLimit("main"): "16Gi"}
	const oneCard = "each of its pods gets one card: aliyun.com/gpu-count is on the Job itself, and must be a label in spec.template.metadata"
	for name, test := range map[string]struct {
		object, template map[string]string
		request          bool
		want             string
		// asLabels makes the keys of the object labels. Those of the template are labels and annotations.
		asLabels bool
		// kind is that of the object; "" is a Job.
		kind string
	}{
		"a number of cards as a label of the Job":        {count, nil, true, oneCard, true, ""},
		"a number of cards as a label of the Deployment": {count, nil, true, strings.Replace(oneCard, "the Job", "the Deployment", 1), true, "Deployment"},
		"a group on the Deployment only": {keys, nil, true, "its pods belong to no group: the annotation " + protocol.AnnotationGroupName +
			" is on the Deployment itself, and must be in spec.template.metadata", false, "Deployment"},
		"an adapter as a label of the Job": {map[string]string{protocol.LabelRDMA: "required"}, nil, true,
			"its pods get no RDMA adapter: gpushare.aliyun.com/rdma is on the Job itself, and must be a label in spec.template.metadata", true, ""},
		"on the Job only": {keys, nil, true, "its pods belong to no group: the annotation " + protocol.AnnotationGroupName + " is on the Job itself, and must be in spec.template.metadata", false, ""},
		"a limit on the Job only": {limits, nil, true, "its containers have no limit above their requests: the annotation " + protocol.AnnotationLimit("main") +
			" is on the Job itself, and must be in spec.template.metadata", false, ""},
		"on both":                   {keys, keys, true, "", false, ""},
		"of pods without a request": {keys, nil, false, "", false, ""},
	} {
		t.Run("template keys "+name, func(t *testing.T) {
			var got warnings
			config := rest.CopyConfig(c.Config)
			config.WarningHandler = &got
			client, err := kubernetes.NewForConfig(config)
			must(t, err)
			pod := gpuPod("x", "none", 1)
			if !test.request {
				pod.Spec.Containers[0].Resources = corev1.ResourceRequirements{}
			}
			object := metav1.ObjectMeta{Name: "object", Annotations: test.object}
			if test.asLabels {
				object.Annotations, object.Labels = nil, test.object
			}
			template := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: maps.Clone(test.template), Annotations: test.template}, Spec: pod.Spec}
			dryRun := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}
			if test.kind == "Deployment" {
				metav1.SetMetaDataLabel(&template.ObjectMeta, "app", "x")
				_, err = client.AppsV1().Deployments(metav1.NamespaceDefault).Create(t.Context(), &appsv1.Deployment{
					ObjectMeta: object, Spec: appsv1.DeploymentSpec{Selector: metav1.SetAsLabelSelector(map[string]string{"app": "x"}), Template: template},
				}, dryRun)
			} else {
				template.Spec.RestartPolicy = corev1.RestartPolicyNever
				_, err = client.BatchV1().Jobs(metav1.NamespaceDefault).Create(t.Context(), &batchv1.Job{ObjectMeta: object, Spec: batchv1.JobSpec{Template: template}}, dryRun)
			}
			must(t, err)
			if all := strings.Join(got.texts, "; "); !strings.HasSuffix(all, test.want) || (all == "") != (test.want == "") {
				t.Errorf("warned %q, want %q", all, test.want)
			}
		})
	}
}

func mustNameTheContainer(t *testing.T, what string, err error, container string) {
	t.Helper()
	if container == "" {
		if err != nil {
			t.Errorf("%s: got %v, want it accepted", what, err)
		}
	} else if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "container "+container+" sets ") {
		t.Errorf("%s: got %v, want it rejected for container %s", what, err, container)
	}
}
