package inspect

import (
	"maps"
	"strconv"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// The clusters for which the outputs are compared.

// twoNodes returns a healthy cluster with the original plugin.
func twoNodes(t *testing.T) Objects {
	return objects(
		[]nodeBuilder{
			legacyNode("cn-shanghai.i-uf61h64", "192.168.0.71", 15, 15),
			legacyNode("cn-beijing.i-2ze", "192.168.0.70", 15),
			plainNode("no-gpu", "192.168.0.72"),
		},
		newPod("binpack-1-a", 7).on("cn-shanghai.i-uf61h64", 1),
		newPod("binpack-1-b", 2).on("cn-shanghai.i-uf61h64", 1).in("ml"),
		newPod("done", 5).on("cn-shanghai.i-uf61h64", 0).phase(corev1.PodSucceeded),
		newPod("no-gpu", 0).plain().bound("cn-shanghai.i-uf61h64"),
	)
}

// absent returns a pod on a node that doesn't exist, and nodes that are labelled for sharing and have no cards.
func absent(t *testing.T) Objects {
	return objects(
		[]nodeBuilder{
			inventoryNode(t, "n", "10.0.0.1", gpu.MiB, t4(0, 16276)),
			plainNode("empty", "10.0.0.2").labelled(protocol.LabelShared, "true"),
			plainNode("no-gpu", "10.0.0.3").labelled(protocol.LabelShared, "false"),
			plainNode("pool", "10.0.0.4").labelled(protocol.LabelShared, "pool-b"),
		},
		newPod("p", 2000).on("n", 0), newPod("lost", 4000).on("gone", 0), newPod("ended", 1).on("gone", 0).phase(corev1.PodFailed),
	)
}

// bypassed returns a node with two pods that a scheduler bound without the extender. For one of them the node has chosen a card.
func bypassed(t *testing.T) Objects {
	served := newPod("served", 4).on("n", 0).with(fake.BoundWithoutExtender("n"))
	assignment := protocol.Assignment{Cards: []protocol.AssignedCard{{Index: 0, Memory: 16}}, Request: 4, AssumeTime: time.Unix(7, 0), Assigned: true, AssignTime: time.Unix(7, 0)}
	maps.Copy(served.Annotations, assignment.Annotations())
	return objects([]nodeBuilder{inventoryNode(t, "n", "10.0.0.1", gpu.GiB, t4(0, 16))},
		newPod("by-extender", 1).on("n", 0), newPod("new", 2).bound("n").with(fake.BoundWithoutExtender("n")), served, newPod("nodename", 3).bound("n"))
}

// sick returns a node with all kinds of problems of cards and pods, and pending pods.
func sick(t *testing.T) Objects {
	numa := t4(0, 16)
	numa.NUMANode = 1
	return objects(
		[]nodeBuilder{inventoryNode(t, "node-a", "10.0.0.1", gpu.GiB, numa, unhealthy(t4(1, 16), "Xid 79: fell off the bus"))},
		newPod("over", 10).on("node-a", 0),
		newPod("under", 8).on("node-a", 0).terminating(),
		newPod("vanished", 3).on("node-a", 7),
		newPod("cardless", 4).bound("node-a").phase(corev1.PodPending),
		newPod("garbled", 1).bound("node-a").with(func(p *corev1.Pod) { p.Annotations[protocol.AnnotationIndex] = "x\x1b[2J" }),
		newPod("waiting", 20).refused("0/3 nodes are available: 2 no GPU card has enough free memory, "+
			"1 node(s) were unschedulable. preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling."),
		newPod("fresh", 2).in("ml"),
		newPod("going", 2).terminating(),
	)
}

// trouble returns the sick node and nodes that take no pods.
func trouble(t *testing.T) Objects {
	all := sick(t)
	all.Nodes = append(all.Nodes,
		inventoryNode(t, "node-b", "10.0.0.2", gpu.GiB, t4(0, 16)).offers(protocol.ResourceWholeCard, 1).Node,
		inventoryNode(t, "node-c", "10.0.0.3", gpu.GiB, t4(0, 16)).with(func(n *corev1.Node) {
			n.Status.Allocatable[protocol.ResourceMemory] = resource.MustParse("0")
			n.Status.Conditions[0].Status = corev1.ConditionUnknown
			n.Spec.Unschedulable = true
		}).Node)
	return all.plus(newPod("both", 6).bound("node-c").with(func(p *corev1.Pod) {
		p.Annotations[protocol.AnnotationAllocation] = `{"main":{"0":4},"side":{"0":2}}`
	}))
}

// refused returns pods that kube-scheduler refused, and one that is being deleted.
func refused(t *testing.T) Objects {
	return split(t,
		newPod("large", 17).in("ml").refused("0/2 nodes are available: 2 too large. preemption: not helpful."),
		newPod("piece", 12).refused("0/2 nodes are available: 2 no GPU card has enough free memory."),
		newPod("going", 1).terminating(),
	)
}

// mixed returns a cluster of nodes with different units.
func mixed(t *testing.T) Objects {
	return objects(
		[]nodeBuilder{
			inventoryNode(t, "in-gib", "10.0.0.1", gpu.GiB, t4(0, 16), t4(2, 16)),
			inventoryNode(t, "in-mib", "10.0.0.2", gpu.MiB, t4(0, 16276)),
			inventoryNode(t, "in-256", "10.0.0.3", 256*gpu.MiB, t4(0, 60)),
		},
		newPod("a", 2).on("in-gib", 2),
		newPod("b", 8138).on("in-mib", 0),
		newPod("c", 4).on("in-256", 0),
	)
}

// failing returns a node with a healthy card, which a pod uses, and an unhealthy one.
func failing(t *testing.T) Objects {
	numa := t4(0, 16)
	numa.NUMANode = 1
	return objects([]nodeBuilder{inventoryNode(t, "n", "10.0.0.1", gpu.GiB, numa, unhealthy(t4(1, 16), "Xid 79"))},
		newPod("fine", 9).on("n", 0))
}

// split returns a cluster of two nodes with two cards each. The cards of n1 have 7 and 5 GiB free, those of n2 nothing.
func split(t *testing.T, pods ...podBuilder) Objects {
	return objects(
		[]nodeBuilder{
			inventoryNode(t, "n1", "10.0.0.1", gpu.GiB, t4(0, 16), t4(1, 16)).labelled("disk", "ssd"),
			inventoryNode(t, "n2", "10.0.0.2", gpu.GiB, t4(0, 16), t4(1, 16)).labelled("disk", "hdd"),
		},
		append(pods, newPod("a", 9).on("n1", 0), newPod("b", 11).on("n1", 1), newPod("c", 16).on("n2", 0), newPod("d", 16).on("n2", 1))...,
	)
}

// severalCards returns a node that counts cores, with pods that have several cards and cores, one of the original plugin, and pending
// pods.
func severalCards(t *testing.T) Objects {
	cards := []gpu.Card{t4(0, 16), t4(1, 16), t4(2, 16)}
	node := inventoryNode(t, "node-a", "10.0.0.1", gpu.GiB, cards...).with(func(n *corev1.Node) {
		text, err := protocol.Inventory{
			Unit: gpu.GiB, Cards: cards, Features: []string{protocol.FeatureCards, protocol.FeatureCores},
		}.Annotation()
		check.Must(t, err)
		n.Annotations[protocol.AnnotationInventory] = text
	})
	return objects([]nodeBuilder{node, legacyNode("node-b", "10.0.0.2", 16)},
		newPod("tensor", 16).over(2).cores(100).onCards("node-a", "0,2"),
		newPod("half", 4).cores(60).on("node-a", 2),
		newPod("one", 6).on("node-a", 1),
		newPod("other", 2).on("node-b", 0),
		newPod("pair", 20).over(2).cores(50),
		newPod("slow", 4).cores(100),
		newPod("uneven", 5).over(2),
	)
}

// over divides the pod's request over cards.
func (p podBuilder) over(cards int) podBuilder {
	p.Labels = map[string]string{protocol.LabelCount: strconv.Itoa(cards)}
	return p
}

func (p podBuilder) cores(percent int64) podBuilder {
	p.Spec.Containers[0].Resources.Limits[protocol.ResourceCores] = *resource.NewQuantity(percent, resource.DecimalSI)
	return p
}

// onCards binds the pod to several cards.
func (p podBuilder) onCards(node, indexes string) podBuilder {
	p.Annotations[protocol.AnnotationIndex] = indexes
	return p.bound(node)
}

func (p podBuilder) with(change func(*corev1.Pod)) podBuilder {
	change(p.Pod)
	return p
}

func nothing(*testing.T) Objects { return Objects{} }

// withAdapters has a node with an adapter near one of its cards, and a node without adapters.
func withAdapters(t *testing.T) Objects {
	near, far := t4(0, 16), t4(1, 16)
	near.RDMAPorts = "mlx5_1:1"
	nodes := []*corev1.Node{
		withInventory(t, "rdma", "10.0.0.1", protocol.Inventory{Unit: gpu.GiB, Cards: []gpu.Card{near, far}, Adapters: []gpu.Adapter{
			{Name: "mlx5_1", Device: "uverbs1", ActivePorts: []int{1}, LinkLayer: "Ethernet", PCIAddress: "0000:3b:00.0", NUMANode: 1},
			{Name: "mlx5_0", Device: "uverbs0", NUMANode: gpu.NoNUMANode},
		}}).Node,
		withInventory(t, "without", "10.0.0.2", protocol.Inventory{Unit: gpu.GiB, Cards: []gpu.Card{t4(0, 16), t4(1, 16)}}).Node,
	}
	return Objects{Nodes: nodes}
}

// simulated has two nodes for a trial and a real one.
func simulated(t *testing.T) Objects {
	node := func(name string, simulated bool) *corev1.Node {
		return withInventory(t, name, "10.0.0.1", protocol.Inventory{Unit: gpu.GiB, Cards: []gpu.Card{t4(0, 16)}, Simulated: simulated}).Node
	}
	return Objects{Nodes: []*corev1.Node{node("kind-a", true), node("kind-b", true), node("real", false)}}
}
