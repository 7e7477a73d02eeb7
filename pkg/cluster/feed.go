package cluster

import (
	"errors"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/waiting"
)

// podEvents returns the event handlers that apply changes of pods to the ledger.
func (c *Cluster) podEvents() cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(object any) {
			if pod, ok := podOf(object); ok {
				c.podSeen(pod)
			}
		},
		UpdateFunc: func(before, after any) {
			pod, ok := podOf(after)
			if !ok {
				return
			}
			if old, known := before.(*packed); known {
				c.gangs.changed(old, pod)
				if old.UID != pod.UID {
					// While the watch was interrupted, the old pod was deleted and another pod was created with its
					// name.
					c.podGone(gpu.PodUID(old.UID))
				}
			}
			c.podSeen(pod)
		},
		DeleteFunc: func(object any) {
			if unknown, ok := object.(cache.DeletedFinalStateUnknown); ok {
				object = unknown.Obj
			}
			if pod, ok := podOf(object); ok {
				// This comes first: otherwise the gang would see the lost allocation before the deletion that explains
				// it.
				c.gangs.gone(pod)
				c.podGone(gpu.PodUID(pod.UID))
			}
		},
	}
}

func (c *Cluster) podSeen(pod *corev1.Pod) {
	// This comes last, when the ledger is up to date.
	defer c.gangs.seen(pod)
	seen := protocol.Pod(pod)
	if seen.Request == 0 {
		return
	}
	c.pending.seen(pod, seen)
	switch {
	case protocol.Terminal(pod):
		c.podGone(seen.UID)
	case pod.Spec.NodeName != "":
		open, lost := c.settler.seen(seen.UID)
		hold(c.ledger, pod)
		if lost {
			c.settler.settled(klog.Background(), open, OutcomeBound)
		}
		c.waker.forget(seen.UID)
		c.attempts.forget(seen.UID)
		c.evictor.forget(seen.UID)
		c.ledger.RemoveNomination(seen.UID)
	case c.evictor.holds(seen, pod.Status.NominatedNodeName): // The ledger keeps that card.
	case pod.Status.NominatedNodeName != "":
		c.ledger.Nominate(pod.Status.NominatedNodeName, seen)
	default:
		c.ledger.RemoveNomination(seen.UID)
	}
}

func (c *Cluster) podGone(uid gpu.PodUID) {
	c.pending.gone(uid)
	open, lost := c.settler.seen(uid)
	c.ledger.Remove(uid)
	if lost {
		c.settler.settled(klog.Background(), open, OutcomeGone)
	}
	c.ledger.RemoveNomination(uid)
	c.waker.forget(uid)
	c.attempts.forget(uid)
	c.evictor.forget(uid)
}

// hold sets the bound allocation of the pod in the ledger, as the Pod object says.
func hold(l *ledger.Ledger, pod *corev1.Pod) {
	where, err := protocol.PodPlacement(pod)
	if err != nil && !errors.Is(err, protocol.ErrNotAssumed) {
		klog.Background().Info("The pod's card can't be read: room is kept where the node is likely to put it",
			"pod", klog.KObj(pod), "node", pod.Spec.NodeName, "err", err)
	}
	assignment, _ := protocol.ParseAssignment(pod.Annotations)
	l.SetBound(pod.Spec.NodeName, protocol.Pod(pod), where, assignment.AssumeTime)
}

// nodeEvents returns the event handlers that apply changes of nodes to the ledger.
func (c *Cluster) nodeEvents() cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(object any) { c.nodeSeen(object.(*corev1.Node)) },
		UpdateFunc: func(before, after any) {
			old, node := before.(*corev1.Node), after.(*corev1.Node)
			// Most updates of a Node change none of the fields that the ledger uses.
			if !maps.Equal(old.Annotations, node.Annotations) || !sameResources(old.Status.Capacity, node.Status.Capacity) ||
				!slices.Equal(waiting.Closed(old, false), waiting.Closed(node, false)) {
				c.nodeSeen(node)
			}
		},
		DeleteFunc: func(object any) {
			if unknown, ok := object.(cache.DeletedFinalStateUnknown); ok {
				object = unknown.Obj
			}
			if node, ok := object.(*corev1.Node); ok {
				c.ledger.DeleteNode(node.Name)
			}
		},
	}
}

func (c *Cluster) nodeSeen(node *corev1.Node) {
	parsed := protocol.ParseNode(node)
	logger := klog.Background().WithValues("node", node.Name)
	if parsed.Problem != nil {
		logger.Info("The node's inventory and its capacity disagree", "err", parsed.Problem)
	}
	if parsed.WholeCards {
		logger.Info("The node offers whole cards and GPU memory at once: nothing is placed on it")
	}
	if len(parsed.Cards) == 0 && !parsed.WholeCards {
		c.ledger.DeleteNode(node.Name)
		return
	}
	spec := ledger.NodeSpec{Unit: parsed.Unit, Cards: parsed.Cards, WholeCards: parsed.WholeCards}
	if reasons := waiting.Closed(node, parsed.WholeCards); len(reasons) > 0 {
		spec.Closed = reasons[0]
	}
	c.ledger.SetNode(node.Name, spec)
}

func sameResources(a, b corev1.ResourceList) bool {
	if len(a) != len(b) {
		return false
	}
	for name, quantity := range a {
		other, ok := b[name]
		if !ok || quantity.Cmp(other) != 0 {
			return false
		}
	}
	return true
}
