package mistakes

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/fake"
)

// NodeMistake is something that is wrong with the node n1.
type NodeMistake struct {
	// Name is the mistake in a short sentence. It is unique.
	Name string
	// Nodes and Pods are all objects of the cluster. They must not be changed.
	Nodes []*corev1.Node
	Pods  []*corev1.Pod
	// Problems is what each view lists of n1.
	Problems []string
}

// OfNodes returns mistakes with nodes. The tests of the extender's state and of the page run the same rows.
func OfNodes() []NodeMistake {
	shared := func(n *corev1.Node) { n.Labels[protocol.LabelShared] = "true" }
	down := func(n *corev1.Node) { n.Status.Allocatable[protocol.ResourceMemory] = resource.MustParse("0") }
	const notConnected = "the device plugin is not connected: nothing of aliyun.com/gpu-mem is allocatable"
	const noCards = "the label gpushare=true is set, but the node has no cards to share: its device plugin reports none"
	plain := func() *corev1.Node {
		n := node("n1")
		n.Annotations, n.Status.Capacity, n.Status.Allocatable = nil, nil, nil
		return n
	}
	return []NodeMistake{
		{Name: "a node of two cards", Nodes: two(), Pods: taken()},
		{Name: "a label whose value is spelled otherwise", Nodes: []*corev1.Node{edited(plain(), func(n *corev1.Node) { n.Labels[protocol.LabelShared] = "True" })}, Problems: []string{
			"the label gpushare=True is set, but the node has no cards to share: its device plugin reports none; the chart's device plugin runs on nodes with gpushare=true",
		}},
		{Name: "a label that nothing reads", Nodes: []*corev1.Node{edited(plain(), func(n *corev1.Node) { n.Labels["aliyun.com/gpu-share"] = "true" })}, Problems: []string{
			"the label aliyun.com/gpu-share=true has no effect: write gpushare=true",
		}},
		{Name: "a misspelt label of a node with cards", Nodes: []*corev1.Node{edited(node("n1", 8000), func(n *corev1.Node) {
			n.Labels["gpushare.aliyun.com/isolatoin"] = "mps"
		})}, Problems: []string{
			"the label gpushare.aliyun.com/isolatoin=mps has no effect: remove it, or write one of the labels of nodes that gpushare reads: gpushare.aliyun.com/config, gpushare.aliyun.com/isolation, gpushare.aliyun.com/pool",
		}},
		{Name: "labels that are not for gpushare", Nodes: []*corev1.Node{edited(node("n1", 8000), func(n *corev1.Node) {
			n.Labels["example.com/gpushare-team"], n.Labels["gpu_share"], n.Labels[protocol.LabelShared], n.Labels[protocol.LabelPool] = "a", "false", "true", "a"
		})}},
		{Name: "a label on a node whose plugin doesn't run", Nodes: []*corev1.Node{edited(plain(), shared)}, Problems: []string{noCards}},
		{Name: "the same on a node that isn't ready", Nodes: []*corev1.Node{edited(edited(plain(), shared), func(n *corev1.Node) {
			n.Status.Conditions[0].Status = corev1.ConditionUnknown
		})}, Problems: []string{"the node is not ready", noCards}},
		{Name: "a node without cards and label", Nodes: []*corev1.Node{plain()}},
		{Name: "a plugin that is down", Nodes: []*corev1.Node{edited(node("n1", 8000), down)}, Pods: list(pod("p", 3000, fake.Bound("n1", 0))), Problems: []string{notConnected}},
		{Name: "a cordoned node whose plugin is down", Nodes: []*corev1.Node{edited(edited(node("n1", 8000), down), func(n *corev1.Node) { n.Spec.Unschedulable = true })},
			Problems: []string{notConnected, "the node is cordoned"}},
		{Name: "all cards have failed: nothing is allocatable, though the plugin runs", Nodes: []*corev1.Node{edited(inventoried(func(i *protocol.Inventory) {
			i.Cards[0].Unhealthy, i.Cards[1].Unhealthy = "Xid 79", "Xid 48"
		}), down)}, Problems: []string{"GPU0 is unhealthy: Xid 79", "GPU1 is unhealthy: Xid 48"}},
		{Name: "a deleted node", Pods: list(pod("p", 3000, fake.Bound("n1", 0)), pod("q", 1000, fake.On("n1"))),
			Problems: []string{"the node is gone, but pods are bound to it", "pods hold 4000 units of GPU memory there"}},
		{Name: "a node that shares nothing any more", Nodes: []*corev1.Node{plain()}, Pods: list(pod("p", 3000, fake.Bound("n1", 0))),
			Problems: []string{"pods hold 3000 units of GPU memory there"}},
		{Name: "a failed card, and more on the other one than it has", Nodes: []*corev1.Node{brokenCard(8000)},
			Pods:     list(pod("p", 5000, fake.Bound("n1", 0)), pod("q", 4000, fake.Bound("n1", 0))),
			Problems: []string{"GPU0 is oversubscribed: 9000 of 8000 (MiB)", "GPU1 is unhealthy: Xid 79"}},
		{Name: "pods on a card that was removed, and on no card", Nodes: []*corev1.Node{node("n1", 8000)},
			Pods:     list(pod("p", 3000, fake.Bound("n1", 4)), pod("q", 9000, fake.On("n1"))),
			Problems: []string{"pods hold 3000 (MiB) of GPU4, which the node doesn't report", "pods whose card is not known hold 9000 (MiB)"}},
	}
}
