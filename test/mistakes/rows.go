package mistakes

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/fake"
)

// two returns nodes n1 with two cards of 8,000 MiB and n2 with one.
func two() []*corev1.Node { return []*corev1.Node{node("n1", 8000, 8000), node("n2", 8000)} }

// inUnits ends what is said of an amount in the words of another system.
const inUnits = ", a number of units of GPU memory (GiB, unless the administrator configured another unit)"

// list returns the pods.
func list(pods ...*corev1.Pod) []*corev1.Pod { return pods }

// taken returns pods that leave 3,000 and 2,000 MiB on the cards of n1, and 1,000 MiB on n2.
func taken(more ...*corev1.Pod) []*corev1.Pod {
	return append(more, pod("u0", 5000, fake.Bound("n1", 0)), pod("u1", 6000, fake.Bound("n1", 1)), pod("u2", 7000, fake.Bound("n2", 0)))
}

// requests are the mistakes in a pod's own spec.
func requests() []Mistake {
	return []Mistake{
		{Name: "an amount with the suffix Gi", Nodes: two(), Pods: list(pod("p", 0, memory(0, "2Gi"))), Pod: "p",
			Cause: reasons.TooLarge, Words: "no card is large enough for 2147483648 units of 1 MiB (write 2048, without Gi): the largest has 8000 MiB, on n1"},
		{Name: "an amount in bytes", Nodes: two(), Pods: list(pod("p", 2147483648)), Pod: "p",
			Cause: reasons.TooLarge, Words: "no card is large enough for 2147483648 units of 1 MiB (write 2048, if bytes were meant): the largest has 8000 MiB, on n1"},
		{Name: "an amount in decimal gigabytes", Nodes: two(), Pods: list(pod("p", 0, memory(0, "2G"))), Pod: "p",
			Cause: reasons.TooLarge, Words: "no card is large enough for 2000000000 units of 1 MiB (write 1908, if bytes were meant): the largest has 8000 MiB, on n1"},
		{Name: "the suffix Gi in one of two containers", Nodes: two(), Pods: list(pod("p", 0, containers(500, 2<<30), memory(1, "2Gi"))), Pod: "p",
			Cause: reasons.TooLarge, Words: "no card is large enough for 2147484148 units of 1 MiB (write 2048 in container b, without Gi): the largest has 8000 MiB, on n1"},
		{Name: "an init container that asks for more than a card has", Nodes: two(), Pods: list(pod("p", 0, containers(5000, 2000), initContainer("load", 9000))), Pod: "p",
			Cause: reasons.TooLarge, Words: "no card is large enough for 9000 MiB, which its init container load asks for: the largest has 8000 MiB, on n1"},
		{Name: "more than a card has", Nodes: two(), Pods: list(pod("p", 9000)), Pod: "p",
			Cause: reasons.TooLarge, Words: "no card is large enough for 9000 MiB: the largest has 8000 MiB, on n1"},
		{Name: "two containers that together ask for more than a card has", Nodes: two(), Pods: list(pod("p", 0, containers(5000, 4000))), Pod: "p",
			Cause: reasons.TooLarge, Words: "no card is large enough for 9000 MiB, which its containers a (5000) and b (4000) ask for together, on one card: the largest has 8000 MiB, on n1"},
		{Name: "a misspelled resource", Nodes: two(), Pods: list(pod("p", 0, limits(map[corev1.ResourceName]string{"aliyun.com/gpumem": "2"}))), Pod: "p",
			NotPending: true, Words: "container main asks for aliyun.com/gpumem, which gpushare doesn't know: write aliyun.com/gpu-mem"},
		{Name: "a resource with another ending", Nodes: two(), Pods: list(pod("p", 0, limits(map[corev1.ResourceName]string{"aliyun.com/gpu-memory": "2"}))), Pod: "p",
			NotPending: true, Words: "container main asks for aliyun.com/gpu-memory, which gpushare doesn't know: write aliyun.com/gpu-mem"},
		{Name: "a resource of another project", Nodes: two(), Pods: list(pod("p", 0, limits(map[corev1.ResourceName]string{"aliyun.com/gpu": "1", "aliyun.com/gpu-profile": "1"}), fake.On("n1"))), Pod: "p",
			NotPending: true, Words: "container main asks for aliyun.com/gpu, which gpushare doesn't know: write aliyun.com/gpu-mem"},
		{Name: "a resource of HAMi", Nodes: two(), Pods: list(pod("p", 0, limits(map[corev1.ResourceName]string{"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}))), Pod: "p",
			NotPending: true, Words: "container main asks for nvidia.com/gpumem, which gpushare doesn't know: write aliyun.com/gpu-mem" + inUnits},
		{Name: "cores by HAMi's resource", Nodes: two(), Pods: list(pod("p", 0, limits(map[corev1.ResourceName]string{"nvidia.com/gpucores": "30"}))), Pod: "p",
			NotPending: true, Words: "container main asks for nvidia.com/gpucores, which gpushare doesn't know: write aliyun.com/gpu-core.percentage"},
		{Name: "memory by Volcano's resource", Nodes: two(), Pods: list(pod("p", 0, limits(map[corev1.ResourceName]string{"volcano.sh/vgpu-memory": "3000"}))), Pod: "p",
			NotPending: true, Words: "container main asks for volcano.sh/vgpu-memory, which gpushare doesn't know: write aliyun.com/gpu-mem" + inUnits},
		{Name: "a fraction by KAI's annotation", Nodes: two(), Pods: list(pod("p", 0, limits(nil), fake.Annotation("gpu-fraction", "0.5"), fake.On("n1"))), Pod: "p",
			NotPending: true, Words: "the annotation gpu-fraction is of KAI Scheduler, and gpushare doesn't read it: ask for aliyun.com/gpu-mem in resources.limits of a container" + inUnits},
		{Name: "whole cards that no node offers", Nodes: two(), Pods: list(pod("p", 0, limits(map[corev1.ResourceName]string{"nvidia.com/gpu": "1"}))), Pod: "p",
			NotPending: true, Words: "container main asks for nvidia.com/gpu, and no node offers whole cards: for a part of a card that nodes share, ask for aliyun.com/gpu-mem"},
		{Name: "the amount 0", Nodes: two(), Pods: list(pod("p", 0, memory(0, "0"), fake.On("n1"))), Pod: "p",
			NotPending: true, Words: "the pod asks for 0 of aliyun.com/gpu-mem, so it gets no card"},
		{Name: "a number of cards alone", Nodes: two(), Pods: list(pod("p", 0, limits(map[corev1.ResourceName]string{protocol.ResourceCount: "1"}))), Pod: "p",
			NotPending: true, Words: "aliyun.com/gpu-count alone reserves neither memory nor a card: ask for aliyun.com/gpu-mem"},
		{Name: "the request as an annotation", Nodes: two(), Pods: list(pod("p", 0, limits(nil), fake.Annotation("aliyun.com/gpu-mem", "2"), fake.On("n1"))), Pod: "p",
			NotPending: true, Words: "aliyun.com/gpu-mem is an annotation of the pod, where it has no effect: it belongs to resources.limits of a container"},
		{Name: "a node selector that no node matches", Nodes: two(), Pods: list(pod("p", 2000, selector("gpu", "a100"), rejected("2 node(s) didn't match Pod's node affinity/selector"))), Pod: "p",
			Cause: reasons.NoNode, Words: "no node that shares GPU memory can take the pod; n1, n2: excluded by the pod's node selector (gpu=a100)"},
		{Name: "a node selector that names a node without cards", Nodes: two(), Pods: list(pod("p", 2000, pinned("n9"), rejected("1 node(s) didn't satisfy plugin(s) [NodeAffinity], 1 Insufficient aliyun.com/gpu-mem"))), Pod: "p",
			Cause: reasons.NoNode, Words: "no node that shares GPU memory can take the pod: its node affinity names n9, which shares none"},
		{Name: "a DaemonSet's pod on a full node, while another one has room", Nodes: two(), Pods: list(pod("p", 2000, pinned("n2")), pod("u", 7000, fake.Bound("n2", 0))), Pod: "p",
			Cause: reasons.Full, Words: "the cards that are large enough are taken: the largest free piece is 1000 MiB, on n2; the pod's node affinity names n2 only, as for each pod of a DaemonSet"},
		{Name: "a selector that no node matches, and cordoned nodes", Nodes: []*corev1.Node{edited(node("n1", 8000), func(n *corev1.Node) { n.Spec.Unschedulable = true })},
			Pods: list(pod("p", 2000, selector("gpu", "a100"))), Pod: "p",
			Cause: reasons.NoNode, Words: "no node that shares GPU memory can take the pod; n1: excluded by the pod's node selector (gpu=a100)"},
		{Name: "a taint that the pod doesn't tolerate", Nodes: []*corev1.Node{edited(node("n1", 8000), func(n *corev1.Node) {
			n.Spec.Taints = []corev1.Taint{{Key: "team", Value: "a", Effect: corev1.TaintEffectNoSchedule}}
		})}, Pods: list(pod("p", 2000, rejected("2 node(s) had untolerated taint(s)"))), Pod: "p",
			Cause: reasons.NoNode, Words: "no node that shares GPU memory can take the pod; n1: the pod doesn't tolerate the taint team=a:NoSchedule"},
		{Name: "a scheduler that doesn't exist", Nodes: two(), Pods: list(pod("p", 2000, scheduler("gpushare"), untried)), Pod: "p",
			Cause: reasons.NotTried, Words: `scheduler "gpushare" has not tried it for 18m: is a scheduler of this name running?`},
		{Name: "a scheduler that doesn't exist, and no room", Nodes: two(), Pods: taken(pod("p", 4000, scheduler("gpushare"), untried)), Pod: "p",
			Cause: reasons.NotTried, Words: `scheduler "gpushare" has not tried it for 18m: is a scheduler of this name running?`},
		{Name: "a queue before a pod for which no card has room", Nodes: two(), Pods: taken(pod("p", 7500, untried), pod("q", 7500)), Pod: "p",
			Cause: reasons.Full, Words: `the cards that are large enough are taken: the largest free piece is 3000 MiB, on n1; scheduler "default-scheduler" has not tried it for 18m`},
		{Name: "a new pod", Nodes: two(), Pods: list(pod("p", 2000, untried, created(2*time.Second))), Pod: "p",
			Cause: reasons.Fits, Words: "n1 has room for it, 8000 MiB on one card: kube-scheduler has not tried it yet"},
		{Name: "scheduling gates", Nodes: two(), Pods: list(pod("p", 2000, func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "team/quota"}} })), Pod: "p",
			Cause: reasons.Gated, Words: "the pod is held back by its scheduling gates: team/quota"},
		{Name: "whole cards and GPU memory at once", Nodes: two(), Pods: list(pod("p", 0, limits(map[corev1.ResourceName]string{protocol.ResourceMemory: "2000", "nvidia.com/gpu": "1"}), rejected("2 Insufficient nvidia.com/gpu"))), Pod: "p",
			Cause: reasons.OtherConstraint, Words: "n1 has room for it, 8000 MiB on one card, but kube-scheduler rejects the pod: 2 Insufficient nvidia.com/gpu"},
		{Name: "more CPU than a node has", Nodes: two(), Pods: list(pod("p", 2000, rejected("1 Insufficient cpu, 1 no GPU card has enough free memory"))), Pod: "p",
			Cause: reasons.OtherConstraint, Words: "n1 has room for it, 8000 MiB on one card, but kube-scheduler rejects the pod: 1 Insufficient cpu, 1 no GPU card has enough free memory"},
		{Name: "more CPU than one node has, and no room on the other", Nodes: two(), Pods: taken(pod("p", 7500, rejected("1 Insufficient cpu, 1 no GPU card has enough free memory"))), Pod: "p",
			Cause: reasons.Full, Words: "the cards that are large enough are taken: the largest free piece is 3000 MiB, on n1; kube-scheduler also says: 1 Insufficient cpu"},
		{Name: "a claim that doesn't exist", Nodes: two(), Pods: list(pod("p", 2000, rejected(`persistentvolumeclaim "data" not found`))), Pod: "p",
			Cause: reasons.OtherConstraint, Words: `n1 has room for it, 8000 MiB on one card, but kube-scheduler rejects the pod: persistentvolumeclaim "data" not found`},
		{Name: "another scheduler, which rejects the pod in words of its own", Nodes: two(), Pods: list(pod("p", 2000, scheduler("volcano"),
			scheduled(corev1.PodReasonUnschedulable, "pod group is not ready, 1 Pending, 1 minAvailable"))), Pod: "p",
			Cause: reasons.OtherConstraint, Words: `n1 has room for it, 8000 MiB on one card, but scheduler "volcano" rejects the pod: pod group is not ready, 1 Pending, 1 minAvailable`},
		{Name: "memory that came free since kube-scheduler's last try", Nodes: two(), Pods: list(pod("p", 2000, rejected("1 Insufficient aliyun.com/gpu-mem, 1 node(s) had untolerated taint(s)"))), Pod: "p",
			Cause: reasons.Fits, Words: "n1 has room for it, 8000 MiB on one card: kube-scheduler found none at its last try, and tries the pod again"},
	}
}

// severalCards are the mistakes of pods that ask for several cards or for cores.
func severalCards() []Mistake {
	return []Mistake{
		{Name: "computing alone", Nodes: two(), Pods: list(pod("p", 0, limits(map[corev1.ResourceName]string{protocol.ResourceCores: "50"}))), Pod: "p",
			NotPending: true, Words: "aliyun.com/gpu-core.percentage alone gives the pod no card: ask for aliyun.com/gpu-mem too"},
		{Name: "computing for a container without memory", Nodes: two(), Pods: list(pod("p", 0, containers(2000, 0), coresOf(1, "50"))), Pod: "p",
			Cause: reasons.InvalidRequest, Words: "no node can give the pod what it asks for: container b: aliyun.com/gpu-core.percentage 50 without aliyun.com/gpu-mem"},
		{Name: "more computing than a card has", Nodes: two(), Pods: list(pod("p", 2000, fake.Cores(150))), Pod: "p",
			Cause: reasons.InvalidRequest, Words: "no node can give the pod what it asks for: aliyun.com/gpu-core.percentage is 150 in total, one card has 100"},
		{Name: "a number of cards that is none", Nodes: two(), Pods: list(pod("p", 2000, cards("two"))), Pod: "p",
			Cause: reasons.InvalidRequest, Words: `no node can give the pod what it asks for: label aliyun.com/gpu-count: "two" is not a number of cards, 1 to 64`},
		{Name: "memory that can't be divided over the cards", Nodes: two(), Pods: list(pod("p", 0, containers(2000, 2001), cards("2"))), Pod: "p",
			Cause: reasons.InvalidRequest, Words: "no node can give the pod what it asks for: container b: aliyun.com/gpu-mem 2001 can't be divided evenly over 2 cards"},
		{Name: "the number of cards as an annotation", Nodes: two(), Pods: list(pod("p", 2000, fake.Annotation(protocol.LabelCount, "2"), fake.Bound("n1", 0))), Pod: "p",
			NotPending: true, Words: "aliyun.com/gpu-count is an annotation of the pod, and must be a label of the pod: the pod gets one card"},
		{Name: "the number of cards as a resource", Nodes: two(), Pods: list(pod("p", 0, limits(map[corev1.ResourceName]string{protocol.ResourceMemory: "2000", protocol.ResourceCount: "2"}), fake.Bound("n1", 0))), Pod: "p",
			NotPending: true, Words: "aliyun.com/gpu-count is a resource of container main, and must be a label of the pod: the pod gets one card"},
		{Name: "the number of cards without memory", Nodes: two(), Pods: list(pod("p", 0, limits(nil), cards("2"), fake.On("n1"))), Pod: "p",
			NotPending: true, Words: "the label aliyun.com/gpu-count alone reserves nothing: ask for aliyun.com/gpu-mem"},
		{Name: "more cards than a node has", Nodes: two(), Pods: list(pod("p", 3000, cards("3"))), Pod: "p",
			Cause: reasons.TooLarge, Words: "3 cards with 1000 MiB free each are needed on one node: no node has as many cards that are large enough; n1 has 2"},
		{Name: "two cards where one has room", Nodes: two(), Pods: taken(pod("p", 5000, cards("2"))), Pod: "p",
			Cause: reasons.Fragmented, Words: "2 cards with 2500 MiB free each are needed on one node: n1 has 1, though enough in sum"},
		{Name: "two cards where none has room", Nodes: two(), Pods: taken(pod("p", 8000, cards("2"))), Pod: "p",
			Cause: reasons.Full, Words: "2 cards with 4000 MiB free each are needed on one node: n1 has none"},
		{Name: "two cards, and one has failed", Nodes: []*corev1.Node{brokenCard(8000)}, Pods: list(pod("p", 4000, cards("2"))), Pod: "p",
			Cause: reasons.Unhealthy, Words: "2 cards with 2000 MiB free each are needed on one node: too few of the cards that are large enough are healthy, on n1"},
		{Name: "computing that no card has left", Nodes: two(), Pods: list(pod("p", 2000, fake.Cores(30)), pod("u0", 1000, fake.Cores(80), fake.Bound("n1", 0)), pod("u1", 1000, fake.Cores(90), fake.Bound("n1", 1)), pod("u2", 1000, fake.Cores(90), fake.Bound("n2", 0))), Pod: "p",
			Cause: reasons.Fragmented, Words: "a card with 2000 MiB and 30% of its computing free is needed: n1 has none, though enough in sum"},
		{Name: "two cards on nodes whose device plugin is too old", Nodes: []*corev1.Node{inventoried(func(i *protocol.Inventory) { i.Features = nil })}, Pods: list(pod("p", 4000, cards("2"))), Pod: "p",
			Cause: reasons.NoNode, Words: "no node that shares GPU memory can take the pod; n1: the node's GPU device plugin is too old for pods with several cards"},
		{Name: "computing on nodes whose device plugin is too old", Nodes: []*corev1.Node{inventoried(func(i *protocol.Inventory) { i.Features = nil })}, Pods: list(pod("p", 4000, fake.Cores(30))), Pod: "p",
			Cause: reasons.NoNode, Words: "no node that shares GPU memory can take the pod; n1: the node's GPU device plugin is too old for aliyun.com/gpu-core.percentage"},
		{Name: "another value of the label for adapters", Nodes: near(), Pods: list(pod("p", 2000, fake.RDMA("true"))), Pod: "p",
			Cause: reasons.InvalidRequest, Words: `no node can give the pod what it asks for: label gpushare.aliyun.com/rdma: "true" is neither preferred nor required: write one of these, or remove the label`},
		{Name: "the label for adapters as an annotation", Nodes: near(), Pods: list(pod("p", 2000, fake.Annotation(protocol.LabelRDMA, "required"), fake.Bound("n1", 0))), Pod: "p",
			NotPending: true, Words: "gpushare.aliyun.com/rdma is an annotation of the pod, and must be a label of the pod: the pod gets no adapter"},
		{Name: "the label for adapters without memory", Nodes: near(), Pods: list(pod("p", 0, limits(nil), fake.RDMA("required"), fake.On("n1"))), Pod: "p",
			NotPending: true, Words: "the label gpushare.aliyun.com/rdma alone gives the pod neither a card nor an adapter: ask for aliyun.com/gpu-mem"},
		{Name: "an adapter on nodes whose device plugin is too old", Nodes: []*corev1.Node{inventoried(func(i *protocol.Inventory) { i.Features = nil })}, Pods: list(pod("p", 2000, fake.RDMA("required"))), Pod: "p",
			Cause: reasons.NoNode, Words: "no node that shares GPU memory can take the pod; n1: the node's GPU device plugin is too old for the label gpushare.aliyun.com/rdma"},
		{Name: "an adapter on nodes without one", Nodes: two(), Pods: list(pod("p", 2000, fake.RDMA("required"))), Pod: "p",
			Cause: reasons.NoNode, Words: "no node that shares GPU memory can take the pod; n1, n2: no GPU card of the node is near an RDMA adapter with an active port"},
		{Name: "an adapter, and the card near it is full", Nodes: near(), Pods: list(pod("p", 2000, fake.RDMA("required")), pod("u", 7000, fake.Bound("n1", 1))), Pod: "p",
			Cause: reasons.Fragmented, Words: "a card near an RDMA adapter with 2000 MiB free is needed: n1 has none, though enough in sum"},
		{Name: "two cards near an adapter where one is near", Nodes: near(), Pods: list(pod("p", 2000, cards("2"), fake.RDMA("required"))), Pod: "p",
			Cause: reasons.TooLarge, Words: "2 cards near an RDMA adapter with 1000 MiB free each are needed on one node: no node has as many cards that are large enough; n1 has 1"},
		{Name: "a limit that is no quantity", Nodes: []*corev1.Node{inventoried(func(*protocol.Inventory) {})}, Pods: list(pod("p", 2000, limitOf("main", "16GB"))), Pod: "p",
			Cause: reasons.InvalidRequest, Words: `no node can give the pod what it asks for: annotated limit of GPU memory of container main: "16GB" is not a quantity: write an amount of bytes such as 16Gi`},
		{Name: "a limit in units", Nodes: []*corev1.Node{inventoried(func(*protocol.Inventory) {})}, Pods: list(pod("p", 2000, limitOf("main", "4000"))), Pod: "p",
			Cause: reasons.InvalidRequest, Words: `no node can give the pod what it asks for: annotated limit of GPU memory of container main: "4000" is less than 1 MiB: write an amount of bytes such as 16Gi`},
		{Name: "a limit of another container", Nodes: []*corev1.Node{inventoried(func(*protocol.Inventory) {})}, Pods: list(pod("p", 2000, limitOf("trainer", "4Gi"))), Pod: "p",
			Cause: reasons.InvalidRequest, Words: `no node can give the pod what it asks for: a limit of GPU memory is annotated for container "trainer", which the pod doesn't have`},
		{Name: "a limit of a container without a request", Nodes: []*corev1.Node{inventoried(func(*protocol.Inventory) {})}, Pods: list(pod("p", 0, containers(2000, 0), limitOf("b", "4Gi"))), Pod: "p",
			Cause: reasons.InvalidRequest, Words: `no node can give the pod what it asks for: container b has an annotated limit of GPU memory, and doesn't ask for any: set aliyun.com/gpu-mem in its resource limits`},
		{Name: "a limit as a label", Nodes: []*corev1.Node{inventoried(func(*protocol.Inventory) {})}, Pods: list(pod("p", 2000, limitLabel("main", "4Gi"), fake.Bound("n1", 0))), Pod: "p",
			NotPending: true, Words: "nvidia.com/container.main.gpu-memory.limit is a label of the pod, and must be an annotation: it limits no container"},
		{Name: "a limit below the request", Nodes: []*corev1.Node{inventoried(func(*protocol.Inventory) {})}, Pods: list(pod("p", 2000, limitOf("main", "1Gi"))), Pod: "p",
			Cause: reasons.NoNode, Words: `no node that shares GPU memory can take the pod; n1: the annotated limit of GPU memory of a container is less than its request: raise the limit`},
		{Name: "a limit that no card has", Nodes: []*corev1.Node{inventoried(func(*protocol.Inventory) {})}, Pods: list(pod("p", 2000, limitOf("main", "8Gi"))), Pod: "p",
			Cause: reasons.NoNode, Words: `no node that shares GPU memory can take the pod; n1: the annotated limit of GPU memory of a container is more than any card of the node has: lower the limit`},
		{Name: "a limit on nodes with MPS", Nodes: []*corev1.Node{inventoried(func(i *protocol.Inventory) { i.Isolation = protocol.IsolationMPS })}, Pods: list(pod("p", 2000, limitOf("main", "4Gi"))), Pod: "p",
			Cause: reasons.NoNode, Words: `no node that shares GPU memory can take the pod; n1: the node enforces GPU memory by MPS, which allows no limit above the request: remove the annotation`},
		{Name: "a limit on nodes whose device plugin is too old", Nodes: []*corev1.Node{inventoried(func(i *protocol.Inventory) { i.Features = nil })}, Pods: list(pod("p", 2000, limitOf("main", "4Gi"))), Pod: "p",
			Cause: reasons.NoNode, Words: `no node that shares GPU memory can take the pod; n1: the node's GPU device plugin is too old for limits above requests`},
		{Name: "more containers than cards take by MPS", Nodes: []*corev1.Node{inventoried(func(i *protocol.Inventory) {
			i.Isolation = protocol.IsolationMPS
			i.Cards[0].MaxContainers, i.Cards[1].MaxContainers = 3, 3
		})}, Pods: list(pod("p", 0, containers(1000, 1000)), pod("u0", 0, containers(1000, 1000), fake.Bound("n1", 0)), pod("u1", 0, containers(1000, 1000), fake.Bound("n1", 1))), Pod: "p",
			Cause: reasons.Crowded, Words: "the cards that have room, on n1, take no more containers by MPS"},
		{Name: "more containers than a card ever takes by MPS", Nodes: []*corev1.Node{inventoried(func(i *protocol.Inventory) {
			i.Isolation = protocol.IsolationMPS
			i.Cards[0].MaxContainers, i.Cards[1].MaxContainers = 2, 2
		})}, Pods: list(pod("p", 0, containers(10, 10, 10))), Pod: "p",
			Cause: reasons.TooLarge, Words: "the pod has 3 containers with GPU memory, and a card takes 2 by MPS, on n1"},
		{Name: "two cards on a node with MPS", Nodes: []*corev1.Node{inventoried(func(i *protocol.Inventory) { i.Isolation = protocol.IsolationMPS })}, Pods: list(pod("p", 4000, cards("2"))), Pod: "p",
			Cause: reasons.NoNode, Words: "no node that shares GPU memory can take the pod; n1: the node enforces GPU memory by MPS, which allows one card for each pod"},
		{Name: "its own shared memory on a node with MPS", Nodes: []*corev1.Node{inventoried(func(i *protocol.Inventory) { i.Isolation = protocol.IsolationMPS })}, Pods: list(pod("p", 4000, fake.SharedMemory)), Pod: "p",
			Cause: reasons.NoNode, Words: "no node that shares GPU memory can take the pod; n1: the node enforces GPU memory by MPS, which allows no volume of the pod at /dev/shm"},
	}
}

// cluster are the mistakes and failures of a cluster.
func cluster() []Mistake {
	const url = "https://10.96.0.5:12345/gpushare-scheduler/"
	closed := func(change func(*corev1.Node)) []*corev1.Node {
		return []*corev1.Node{edited(node("n1", 8000), change)}
	}
	return []Mistake{
		{Name: "no node shares its cards", Pods: list(pod("p", 2000, rejected("2 Insufficient aliyun.com/gpu-mem"))), Pod: "p",
			Cause: reasons.NoNode, Words: "no node shares GPU memory"},
		{Name: "the extender is down", Nodes: two(), Pods: list(pod("p", 2000, failed(`Post "`+url+`filter": dial tcp 10.96.0.5:12345: connect: connection refused`))), Pod: "p",
			Cause: reasons.SchedulerError, Words: "the extender does not answer kube-scheduler's filter call: dial tcp 10.96.0.5:12345: connect: connection refused"},
		{Name: "the extender is down, and no room", Nodes: two(), Pods: taken(pod("p", 4000, failed(`Post "`+url+`filter": context deadline exceeded (Client.Timeout exceeded while awaiting headers)`))), Pod: "p",
			Cause: reasons.SchedulerError, Words: "the extender does not answer kube-scheduler's filter call: context deadline exceeded (Client.Timeout exceeded while awaiting headers)"},
		{Name: "only a standby answers", Nodes: two(), Pods: list(pod("p", 2000, failed("failed prioritize with extender at URL "+url+"prioritize, code 503"))), Pod: "p",
			Cause: reasons.SchedulerError, Words: "kube-scheduler's prioritize call of the extender fails: HTTP status 503"},
		{Name: "a certificate that the extender doesn't allow", Nodes: two(), Pods: list(pod("p", 2000, failed("failed filter with extender at URL "+url+"filter, code 403"))), Pod: "p",
			Cause: reasons.SchedulerError, Words: "kube-scheduler's filter call is rejected with HTTP status 403: the extender's --client-names doesn't have the common name of its certificate, or a proxy is between them"},
		{Name: "kube-scheduler calls the web page", Nodes: two(), Pods: list(pod("p", 2000, failed("failed filter with extender at URL "+url+"filter, code 405"))), Pod: "p",
			Cause: reasons.SchedulerError, Words: "kube-scheduler's filter call of the extender fails: HTTP status 405: urlPrefix in kube-scheduler's configuration must have the port of --listen-address, not that of the web page, and end with /gpushare-scheduler"},
		{Name: "kube-scheduler calls an extender with a certificate by http", Nodes: two(), Pods: list(pod("p", 2000, failed("failed filter with extender at URL "+url+"filter, code 400"))), Pod: "p",
			Cause: reasons.SchedulerError, Words: "kube-scheduler's filter call of the extender fails: HTTP status 400: if the extender has a certificate, urlPrefix in kube-scheduler's configuration must start with https://"},
		{Name: "a webhook rejects the bind", Nodes: two(), Pods: list(pod("p", 2000, failed(`binding the pod: admission webhook "x" denied the request`))), Pod: "p",
			Cause: reasons.SchedulerError, Words: `kube-scheduler reports an error, and tries the pod again: binding the pod: admission webhook "x" denied the request`},
		{Name: "a cordoned node", Nodes: closed(func(n *corev1.Node) { n.Spec.Unschedulable = true }), Pods: list(pod("p", 2000, rejected("2 node(s) were unschedulable"))), Pod: "p",
			Cause: reasons.NoNode, Words: "no node that shares GPU memory can take the pod; n1: the node is cordoned"},
		{Name: "a cordoned node that the pod tolerates, and no room", Nodes: closed(func(n *corev1.Node) {
			n.Spec.Unschedulable = true
			n.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}}
		}), Pods: list(pod("p", 4000, pinned("n1"), tolerates(corev1.TaintNodeUnschedulable)), pod("u", 5000, fake.Bound("n1", 0))), Pod: "p",
			Cause: reasons.Full, Words: "the cards that are large enough are taken: the largest free piece is 3000 MiB, on n1"},
		{Name: "a node that isn't ready", Nodes: closed(func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionUnknown }), Pods: list(pod("p", 2000)), Pod: "p",
			Cause: reasons.NoNode, Words: "no node that shares GPU memory can take the pod; n1: the node is not ready"},
		{Name: "a node that isn't ready, which the pod tolerates, and no room", Nodes: closed(func(n *corev1.Node) {
			n.Status.Conditions[0].Status = corev1.ConditionUnknown
			n.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeUnreachable, Effect: corev1.TaintEffectNoSchedule}}
		}), Pods: list(pod("p", 4000, tolerates("")), pod("u", 5000, fake.Bound("n1", 0))), Pod: "p",
			Cause: reasons.Full, Words: "the cards that are large enough are taken: the largest free piece is 3000 MiB, on n1"},
		{Name: "the device plugin is gone", Nodes: closed(func(n *corev1.Node) {
			n.Status.Allocatable[protocol.ResourceMemory] = *resource.NewQuantity(0, resource.DecimalSI)
		}), Pods: list(pod("p", 2000)), Pod: "p",
			Cause: reasons.NoNode, Words: "no node that shares GPU memory can take the pod; n1: the device plugin is not connected: nothing of aliyun.com/gpu-mem is allocatable"},
		{Name: "the card that is large enough has failed", Nodes: []*corev1.Node{brokenCard(4000)}, Pods: list(pod("p", 5000)), Pod: "p",
			Cause: reasons.Unhealthy, Words: "the cards that are large enough are unhealthy, on n1"},
		{Name: "pods on a failed card still count", Nodes: []*corev1.Node{brokenCard(8000)},
			Pods: list(pod("p", 2000, rejected("2 Insufficient aliyun.com/gpu-mem")), pod("u", 7000, fake.Bound("n1", 1))), Pod: "p",
			Cause: reasons.FailedCard, Words: "n1 has room for it, 8000 MiB on one card, but kube-scheduler counts the node's sum: GPU1 has failed and no longer counts, but the pods on it do until they end"},
		{Name: "free memory in pieces", Nodes: two(), Pods: taken(pod("p", 4000)), Pod: "p",
			Cause: reasons.Fragmented, Words: "5000 MiB free on n1, but the largest piece is 3000 MiB: a pod gets one card"},
		{Name: "full cards", Nodes: []*corev1.Node{node("n1", 8000), node("n2", 8000), node("n3", 8000), node("n4", 8000)},
			Pods: list(pod("p", 4000), pod("u1", 5000, fake.Bound("n1", 0)), pod("u2", 5000, fake.Bound("n2", 0)), pod("u3", 5000, fake.Bound("n3", 0)), pod("u4", 6000, fake.Bound("n4", 0))), Pod: "p",
			Cause: reasons.Full, Words: "the cards that are large enough are taken: the largest free piece is 3000 MiB, on n1"},
		{Name: "a pod with nodeName and without a card", Nodes: []*corev1.Node{node("n1", 8000)}, Pods: list(pod("p", 4000), pod("u", 5000, fake.On("n1"))), Pod: "p",
			Cause: reasons.Full, Words: "the cards that are large enough are taken: the largest free piece is 3000 MiB, on n1"},
		{Name: "a pod that is terminating", Nodes: two()[1:], Pods: list(pod("p", 4000), pod("u1", 3000, fake.Bound("n2", 0), terminating(20*time.Second)), pod("u2", 3000, fake.Bound("n2", 0), terminating(10*time.Second))), Pod: "p",
			Cause: reasons.WaitsForTermination, Words: "n2 has room for it once default/u2 (and 1 more) has ended, terminating since 2026-07-01T11:59:50Z"},
		{Name: "a pod that doesn't end", Nodes: two()[1:], Pods: list(pod("p", 4000), pod("u", 6000, fake.Bound("n2", 0), terminating(time.Hour))), Pod: "p",
			Cause: reasons.WaitsForTermination, Words: "n2 has room for it once default/u has ended, terminating since 2026-07-01T11:00:00Z; it should have ended by 2026-07-01T11:00:30Z: its node or driver may hang"},
		{Name: "a pod of higher priority is nominated", Nodes: two()[1:], Pods: list(pod("p", 4000), pod("high", 6000, fake.Nominated("n2"), fake.Priority(100))), Pod: "p",
			Cause: reasons.KeptForNominated, Words: "n2 has room for it, 8000 MiB on one card, but keeps it for default/high, which is nominated to that node"},
		{Name: "pods leave for a nominated pod", Nodes: two()[1:], Pods: list(pod("p", 6000, fake.Nominated("n2"), fake.Priority(100)), pod("low", 8000, fake.Bound("n2", 0), terminating(time.Second))), Pod: "p",
			Cause: reasons.Nominated, Words: "pods of lower priority are leaving n2 to make room for it"},
		{Name: "pods have left for a nominated pod", Nodes: two()[1:], Pods: list(pod("p", 6000, fake.Nominated("n2"), fake.Priority(100))), Pod: "p",
			Cause: reasons.Nominated, Words: "it is nominated to n2, which has GPU memory for it: it is tried there next, or pods of lower priority that use none are still leaving"},
		{Name: "pods have left for a nominated pod, and the extender is down", Nodes: two()[1:],
			Pods: list(pod("p", 6000, fake.Nominated("n2"), fake.Priority(100), failed(`Post "`+url+`filter": dial tcp 10.96.0.5:12345: connect: connection refused`))), Pod: "p",
			Cause: reasons.SchedulerError, Words: "the extender does not answer kube-scheduler's filter call: dial tcp 10.96.0.5:12345: connect: connection refused"},
		{Name: "memory is kept for a group", Nodes: two(), Pods: list(pod("p", 4000, rejected("1 Insufficient aliyun.com/gpu-mem, 1 free GPU memory is kept for group default/train.v1"))), Pod: "p",
			Cause: reasons.ReservedForOther, Words: "n1 has room for it, 8000 MiB on one card, but free GPU memory is kept for group default/train.v1, which came first"},
		{Name: "a node with NVIDIA's device plugin too", Nodes: closed(func(n *corev1.Node) {
			n.Status.Capacity["nvidia.com/gpu"] = *resource.NewQuantity(1, resource.DecimalSI)
		}), Pods: list(pod("p", 4000)), Pod: "p",
			Cause: reasons.NoNode, Words: "no node that shares GPU memory can take the pod; n1: the node also offers its cards by nvidia.com/gpu or DRA, which excludes sharing them"},
	}
}

// groups are the mistakes in groups.
func groups() []Mistake {
	wait := func(text string) *diagnosis.GroupWait {
		reason, _ := reasons.ParseGroup(text)
		return &diagnosis.GroupWait{Group: "default/train", Reason: reason, Since: Now.Add(-age)}
	}
	const size, name = protocol.AnnotationGroupSize, protocol.AnnotationGroupName
	otherScheduler := reasons.GroupAwaitsOthers.OfSchedulers([]string{corev1.DefaultSchedulerName, "volcano"})
	return []Mistake{
		{Name: "members that disagree on the size", Nodes: two(), Pods: list(pod("gd1", 2000, member("2")), pod("gd2", 2000, member("3"))), Pod: "gd1",
			Wait:  wait("gang: invalid group: the members disagree on the group's size: gd1 says 2, gd2 says 3"),
			Cause: reasons.InvalidGroup, Words: "group default/train is invalid: the members disagree on the group's size: gd1 says 2, gd2 says 3"},
		{Name: "a size that is no number", Nodes: two(), Pods: list(pod("p", 2000, member("two"))), Pod: "p",
			Wait:  wait(`gang: invalid group: the group's size is not a positive integer up to 100000: annotation ` + size + ` is "two"`),
			Cause: reasons.InvalidGroup, Words: `group default/train is invalid: the group's size is not a positive integer up to 100000: annotation ` + size + ` is "two"`},
		{Name: "a group without a size", Nodes: two(), Pods: list(pod("p", 2000, fake.Annotation(name, "train"))), Pod: "p",
			Wait:  wait("gang: invalid group: the pod has a group name and no group size: annotation " + size + " is missing"),
			Cause: reasons.InvalidGroup, Words: "group default/train is invalid: the pod has a group name and no group size: annotation " + size + " is missing"},
		{Name: "a group without a name", Nodes: two(), Pods: list(pod("p", 2000, fake.Annotation(size, "2"))), Pod: "p",
			Wait:  &diagnosis.GroupWait{Group: "default/", Reason: reasons.GroupInvalid("the pod has a group size and no group name: annotation " + name + " is missing")},
			Cause: reasons.InvalidGroup, Words: "its group, which has no name, is invalid: the pod has a group size and no group name: annotation " + name + " is missing"},
		{Name: "the size as a label", Nodes: two(), Pods: list(pod("p", 2000, fake.Annotation(name, "train"), label(size, "2"))), Pod: "p",
			Wait:  wait("gang: invalid group: the pod has a group name and no group size: " + size + " must be an annotation of the pod"),
			Cause: reasons.InvalidGroup, Words: "group default/train is invalid: the pod has a group name and no group size: " + size + " must be an annotation of the pod"},
		{Name: "both keys as labels", Nodes: two(), Pods: list(pod("p", 2000, label(name, "train"), label(size, "2"), fake.Bound("n1", 0))), Pod: "p",
			NotPending: true, Words: name + " is a label of the pod, and must be an annotation: the pod is in no group"},
		{Name: "a PodGroup of scheduler-plugins", Nodes: two(), Pods: list(pod("p", 2000, label("scheduling.x-k8s.io/pod-group", "train"), fake.Bound("n1", 0))), Pod: "p",
			NotPending: true, Words: "label scheduling.x-k8s.io/pod-group names a PodGroup that gpushare doesn't read: the pod is in no group unless annotation " + size + " says how many members it has"},
		{Name: "a label for the name of a group, without a group", Nodes: two(), Pods: list(pod("p", 2000, fake.Annotation(protocol.AnnotationGroupLabel, "x"), fake.Bound("n1", 0))), Pod: "p",
			NotPending: true, Words: "annotation " + protocol.AnnotationGroupLabel + " has no effect without " + name + ": the pod is in no group"},
		{Name: "annotations and labels that contradict each other", Nodes: two(), Pods: list(pod("p", 2000, member("2"),
			label(protocol.LabelGroupName, "train"), label(protocol.LabelGroupSize, "3"))), Pod: "p",
			Wait:  wait(`gang: invalid group: the pod's annotations and labels disagree on its group: annotations say "train" of 2, labels say "train" of 3`),
			Cause: reasons.InvalidGroup, Words: `group default/train is invalid: the pod's annotations and labels disagree on its group: annotations say "train" of 2, labels say "train" of 3`},
		{Name: "a member that is missing", Nodes: two(), Pods: list(pod("p", 2000, member("2"))), Pod: "p",
			Wait:  wait("gang: 1 of 2 members exist"),
			Cause: reasons.WaitsForGroup, Words: "group default/train waits: 1 of 2 members exist"},
		{Name: "a member that lacks CPU", Nodes: two(), Pods: list(pod("p", 2000, member("2"), rejected("2 Insufficient cpu")), pod("q", 2000, member("2"))), Pod: "p",
			Wait:  &diagnosis.GroupWait{Group: "default/train", Reason: reasons.GroupAwaitsOthers},
			Cause: reasons.OtherConstraint, Words: "n1 has room for it, 8000 MiB on one card, but kube-scheduler rejects the pod: 2 Insufficient cpu; group default/train waits: kube-scheduler hasn't tried all other members yet"},
		{Name: "a member of another scheduler", Nodes: two(), Pods: list(pod("p", 2000, member("2"), rejected("2 "+otherScheduler.Text())),
			pod("q", 2000, member("2"), func(p *corev1.Pod) { p.Spec.SchedulerName = "volcano" })), Pod: "p",
			Wait:  &diagnosis.GroupWait{Group: "default/train", Reason: otherScheduler},
			Cause: reasons.WaitsForGroup, Words: "group default/train waits: " + otherScheduler.Words},
		{Name: "a member with an invalid size", Nodes: two(), Pods: list(pod("p", 2000, member("2")), pod("q", 2000, member("x"))), Pod: "p",
			Wait:  wait("gang: 1 of 2 members exist; not counted: 1 with scheduling gates or an invalid group, such as q"),
			Cause: reasons.WaitsForGroup, Words: "group default/train waits: 1 of 2 members exist; not counted: 1 with scheduling gates or an invalid group, such as q"},
		{Name: "a member that is larger than any card", Nodes: two(), Pods: list(pod("p", 9000, member("2")), pod("q", 2000, member("2"))), Pod: "p",
			Wait:  &diagnosis.GroupWait{Group: "default/train", Reason: reasons.GroupAwaitsOthers},
			Cause: reasons.TooLarge, Words: "no card is large enough for 9000 MiB: the largest has 8000 MiB, on n1; group default/train waits: kube-scheduler hasn't tried all other members yet"},
	}
}
