package install

import (
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
	"github.com/gpushare/gpushare/test/pages"
)

func TestNames(t *testing.T) {
	h := newHelm(t, "")
	for name, test := range map[string]struct{ release, values, want string }{
		"whatever the release's name":        {"test", "", "gpushare"},
		"a full name":                        {"test", "fullnameOverride=gpu,nameOverride=other", "gpu"},
		"Helm's rule":                        {"test", "nameOverride=gpushare", "test-gpushare"},
		"Helm's rule, the release has it":    {"gpushare-test", "nameOverride=gpushare", "gpushare-test"},
		"Helm's rule, the same as a release": {"gpushare", "nameOverride=gpushare", "gpushare"},
	} {
		out := h.run(t, "template", test.release, chart, "--set=mode=secondScheduler", "--set="+test.values)
		if want := "kind: DaemonSet\nmetadata:\n  name: " + test.want + "-device-plugin\n"; !strings.Contains(out, want) {
			t.Errorf("%s: there is no %q", name, want)
		}
	}
}

// TestRenamed: with another name, these objects and references alone keep the default one. A cluster can't have them twice.
func TestRenamed(t *testing.T) {
	h := newHelm(t, "")
	extender := []string{
		"ClusterRole/gpushare-extender metadata.name", "ClusterRoleBinding/gpu-extender roleRef.name",
		"ConfigMap/gpushare-evictions metadata.name", "Lease/gpushare-extender metadata.name", "Role/gpu-extender rules.0.resourceNames.0",
		"Role/gpu-extender-evictions rules.0.resourceNames.0",
	}
	for mode, want := range map[string][]string{
		"extender": extender,
		"secondScheduler": append([]string{
			"ConfigMap/gpu-scheduler-config data.scheduler-config.yaml", "Lease/gpushare-scheduler metadata.name", "Role/gpu-scheduler rules.0.resourceNames.0",
		}, extender...),
		"devicePlugin": nil,
	} {
		t.Run(mode, func(t *testing.T) {
			var got []string
			for key, object := range h.render(t, "fullnameOverride=gpu,secondScheduler.name=gpu,networkPolicy.enabled=true,monitoring.enabled=true,mode="+mode) {
				for _, path := range defaultNames(object.Object, "") {
					got = append(got, key+" "+path)
				}
			}
			slices.Sort(want)
			slices.Sort(got)
			check.Equal(t, "the result", want, got)
		})
	}
}

// defaultName matches the default name of a release, or of one of its objects: not in a URL's path or in an image.
var defaultName = regexp.MustCompile(`^gpushare$|(^|[ :'"])gpushare-[a-z]`)

// defaultNames returns the paths of the strings that contain a default name.
func defaultNames(value any, path string) (paths []string) {
	switch v := value.(type) {
	case map[string]any:
		for key, inner := range v {
			paths = append(paths, defaultNames(inner, strings.TrimPrefix(path+"."+key, "."))...)
		}
	case []any:
		for i, inner := range v {
			paths = append(paths, defaultNames(inner, fmt.Sprint(path, ".", i))...)
		}
	case string:
		if defaultName.MatchString(v) {
			paths = append(paths, path)
		}
	}
	return paths
}

// TestPool: a release without the extender has the device plugin and the policies that limit it, and selects other nodes.
func TestPool(t *testing.T) {
	h := newHelm(t, "")
	main := h.render(t, "monitoring.enabled=true,monitoring.authorize=true,monitoring.credentials.name=x")
	pool := h.render(t, "mode=devicePlugin,fullnameOverride=pool-b,monitoring.enabled=true,monitoring.authorize=true,monitoring.credentials.name=x")
	want := []string{
		"ClusterRole/pool-b-device-plugin", "ClusterRole/pool-b-metrics-reader", "ClusterRoleBinding/pool-b-device-plugin", "DaemonSet/pool-b-device-plugin",
		"PodMonitor/pool-b-device-plugin", "ServiceAccount/pool-b-device-plugin",
		"ValidatingAdmissionPolicy/pool-b-device-plugin-pods", "ValidatingAdmissionPolicy/pool-b-nodes",
		"ValidatingAdmissionPolicyBinding/pool-b-device-plugin-pods", "ValidatingAdmissionPolicyBinding/pool-b-nodes",
	}
	check.Equal(t, "the objects", want, slices.Sorted(maps.Keys(pool)))
	for name, want := range map[string]string{
		"pool-b-device-plugin-pods": "request.userInfo.username == 'system:serviceaccount:gpu:pool-b-device-plugin'",
		"pool-b-nodes":              `request.userInfo.username in ["system:serviceaccount:gpu:pool-b-device-plugin"]`,
	} {
		conditions, _, err := unstructured.NestedSlice(pool["ValidatingAdmissionPolicy/"+name].Object, "spec", "matchConditions")
		must(t, err)
		if got := conditions[0].(map[string]any)["expression"]; got != want {
			t.Errorf("%s limits %v, want %s", name, got, want)
		}
	}
	nodes := func(workload *unstructured.Unstructured) map[string]string {
		return podTemplate(t, workload).Spec.NodeSelector
	}
	selectors := []map[string]string{nodes(main["DaemonSet/gpushare-device-plugin"]), nodes(pool["DaemonSet/pool-b-device-plugin"])}
	check.Equal(t, "the nodes", []map[string]string{{"gpushare": "true"}, {"gpushare": "pool-b"}}, selectors)
}

// TestSeveralReleases installs a release beside another one, in its namespace, with the commands of docs/install.md.
func TestSeveralReleases(t *testing.T) {
	t.Parallel()
	c := controlplane.StartForTest(t, controlplane.Options{WithoutScheduler: true})
	h := newHelm(t, c.KubeconfigPath)
	must(t, c.CreateNodes(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}))
	find := func(name string) []string {
		t.Helper()
		found, err := c.Find(t.Context(), func(object metav1.Object) bool {
			return strings.Contains(object.GetName(), name) && !strings.HasPrefix(object.GetName(), "sh.helm.release.") // Helm's own record
		})
		must(t, err)
		slices.Sort(found)
		return found
	}
	h.run(t, "install", "gpushare", chart, "--namespace="+namespace)
	before := find("gpushare")

	blocks, err := pages.Commands(page, "Several releases")
	must(t, err)
	h.shell(t, strings.ReplaceAll(blocks[0], "NODE", node))
	allowed, err := c.Client.AdmissionregistrationV1().ValidatingAdmissionPolicies().Get(t.Context(), "gpushare-pod-annotations", metav1.GetOptions{})
	must(t, err)
	if !strings.Contains(allowed.String(), "system:serviceaccount:kube-system:pool-b-device-plugin") {
		t.Errorf("the guard doesn't allow the pool's device plugin: %v", allowed)
	}

	for name, values := range map[string]string{
		"another name":         "fullnameOverride=test",
		"the second scheduler": "fullnameOverride=test,mode=secondScheduler",
		"the same name":        "mode=extender",
	} {
		out, err := h.try("install", "test", chart, "--namespace=default", "--set="+values)
		const want = "mode: the release gpushare in namespace kube-system has the extender, and two extenders would allocate the same memory twice"
		if err == nil || !strings.Contains(out, want) {
			t.Errorf("a second extender, %s: got %v %s, want %q", name, err, out, want)
		}
	}

	out, err := h.try("upgrade", "gpushare", chart, "--namespace="+namespace, "--set=fullnameOverride=gpu")
	const want = "fullnameOverride: the names of this release's objects begin with gpushare, and Helm would create those of gpu beside them"
	if err == nil || !strings.Contains(out, want) {
		t.Errorf("another name: got %v %s, want %q", err, out, want)
	}

	h.run(t, "uninstall", "pool-b", "--namespace="+namespace)
	if left := find("pool-b"); len(left) > 0 {
		t.Errorf("objects of the pool are left: %v", left)
	}
	if diff := cmp.Diff(before, find("gpushare")); diff != "" {
		t.Errorf("the other release's objects (-before +after):\n%s", diff)
	}
	t.Run("warnings", func(t *testing.T) { testWarnings(t, h, c.Config) })
}

// testWarnings: users are warned of what Kubernetes accepts and ignores: a quota on a key that limits nothing and, where NVIDIA's runtime isn't the
// nodes' default, a template that doesn't name it, whose containers would start and find no card.
func testWarnings(t *testing.T, h helm, config *rest.Config) {
	var got warnings
	config = rest.CopyConfig(config)
	config.WarningHandler = &got
	client, err := kubernetes.NewForConfig(config)
	must(t, err)
	warned := func(err error) string {
		t.Helper()
		must(t, err)
		defer func() { got.texts = nil }()
		return strings.Join(got.texts, "; ")
	}
	dryRun := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}
	job := func(class *string) string {
		t.Helper()
		pod := gpuPod("x", "none", 1)
		pod.Spec.RestartPolicy, pod.Spec.RuntimeClassName = corev1.RestartPolicyNever, class
		object := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: "train"}, Spec: batchv1.JobSpec{Template: corev1.PodTemplateSpec{Spec: pod.Spec}}}
		_, err := client.BatchV1().Jobs(metav1.NamespaceDefault).Create(t.Context(), object, dryRun)
		return warned(err)
	}
	quota := func(key corev1.ResourceName) string {
		t.Helper()
		object := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "gpu"}, Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{key: resource.MustParse("32")}}}
		_, err := client.CoreV1().ResourceQuotas(metav1.NamespaceDefault).Create(t.Context(), object, dryRun)
		return warned(err)
	}
	const noCard = "its containers find no card unless a runtime of NVIDIA runs them: the Job has no spec.template.spec.runtimeClassName, such as nvidia"
	warns := func(values, want string) {
		t.Helper()
		h.run(t, "upgrade", "gpushare", chart, "--namespace="+namespace, "--set="+values)
		framework.Eventually(t, "the policy with "+values, func(context.Context) error {
			if all := job(nil); !strings.HasSuffix(all, want) || want == "" && all != "" {
				return fmt.Errorf("warned %q, want %q", all, want)
			}
			return nil
		})
	}
	warns("devicePlugin.runtimeClassName=nvidia", noCard)
	if all := job(new("nvidia")); all != "" {
		t.Errorf("with the class: warned %q", all)
	}
	const noQuota = " limits nothing: write requests.aliyun.com/gpu-mem, or requests.aliyun.com/gpu-core.percentage"
	framework.Eventually(t, "the policy of quotas warns", func(context.Context) error {
		if all := quota("limits.aliyun.com/gpu-mem"); all == "" {
			return fmt.Errorf("warned %q", all)
		}
		return nil
	})
	for key, limits := range map[corev1.ResourceName]bool{
		"requests.aliyun.com/gpu-mem": true, "requests.aliyun.com/gpu-core.percentage": true, "requests.nvidia.com/gpu": true, "limits.cpu": true,
		"limits.aliyun.com/gpu-mem": false, "requests.aliyun.com/gpumem": false, "requests.aliyun.com/gpu-count": false,
	} {
		if all := quota(key); limits && all != "" || !limits && !strings.HasSuffix(all, string(key)+noQuota) {
			t.Errorf("a quota on %s: warned %q", key, all)
		}
	}
	warns("devicePlugin.runtimeClassName=", "")
	warns("devicePlugin.runtimeClassName=nvidia", noCard)
	warns("devicePlugin.runtimeClassName=nvidia,devicePlugin.deviceListStrategy=cdi-cri", "")
}
