package cluster

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/waiting"
)

// PendingPod is a pod that asks for GPU memory and has no node.
type PendingPod struct {
	gpu.Pod
	// Reason is kube-scheduler's message, unchanged.
	Reason string
	// Created is the pod's creation time.
	Created time.Time
	// object is the pod as the cache keeps it, for Explain.
	object *corev1.Pod
}

// pending holds the pending pods, as the watch reports them. The zero value is ready for use. mu guards its fields; its
// methods are safe for concurrent use.
type pending struct {
	mu       sync.RWMutex
	pods     map[gpu.PodUID]PendingPod
	revision uint64 // It increases with each change.
}

// Pending returns the pending pods, ordered by namespace and name, and the revision of that list. If known is the
// current revision, it returns nil without a list.
func (c *Cluster) Pending(known uint64) ([]PendingPod, uint64) { return c.pending.list(known) }

func (p *pending) list(known uint64) ([]PendingPod, uint64) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if known == p.revision {
		return nil, known
	}
	return slices.SortedFunc(maps.Values(p.pods), func(a, b PendingPod) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	}), p.revision
}

// seen updates the entry of a pod that asks for GPU memory.
func (p *pending) seen(pod *corev1.Pod, values gpu.Pod) {
	if pod.Spec.NodeName != "" || pod.DeletionTimestamp != nil || protocol.Terminal(pod) {
		p.gone(values.UID)
		return
	}
	waits := PendingPod{Pod: values, Reason: waiting.SchedulerMessage(pod), Created: pod.CreationTimestamp.Time, object: pod}
	p.mu.Lock()
	defer p.mu.Unlock()
	before, known := p.pods[values.UID]
	if p.pods == nil {
		p.pods = map[gpu.PodUID]PendingPod{}
	}
	p.pods[values.UID] = waits
	if before.object = pod; !known || before != waits {
		p.revision++
	}
}

func (p *pending) object(uid gpu.PodUID) (*corev1.Pod, bool) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	pod, waits := p.pods[uid]
	return pod.object, waits
}

func (p *pending) gone(uid gpu.PodUID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, known := p.pods[uid]; known {
		delete(p.pods, uid)
		p.revision++
	}
}

// Explain returns the diagnosis of each pod against the current state of the nodes.
func (c *Cluster) Explain(pods []PendingPod) []waiting.Diagnosis {
	if len(pods) == 0 {
		return nil
	}
	nominated := map[string]bool{}
	for i := range pods {
		nominated[pods[i].object.Status.NominatedNodeName] = true
	}
	places := c.places()
	for i := range places {
		if name := places[i].Object.Name; nominated[name] {
			places[i].Terminating = c.leavingOn(name)
		}
	}
	explainer := waiting.NewDiagnoser(places)
	out := make([]waiting.Diagnosis, len(pods))
	for i := range pods {
		out[i] = explainer.Diagnose(pods[i].object)
	}
	return out
}

// leavingOn returns the priorities of the pods that should free memory of the node soon.
func (c *Cluster) leavingOn(node string) []int32 {
	return protocol.TerminatingPriorities(c.pods.onNode(node), c.Clock.Now())
}

// reach returns the nodes that the pending pod can use, independent of their free memory.
func (c *Cluster) reach(uid gpu.PodUID) []string {
	pod, waits := c.pending.object(uid)
	if !waits {
		return nil
	}
	return waiting.EligibleNodes(c.places(), pod)
}

func (c *Cluster) places() []waiting.Node {
	offers := c.ledger.NodeCards()
	places := make([]waiting.Node, 0, len(offers))
	for _, s := range offers {
		node, err := c.nodes.Get(s.Name)
		if err != nil {
			continue // The node was just deleted.
		}
		places = append(places, waiting.Node{Object: node, Unit: s.Unit, Cards: s.Cards, Closed: s.Closed})
	}
	return places
}

// keepWaiting copies to out the fields of a pod without a node that the list of pending pods and their diagnosis use.
func keepWaiting(out, pod *corev1.Pod) {
	out.CreationTimestamp = pod.CreationTimestamp
	out.Spec.SchedulerName = pod.Spec.SchedulerName
	out.Spec.SchedulingGates = pod.Spec.SchedulingGates
	out.Spec.NodeSelector, out.Spec.Tolerations = pod.Spec.NodeSelector, pod.Spec.Tolerations
	if pod.Spec.Affinity != nil && pod.Spec.Affinity.NodeAffinity != nil {
		affinity := corev1.Affinity{NodeAffinity: pod.Spec.Affinity.NodeAffinity}
		if out.Spec.Affinity != nil { // It is a mark from markInterference.
			affinity.PodAntiAffinity = out.Spec.Affinity.PodAntiAffinity
		}
		out.Spec.Affinity = &affinity
	}
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled {
			out.Status.Conditions = []corev1.PodCondition{condition}
		}
	}
}
