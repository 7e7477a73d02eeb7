package controlplane

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
)

// CreateNodes creates nodes, several at a time, and returns when pods can be bound to all of them.
func (c *ControlPlane) CreateNodes(ctx context.Context, nodes ...*corev1.Node) error {
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(16)
	for _, node := range nodes {
		group.Go(func() error {
			if _, err := c.Client.CoreV1().Nodes().Create(groupCtx, node, metav1.CreateOptions{}); err != nil {
				return fmt.Errorf("creating node %s: %w", node.Name, err)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	if c.ControllerManager == nil {
		return nil // Without the controller manager nodes have no taints, see startAPIServer.
	}
	return c.waitUntainted(ctx, nodes)
}

// waitUntainted waits until the controller manager has removed the not-ready taint from the nodes.
func (c *ControlPlane) waitUntainted(ctx context.Context, nodes []*corev1.Node) error {
	waiting := map[string]bool{}
	for _, n := range nodes {
		waiting[n.Name] = true
	}
	err := wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		list, err := c.Client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return false, err
		}
		for i := range list.Items {
			if waiting[list.Items[i].Name] && !hasTaint(&list.Items[i], corev1.TaintNodeNotReady) {
				delete(waiting, list.Items[i].Name)
			}
		}
		return len(waiting) == 0, nil
	})
	if err != nil {
		return fmt.Errorf("waiting for %d nodes to lose the taint %s: %w", len(waiting), corev1.TaintNodeNotReady, err)
	}
	return nil
}

func hasTaint(node *corev1.Node, key string) bool {
	for _, taint := range node.Spec.Taints {
		if taint.Key == key {
			return true
		}
	}
	return false
}
