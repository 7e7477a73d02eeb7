package inspect

import (
	"strconv"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// nodeBuilder builds nodes as the API server returns them.
type nodeBuilder struct{ *corev1.Node }

// plainNode returns a node without GPUs.
func plainNode(name, ip string) nodeBuilder {
	return nodeBuilder{&corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}, Annotations: map[string]string{}},
		Status: corev1.NodeStatus{
			Capacity:    corev1.ResourceList{},
			Allocatable: corev1.ResourceList{},
			Addresses: []corev1.NodeAddress{
				{Type: corev1.NodeHostName, Address: name},
				{Type: corev1.NodeInternalIP, Address: ip},
			},
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
		},
	}}
}

// legacyNode returns a node of the original plugin, with equal cards and no inventory.
func legacyNode(name, ip string, memory ...int64) nodeBuilder {
	n := plainNode(name, ip)
	var sum int64
	for _, m := range memory {
		sum += m
	}
	return n.offers(protocol.ResourceMemory, sum).offers(protocol.ResourceCount, int64(len(memory)))
}

// inventoryNode returns a node of this project's plugin.
func inventoryNode(t *testing.T, name, ip string, unit gpu.Unit, cards ...gpu.Card) nodeBuilder {
	return withInventory(t, name, ip, protocol.Inventory{Unit: unit, Cards: cards})
}

func withInventory(t *testing.T, name, ip string, inventory protocol.Inventory) nodeBuilder {
	cards := inventory.Cards
	memory := make([]int64, len(cards))
	for i, card := range cards {
		memory[i] = int64(card.Memory)
	}
	n := legacyNode(name, ip, memory...)
	text, err := inventory.Annotation()
	check.Must(t, err)
	n.Annotations[protocol.AnnotationInventory] = text
	return n
}

func t4(index int, memory gpu.Memory) gpu.Card {
	return gpu.Card{
		Index: index, UUID: "GPU-" + strconv.Itoa(index), Model: "Tesla T4", Memory: memory, NUMANode: gpu.NoNUMANode,
	}
}

func unhealthy(card gpu.Card, reason string) gpu.Card {
	card.Unhealthy = reason
	return card
}

func (n nodeBuilder) offers(name corev1.ResourceName, amount int64) nodeBuilder {
	n.Status.Capacity[name] = *resource.NewQuantity(amount, resource.DecimalSI)
	n.Status.Allocatable[name] = *resource.NewQuantity(amount, resource.DecimalSI)
	return n
}

func (n nodeBuilder) labelled(key, value string) nodeBuilder {
	n.Labels[key] = value
	return n
}

func (n nodeBuilder) with(change func(*corev1.Node)) nodeBuilder {
	change(n.Node)
	return n
}

// podBuilder builds pods as the API server returns them.
type podBuilder struct{ *corev1.Pod }

// newPod returns a pending pod that asks for GPU memory.
func newPod(name string, request int64) podBuilder {
	pod := fake.Pod(name, request)
	pod.Annotations, pod.Spec.SchedulerName = map[string]string{}, corev1.DefaultSchedulerName
	return podBuilder{pod}
}

// plain makes the pod one that asks for nothing.
func (p podBuilder) plain() podBuilder {
	p.Spec.Containers[0].Resources.Limits = nil
	return p
}

// on binds the pod to a card and sets it running.
func (p podBuilder) on(node string, card int) podBuilder {
	p.Annotations[protocol.AnnotationIndex] = strconv.Itoa(card)
	return p.bound(node)
}

func (p podBuilder) bound(node string) podBuilder {
	p.Spec.NodeName = node
	p.Status.Phase = corev1.PodRunning
	return p
}

func (p podBuilder) in(namespace string) podBuilder {
	p.Namespace = namespace
	return p
}

func (p podBuilder) refused(message string) podBuilder {
	p.Status.Conditions = []corev1.PodCondition{{
		Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: message,
	}}
	return p
}

func (p podBuilder) terminating() podBuilder {
	fake.Terminating(time.Unix(1700000000, 0))(p.Pod)
	return p
}

func (p podBuilder) phase(phase corev1.PodPhase) podBuilder {
	p.Status.Phase = phase
	return p
}

func objects(nodes []nodeBuilder, pods ...podBuilder) Objects {
	var out Objects
	for _, n := range nodes {
		out.Nodes = append(out.Nodes, n.Node)
	}
	return out.plus(pods...)
}

func (o Objects) plus(pods ...podBuilder) Objects {
	for _, p := range pods {
		o.Pods = append(o.Pods, p.Pod)
	}
	return o
}
