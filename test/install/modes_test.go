package install

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/test/pages"
)

const page = "docs/install.md"

// TestModes switches to the other scheduler mode and back, with the commands of docs/install.md.
func TestModes(t *testing.T) {
	c := start(t)
	blocks, err := pages.Commands(page, "From one mode to the other")
	must(t, err)
	c.helm.run(t, "install", "gpushare", chart, "--namespace="+namespace)
	c.mustHaveDeployments(t, "gpushare-extender")
	pods := c.Client.CoreV1().Pods(metav1.NamespaceDefault)

	c.helm.shell(t, blocks[0])
	c.mustHaveDeployments(t, "gpushare-scheduler")
	notes := c.helm.run(t, "upgrade", "gpushare", chart, "--namespace="+namespace, "--dry-run=server", "--reset-then-reuse-values")
	if !strings.Contains(notes, "The second scheduler is gpushare-scheduler, as before.") {
		t.Errorf("the notes of an upgrade that keeps the second scheduler:\n%s", notes)
	}
	c.untilRefused("the policy", gpuPod("probe", "none", 1))

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
	must(t, pods.Delete(t.Context(), "again", metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
	c.mustLeaveNothing()
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
