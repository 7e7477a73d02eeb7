package diagnosis

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	schedulinghelper "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// Node is a node that shares its cards.
type Node struct {
	// Object is the Node object. Its name, labels, taints and allocatable GPU memory are used.
	Object *corev1.Node
	// Unit is the unit of the cards' memory.
	Unit  gpu.Unit
	Cards []placement.Card
	// Support is what the node can give to pods.
	placement.Support
	// Closed is the reason why no new pod can run on the node, see the function Closed; empty if pods can.
	Closed string
	// Requested is the sum of the requests of the node's pods, with those on failed or missing cards.
	Requested gpu.Memory
	// Terminating are the node's pods that are being deleted.
	Terminating []Terminating
	// Nominees are the pods that are nominated to the node and have no allocation yet, in descending order of priority.
	Nominees []ledger.Nominee
}

// Terminating is a pod that is being deleted and still holds its GPU memory.
type Terminating struct {
	gpu.Pod
	// Placement are the pod's cards; empty if they are unknown.
	Placement gpu.Placement
	// Since is when the deletion was requested, Due when the grace period ends. Both are zero if unknown.
	Since, Due time.Time
}

// Overdue reports whether the pod still exists well after its deletion deadline, see protocol.Overdue.
func (t *Terminating) Overdue(now time.Time) bool { return protocol.Overdue(t.Due, now) }

// exclusion is why a pod can't use a node, independent of what its cards have free; the zero value if it can. It is made for each node, and
// its text only for those that are shown.
type exclusion struct {
	// byConstraints is true if the pod's node selector or node affinity excludes the node.
	byConstraints bool
	// reason is what the node lacks.
	reason string
	// key, value and effect are those of a taint that the pod doesn't tolerate.
	key, value string
	effect     corev1.TaintEffect
}

// text returns the exclusion of a pod with the constraints in words.
func (e exclusion) text(c *constraints) string {
	switch {
	case e.byConstraints:
		return c.excludes()
	case e.reason != "":
		return e.reason
	}
	taint := corev1.Taint{Key: e.key, Value: e.value, Effect: e.effect}
	return "the pod doesn't tolerate the taint " + taint.ToString()
}

// exclusion returns why a pod with the constraints can't use the node.
func (n *Node) exclusion(c *constraints) exclusion {
	if ok, err := c.affinity.Match(n.Object); err != nil || !ok {
		return exclusion{byConstraints: true}
	}
	if n.Closed != "" && (Disconnected(n.Object) || !c.toleratesClosed(n.Closed)) {
		return exclusion{reason: n.Closed}
	}
	if reason := n.Accepts(&c.demand); reason != placement.Fits {
		return exclusion{reason: reason.String()}
	}
	taint, untolerated := schedulinghelper.FindMatchingUntoleratedTaint(klog.Background(), n.Object.Spec.Taints, c.spec.Tolerations,
		func(t *corev1.Taint) bool { return t.Effect != corev1.TaintEffectPreferNoSchedule }, true)
	if untolerated {
		return exclusion{key: taint.Key, value: taint.Value, effect: taint.Effect}
	}
	return exclusion{}
}

// allocatable returns the sum of the node's memory that kube-scheduler counts; false if the node doesn't report it.
func (n *Node) allocatable() (gpu.Memory, bool) {
	quantity, known := n.Object.Status.Allocatable[protocol.ResourceMemory]
	return gpu.NewMemory(quantity.Value()), known
}

const (
	cordoned = "the node is cordoned"
	notReady = "the node is not ready"
)

// Closed returns the reasons why no new pod can run on a node that shares its cards, independent of its free memory. It
// depends on the node's resources, its conditions and on whether it is cordoned. wholeCards is protocol.Node.WholeCards.
func Closed(node *corev1.Node, wholeCards bool) []string {
	var reasons []string
	if wholeCards {
		reasons = append(reasons, placement.WholeCards.String())
	}
	if !ready(node) {
		reasons = append(reasons, notReady)
	}
	if Disconnected(node) {
		reasons = append(reasons, "the device plugin is not connected: nothing of "+string(protocol.ResourceMemory)+" is allocatable")
	}
	if node.Spec.Unschedulable {
		reasons = append(reasons, cordoned)
	}
	return reasons
}

func ready(node *corev1.Node) bool {
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady {
			return condition.Status == corev1.ConditionTrue
		}
	}
	return true // No Ready condition yet.
}

// Disconnected reports whether the device plugin is not connected to the kubelet. In that case allocatable becomes zero at
// once, and capacity some minutes later.
func Disconnected(node *corev1.Node) bool {
	capacity := node.Status.Capacity[protocol.ResourceMemory]
	allocatable, known := node.Status.Allocatable[protocol.ResourceMemory]
	_, announced := node.Annotations[protocol.AnnotationInventory]
	return known && allocatable.IsZero() && (announced || !capacity.IsZero())
}
