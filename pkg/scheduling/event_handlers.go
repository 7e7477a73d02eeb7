package scheduling

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// eventHandlers is the Scheduler in its part as clustercache.Handler, and as binding.Listener for what live reads show: it applies the changes of
// the cluster to the ledger and to everything that keeps state of pods.
type eventHandlers Scheduler

// PodUpdated implements clustercache.Handler. Groups and fair sharing come last, when the ledger is up to date.
func (h *eventHandlers) PodUpdated(old, pod *clustercache.PodInfo) {
	if old != nil && old.UID != pod.UID { // While the watch was interrupted, the old pod was deleted and another pod was created with its name.
		h.PodDeleted(old)
		old = nil
	}
	if pod.Ended {
		h.nodes.DeletePod(pod.UID)
	} else {
		h.nodes.SetPod(&pod.PodUse)
	}
	h.nominator.Updated(pod)
	h.reportBypass(old, pod)
	if pod.Ended && old != nil && !old.Ended {
		h.resourcesFreed(pod)
	}
	switch {
	case !pod.Managed: // The ledger doesn't have the pod, and no bind of it is open.
	case pod.Ended:
		h.podGone(pod.UID)
	case pod.Node != "":
		h.binder.PodBound(pod)
		h.notPending(pod.UID)
	case pod.Request == 0:
	case h.preemptors.Renew(pod.Pod, pod.NominatedNode): // The ledger keeps its place as a nomination.
	case pod.NominatedNode != "" && !pod.Gated: // A pod with a gate may wait for long.
		h.ledger.Nominate(pod.NominatedNode, pod.Pod)
	case h.nominator.Keeps(pod.UID):
	default:
		h.ledger.End(ledger.Nominated, string(pod.UID))
	}
	h.groups.updated(old, pod)
	h.fair.updated(pod)
	h.expectations.updated(old, pod)
}

// PodDeleted implements clustercache.Handler. The gang's manager comes first: otherwise the gang would see the lost allocation
// before the deletion that explains it.
func (h *eventHandlers) PodDeleted(pod *clustercache.PodInfo) {
	h.nodes.DeletePod(pod.UID)
	h.expectations.deleted(pod)
	h.groups.deleted(pod)
	h.podGone(pod.UID)
	h.fair.deleted(pod)
	h.resourcesFreed(pod)
}

// resourcesFreed passes on that a pod doesn't use its node any more. If it had no GPU memory, the ledger doesn't report that.
func (h *eventHandlers) resourcesFreed(pod *clustercache.PodInfo) {
	h.fair.freed(pod.Node)
	if pod.Request == 0 && h.ledger.HasReserved(pod.Node) {
		h.requeue.Freed(pod.Node)
	}
}

func (h *eventHandlers) podGone(uid gpu.PodUID) {
	h.binder.PodGone(uid)
	h.notPending(uid)
}

// notPending removes what is kept of a pending pod.
func (h *eventHandlers) notPending(uid gpu.PodUID) {
	h.requeue.Forget(uid)
	h.preemptors.Forget(uid)
	h.nominator.Gone(uid)
	h.ledger.End(ledger.Nominated, string(uid))
}

// PodRead implements binding.Listener.
func (h *eventHandlers) PodRead(pod *clustercache.PodInfo) { h.groups.confirmed(pod) }

// PodReadGone implements binding.Listener.
func (h *eventHandlers) PodReadGone(uid gpu.PodUID) { h.groups.confirmedGone(uid) }

// NotBound implements binding.Listener.
func (h *eventHandlers) NotBound(uid gpu.PodUID) {
	h.requeue.Unrestricted(uid)
	h.groups.notBound(uid)
}

// NodeUpdated implements clustercache.Handler.
func (h *eventHandlers) NodeUpdated(object *corev1.Node) {
	node := protocol.ParseNode(object)
	logger := klog.Background().WithValues("node", object.Name)
	if node.Problem != nil {
		logger.Error(node.Problem, "The node's inventory can't be read, or its capacity disagrees with it")
	}
	if node.WholeCards {
		logger.Info("The node also offers its cards by NVIDIA's device plugin or DRA driver, so no pod is placed on it")
	}
	if spec, shares := eligibility.Spec(object, node); shares {
		h.nodes.SetNode(object, &spec)
		h.ledger.SetNode(object.Name, spec)
		h.expectations.nodeChanged(object.Name)
	} else {
		h.nodes.DeleteNode(object.Name)
		h.ledger.DeleteNode(object.Name)
	}
	h.fair.freed(object.Name)
	h.expectations.expectSoon()
}

// NodeDeleted implements clustercache.Handler.
func (h *eventHandlers) NodeDeleted(name string) {
	h.nodes.DeleteNode(name)
	h.ledger.DeleteNode(name)
	h.expectations.expectSoon()
}

// Synced implements clustercache.Handler. With replicas, TakeOver requeues the pending pods.
func (h *eventHandlers) Synced() {
	h.expectations.expectSoon()
	if !h.replicas {
		(*Scheduler)(h).requeuePending()
	}
}
