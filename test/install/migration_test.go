package install

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
	"github.com/gpushare/gpushare/test/pages"
)

const theirExtender = "system:serviceaccount:kube-system:gpushare-schd-extender"

// TestMigration runs the commands of docs/migration.md and the checks after each step, with either half first, in a cluster with Alibaba's gpushare
// installed. Helm must not fail on the existing objects. The guard must allow the requests of Alibaba's half as long as that
// half is in use, and reject them afterwards.
func TestMigration(t *testing.T) {
	c := start(t)
	const schedulersHalf, nodesHalf, swapped = "The scheduler's half first", "The node's half first", "When both are swapped"
	type step struct {
		heading string
		block   int
		// plugin runs our device plugin after the step, extender gives kube-scheduler our extender, and creates a GPU pod. check is the block of
		// schedulersHalf that checks the step, says the words that it shows.
		plugin, extender bool
		check            int
		says             []string
	}
	deployed := []string{`deployment "gpushare-extender" successfully rolled out`}
	onNodes := []string{`daemon set "gpushare-device-plugin" successfully rolled out`, node, "2 x Tesla"}
	event := []string{"GPUCardAssumed", "pod/new", "Assumed GPU card"}
	for _, order := range []struct {
		first string
		steps []step
	}{
		{schedulersHalf, []step{
			{schedulersHalf, 0, false, false, 1, deployed}, {schedulersHalf, 2, false, true, 3, event}, {schedulersHalf, 4, true, false, 5, onNodes},
		}},
		{nodesHalf, []step{{nodesHalf, 0, true, false, 5, onNodes}, {nodesHalf, 1, false, false, 1, deployed}}},
	} {
		t.Run(order.first, func(t *testing.T) {
			must(t, c.Apply(t.Context(), filepath.Join(controlplane.Repository(t), "test", "install", "testdata", "theirs.yaml")))
			pod := c.create(t, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "theirs"}, Spec: corev1.PodSpec{NodeName: node}})
			extender := c.user(t, theirExtender, "system:masters")
			for i, step := range order.steps {
				blocks, err := pages.Commands("docs/migration.md", step.heading)
				must(t, err)
				c.helm.shell(t, blocks[step.block])
				if step.plugin {
					c.runPlugin()
				}
				remove := func() {}
				if step.extender {
					c.mustShow(t, schedulersHalf, step.check, "No resources found") // kube-scheduler doesn't have its configuration yet.
					remove = c.bindNewPod(t)
				}
				c.mustShow(t, schedulersHalf, step.check, step.says...)
				remove()
				if i == 0 {
					// From now on, requests of other users are rejected.
					probe := gpuPod("probe", "none", 1)
					probe.Annotations = map[string]string{protocol.AnnotationIndex: "1"}
					c.untilRefused("the guard", probe)
				}
				must(t, assume(t, extender, pod, i))
				if order.first == schedulersHalf && i < 2 {
					// The plugin's token names its node.
					must(t, assume(t, c.clientOf(c.account(c.theirPlugin())), pod, 10+i))
				}
			}

			blocks, err := pages.Commands("docs/migration.md", swapped)
			must(t, err)
			c.helm.shell(t, blocks[0])
			attempt := 100
			c.until("the guard refuses their extender", func(context.Context) (bool, error) {
				attempt++ // Each attempt uses another value, because a request that changes nothing is never rejected.
				return apierrors.IsForbidden(assume(t, extender, pod, attempt)), nil
			})
			c.until("both halves are the chart's, and theirs are gone", func(ctx context.Context) (bool, error) { return c.swapped(ctx) })
			c.mustShow(t, swapped, 1, "No resources found", node, "GPU1")
			must(t, c.plugin.Terminate(t.Context()))
			must(t, c.Client.CoreV1().Pods(pod.Namespace).Delete(t.Context(), pod.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
			c.mustLeaveNothing()
		})
	}
}

// bindNewPod gives kube-scheduler our extender, and creates a pod for the node, whose memory their plugin reports. The function that it returns
// removes both; nothing starts the pod.
func (c *cluster) bindNewPod(t *testing.T) func() {
	t.Helper()
	memory := fmt.Sprintf(`{%q: "32", %q: "2"}`, protocol.ResourceMemory, protocol.ResourceCount)
	data := []byte(`{"status": {"capacity": ` + memory + `, "allocatable": ` + memory + `}}`)
	_, err := c.Client.CoreV1().Nodes().Patch(t.Context(), node, types.MergePatchType, data, metav1.PatchOptions{}, "status")
	must(t, err)
	extender := c.runExtender()
	c.giveToScheduler(extender)
	pod, err := c.Client.CoreV1().Pods(metav1.NamespaceDefault).Create(t.Context(), gpuPod("new", "", 10), metav1.CreateOptions{})
	must(t, err)
	return func() {
		must(t, c.Client.CoreV1().Pods(pod.Namespace).Delete(t.Context(), pod.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
		must(t, extender.process.Terminate(t.Context()))
	}
}

// mustShow runs a block of commands until its output has the words and no problem.
func (c *cluster) mustShow(t *testing.T, heading string, block int, words ...string) {
	t.Helper()
	blocks, err := pages.Commands("docs/migration.md", heading)
	must(t, err)
	framework.Eventually(t, "the check shows that the step is done", func(context.Context) error {
		out, err := c.helm.tryShell(t, "PATH=$PWD/bin:$PATH\n"+blocks[block])
		if err == nil && (!framework.ContainsAll(out, words...) || strings.Contains(out, "Problems:")) {
			err = fmt.Errorf("want %q and no problem in\n%s", words, out)
		}
		return err
	})
}

// theirPlugin waits for the pod of Alibaba's DaemonSet.
func (c *cluster) theirPlugin() (pod *corev1.Pod) {
	c.until("their DaemonSet has its pod", func(ctx context.Context) (bool, error) {
		list, err := c.Client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: "name=gpushare-device-plugin-ds"})
		if err != nil || len(list.Items) == 0 || list.Items[0].Spec.NodeName == "" {
			return false, err
		}
		pod = &list.Items[0]
		return true, nil
	})
	return pod
}

// assume writes an annotation by a patch of the pod, as both of Alibaba's halves do.
func assume(t *testing.T, client kubernetes.Interface, pod *corev1.Pod, value int) error {
	t.Helper()
	data, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{protocol.AnnotationAssumeTime: fmt.Sprint(value)}}})
	must(t, err)
	_, err = client.CoreV1().Pods(pod.Namespace).Patch(t.Context(), pod.Name, types.StrategicMergePatchType, data, metav1.PatchOptions{})
	return err
}

// swapped reports whether the project's Deployment and DaemonSet are installed with their defaults and no object of
// Alibaba's gpushare is left.
func (c *cluster) swapped(ctx context.Context) (bool, error) {
	deployment, err := c.Client.AppsV1().Deployments(namespace).Get(ctx, "gpushare-extender", metav1.GetOptions{})
	if err != nil {
		return false, err
	}
	if *deployment.Spec.Replicas != 2 {
		return false, fmt.Errorf("%d replicas", *deployment.Spec.Replicas)
	}
	if _, err := c.Client.AppsV1().DaemonSets(namespace).Get(ctx, "gpushare-device-plugin", metav1.GetOptions{}); err != nil {
		return false, err
	}
	theirs, err := c.Find(ctx, func(object metav1.Object) bool {
		name := object.GetName()
		return strings.HasPrefix(name, "gpushare-schd-extender") || strings.HasPrefix(name, "gpushare-device-plugin-ds")
	})
	if err == nil && len(theirs) > 0 {
		err = fmt.Errorf("theirs are left: %v", theirs)
	}
	return err == nil, err
}
