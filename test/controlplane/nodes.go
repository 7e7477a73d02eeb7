package controlplane

import (
	"context"
	"fmt"
	"maps"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// Node describes a node without a kubelet: pods can be bound to it, but they never run.
type Node struct {
	Name string
	// Unit and Cards are written as the inventory annotation and as gpu-mem and gpu-count. A node without cards gets
	// neither of these nor the label.
	Unit  gpu.Unit
	Cards []gpu.Card
	// WithoutInventory omits the annotation, like the device plugin of AliyunContainerService.
	WithoutInventory bool
	// Labels and Annotations are added to those above.
	Labels, Annotations map[string]string
	// Capacity is added to, and overrides, the cards' resources and 64 CPUs, 256 GiB of memory and 1000 pods.
	Capacity corev1.ResourceList
}

// EqualCards returns n healthy cards of one size, with indexes from 0.
func EqualCards(n int, memory gpu.Memory) []gpu.Card {
	cards := make([]gpu.Card, n)
	for i := range cards {
		cards[i] = gpu.Card{Index: i, UUID: fmt.Sprintf("GPU-%08d", i), Memory: memory, NUMANode: gpu.NoNUMANode}
	}
	return cards
}

// Object returns the Node object. It is ready, and its whole capacity is allocatable.
func (n Node) Object() (*corev1.Node, error) {
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name:        n.Name,
			Labels:      map[string]string{corev1.LabelHostname: n.Name, corev1.LabelOSStable: "linux"},
			Annotations: map[string]string{},
		},
		Status: corev1.NodeStatus{
			Capacity: corev1.ResourceList{
				corev1.ResourceCPU:    resource.MustParse("64"),
				corev1.ResourceMemory: resource.MustParse("256Gi"),
				corev1.ResourcePods:   resource.MustParse("1000"),
			},
			Conditions: []corev1.NodeCondition{{
				Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady",
				LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now(),
			}},
		},
	}
	if len(n.Cards) > 0 {
		var sum gpu.Memory
		for _, card := range n.Cards {
			sum = sum.Add(card.Memory)
		}
		node.Labels[protocol.LabelShared] = "true"
		node.Status.Capacity[protocol.ResourceMemory] = *resource.NewQuantity(int64(sum), resource.DecimalSI)
		node.Status.Capacity[protocol.ResourceCount] = *resource.NewQuantity(int64(len(n.Cards)), resource.DecimalSI)
		if !n.WithoutInventory {
			inventory, err := protocol.Inventory{Unit: n.Unit, Cards: n.Cards}.Annotation()
			if err != nil {
				return nil, err
			}
			node.Annotations[protocol.AnnotationInventory] = inventory
		}
	}
	maps.Copy(node.Labels, n.Labels)
	maps.Copy(node.Annotations, n.Annotations)
	maps.Copy(node.Status.Capacity, n.Capacity)
	node.Status.Allocatable = node.Status.Capacity.DeepCopy()
	return node, nil
}

// CreateNodes creates nodes, several at a time, and returns when pods can be bound to all of them.
func (c *ControlPlane) CreateNodes(ctx context.Context, nodes ...Node) error {
	var objects []*corev1.Node
	for _, n := range nodes {
		object, err := n.Object()
		if err != nil {
			return fmt.Errorf("node %s: %w", n.Name, err)
		}
		objects = append(objects, object)
	}
	return c.CreateNodeObjects(ctx, objects...)
}

// CreateNodeObjects creates nodes, several at a time, and returns when pods can be bound to all of them.
func (c *ControlPlane) CreateNodeObjects(ctx context.Context, nodes ...*corev1.Node) error {
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
