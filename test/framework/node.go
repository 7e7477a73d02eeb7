package framework

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// NodeWrapper builds a Node without a kubelet: pods can be bound to it, but they never run. Its methods change the node
// and return the wrapper.
type NodeWrapper struct {
	corev1.Node
	unit  gpu.Unit
	cards []gpu.Card
}

// MakeNode returns a ready node with 64 CPUs, 256 GiB of memory, room for 1000 pods, and no cards.
func MakeNode(name string) *NodeWrapper {
	return &NodeWrapper{unit: gpu.MiB, Node: corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Labels: map[string]string{corev1.LabelHostname: name, corev1.LabelOSStable: "linux"},
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
	}}
}

// Obj returns the node. Its whole capacity is allocatable. With cards it has the label and the resources of a GPU node,
// and the inventory annotation. It panics if the cards are not valid.
func (n *NodeWrapper) Obj() *corev1.Node {
	if len(n.cards) > 0 {
		var sum gpu.Memory
		for _, card := range n.cards {
			sum = sum.Add(card.Memory)
		}
		n.Label(protocol.LabelShared, "true")
		n.Capacity(protocol.ResourceMemory, int64(sum)).Capacity(protocol.ResourceCount, int64(len(n.cards)))
		n.Capacity(protocol.ResourceCores, 100*int64(len(n.cards)))
		features := []string{protocol.FeatureCards, protocol.FeatureCores, protocol.FeatureLimits, protocol.FeatureRDMA}
		inventory, err := protocol.Inventory{Unit: n.unit, Cards: n.cards, Features: features}.Annotation()
		if err != nil {
			panic(fmt.Sprintf("the cards of node %s: %v", n.Name, err))
		}
		n.Annotation(protocol.AnnotationInventory, inventory)
	}
	n.Status.Allocatable = n.Status.Capacity.DeepCopy()
	return &n.Node
}

// NearAdapter lets an RDMA adapter with an active port be near these cards.
func (n *NodeWrapper) NearAdapter(cards ...int) *NodeWrapper {
	for _, card := range cards {
		n.cards[card].RDMAPorts = fmt.Sprintf("mlx5_%d:1", card)
	}
	return n
}

// Rename sets the name and the label for it.
func (n *NodeWrapper) Rename(name string) *NodeWrapper {
	n.Name = name
	return n.Label(corev1.LabelHostname, name)
}

// Label sets a label.
func (n *NodeWrapper) Label(key, value string) *NodeWrapper {
	metav1.SetMetaDataLabel(&n.ObjectMeta, key, value)
	return n
}

// Annotation sets an annotation.
func (n *NodeWrapper) Annotation(key, value string) *NodeWrapper {
	metav1.SetMetaDataAnnotation(&n.ObjectMeta, key, value)
	return n
}

// Unit sets the unit of the cards' memory, which is MiB by default.
func (n *NodeWrapper) Unit(unit gpu.Unit) *NodeWrapper {
	n.unit = unit
	return n
}

// Cards adds equal healthy cards.
func (n *NodeWrapper) Cards(count int, memory int64) *NodeWrapper {
	for range count {
		index := len(n.cards)
		n.cards = append(n.cards, gpu.Card{
			Index: index, UUID: fmt.Sprintf("GPU-%08d", index), Memory: gpu.Memory(memory), NUMANode: gpu.NoNUMANode,
		})
	}
	return n
}

// Unhealthy makes a card unhealthy.
func (n *NodeWrapper) Unhealthy(index int, reason string) *NodeWrapper {
	n.cards[index].Unhealthy = reason
	return n
}

// CardList returns the cards.
func (n *NodeWrapper) CardList() []gpu.Card { return n.cards }

// Capacity sets a resource.
func (n *NodeWrapper) Capacity(name corev1.ResourceName, amount int64) *NodeWrapper {
	setQuantity(&n.Status.Capacity, name, amount)
	return n
}
