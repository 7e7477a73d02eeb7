package install

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
	"github.com/gpushare/gpushare/test/pages"
)

const (
	page   = "docs/install.md"
	second = "gpushare-scheduler"
)

// TestSecondScheduler installs the second scheduler, which leaves the cluster's own scheduler unchanged.
func TestSecondScheduler(t *testing.T) {
	c := start(t)
	c.helm.run(t, "install", "gpushare", chart, "--namespace="+namespace, "--set=mode=secondScheduler")
	pod := c.pod("scheduler")
	if names := containers(pod); !names.Equal(sets.New("scheduler", "extender")) {
		t.Fatalf("the pod has %v", names)
	}
	kubeconfig := c.account(pod)

	port, health := controlplane.ReservePortForTest(t), controlplane.ReservePortForTest(t)
	extender := c.process(pod, "extender", c.Binary("gpushare-extender"),
		map[string]string{"127.0.0.1:12345": port.Address(), ":12347": health.Address()}, "--kubeconfig="+kubeconfig)
	extender.Ready = controlplane.HTTPReady(health.URL("http") + "/readyz")
	controlplane.RunForTest(t, extender)
	c.runPlugin()

	secure := controlplane.ReservePortForTest(t)
	scheduler := c.process(pod, "scheduler", filepath.Join(controlplane.KubeDir(c.root), "kube-scheduler"),
		map[string]string{"/etc/gpushare/scheduler-config.yaml": c.schedulerConfig(kubeconfig, port), "10259": secure.String()},
		// Inside a pod, kube-scheduler finds these files by itself.
		"--authentication-kubeconfig="+kubeconfig, "--authorization-kubeconfig="+kubeconfig, "--bind-address=127.0.0.1")
	scheduler.Ready = controlplane.HTTPReady(secure.URL("https") + "/healthz")
	controlplane.RunForTest(t, scheduler)

	c.mustGetACard(gpuPod("first", second, 10))
	c.mustGetACard(gpuPod("second", second, 10))

	c.untilRefused("the policy", gpuPod("probe", "none", 1))
	pods := c.Client.CoreV1().Pods(metav1.NamespaceDefault)
	starting := framework.MakePod("starting").Namespace(metav1.NamespaceDefault).InitContainer("init", 1).Obj()
	for name, pod := range map[string]*corev1.Pod{
		"under the cluster's scheduler": gpuPod("blind", "", 1),
		"under another":                 gpuPod("blind", "other", 1),
		"in an init container":          starting,
	} {
		_, err := pods.Create(t.Context(), pod, metav1.CreateOptions{})
		if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "must have spec.schedulerName: gpushare-scheduler") {
			t.Errorf("a pod %s: got %v, want it rejected with the name", name, err)
		}
	}
	_, err := pods.Create(t.Context(), framework.MakePod("none").Obj(), metav1.CreateOptions{})
	must(t, err)
	// This pod bypasses all schedulers; the plugin selects its card.
	direct := gpuPod("direct", "", 1)
	direct.Spec.NodeName = node
	c.mustGetACard(direct)

	c.mustHaveForbiddenNothing()
	t.Run("to the other mode and back", c.testModes)
	c.mustLeaveNothing()
}

// testModes switches from the second scheduler to the other mode and back, with the commands of docs/install.md.
func (c *cluster) testModes(t *testing.T) {
	blocks, err := pages.Commands(page, "From one mode to the other")
	must(t, err)
	pods := c.Client.CoreV1().Pods(metav1.NamespaceDefault)

	c.helm.shell(t, blocks[1])
	c.mustHaveDeployments(t, "gpushare-extender")
	c.until("pods that name no scheduler are accepted again", func(ctx context.Context) (bool, error) {
		_, err := pods.Create(ctx, gpuPod("again", corev1.DefaultSchedulerName, 1), metav1.CreateOptions{})
		if apierrors.IsInvalid(err) {
			return false, nil
		}
		return err == nil, err
	})
	if now := c.lasting(); now["address"] != "10.0.0.15" || now["gpushare-scheduler-config/scheduler-config.yaml"] == "" {
		t.Errorf("kube-scheduler has no configuration: %v", now["address"])
	}

	c.helm.shell(t, blocks[0])
	c.mustHaveDeployments(t, "gpushare-scheduler")
	notes := c.helm.run(t, "upgrade", "gpushare", chart, "--namespace="+namespace, "--dry-run=server", "--reset-then-reuse-values")
	if !strings.Contains(notes, "The second scheduler is gpushare-scheduler, as before.") {
		t.Errorf("the notes of an upgrade that keeps the second scheduler:\n%s", notes)
	}
	c.untilRefused("the policy", gpuPod("probe", "none", 1))
	must(t, pods.Delete(t.Context(), "again", metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
}

// mustHaveDeployments waits until this Deployment is the project's only one.
func (c *cluster) mustHaveDeployments(t *testing.T, want string) {
	t.Helper()
	c.until("the Deployment is "+want, func(ctx context.Context) (bool, error) {
		list, err := c.Client.AppsV1().Deployments(namespace).List(ctx, metav1.ListOptions{LabelSelector: ours})
		if err != nil {
			return false, err
		}
		if len(list.Items) != 1 || list.Items[0].Name != want {
			return false, fmt.Errorf("%d Deployments", len(list.Items))
		}
		return true, nil
	})
}

func containers(pod *corev1.Pod) sets.Set[string] {
	names := sets.New[string]()
	for _, container := range pod.Spec.Containers {
		names.Insert(container.Name)
	}
	return names
}

// schedulerConfig writes the installed configuration with the extender's port in this test, and with the account that a pod
// would use by default.
func (c *cluster) schedulerConfig(kubeconfig string, extender *controlplane.Port) string {
	c.t.Helper()
	installed, err := c.Client.CoreV1().ConfigMaps(namespace).Get(c.t.Context(), "gpushare-scheduler-config", metav1.GetOptions{})
	must(c.t, err)
	const installedAt = "http://127.0.0.1:12345/"
	text := installed.Data["scheduler-config.yaml"]
	if !strings.Contains(text, installedAt) {
		c.t.Fatalf("the configuration doesn't have %s", installedAt)
	}
	var config map[string]any
	must(c.t, yaml.Unmarshal([]byte(strings.ReplaceAll(text, installedAt, extender.URL("http")+"/")), &config))
	config["clientConnection"] = map[string]any{"kubeconfig": kubeconfig}
	data, err := yaml.Marshal(config)
	must(c.t, err)
	path := filepath.Join(c.Dir, "second-scheduler-config.yaml")
	must(c.t, os.WriteFile(path, data, 0o600))
	return path
}
