package eligibility

import (
	"fmt"
	"math"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
)

// freeAmounts counts what pods use of their nodes besides GPU memory. A change of a pod adds the difference to its node. Any order of changes
// leads to the same result: pods can come before their node. mu guards the fields; no other lock is taken while it is held.
type freeAmounts struct {
	mu sync.Mutex
	// pods are the pods that haven't ended.
	pods  map[gpu.PodUID]*PodUse
	nodes map[string]*nodeUse
}

// nodeUse is what the pods of a node use.
type nodeUse struct {
	// allocatable is what pods can use of the node; nil if the node isn't known.
	allocatable Amounts
	// used is what all bound pods use. A resource is counted even if the node doesn't list it: it may do so later.
	used Amounts
}

func newFreeAmounts() freeAmounts {
	return freeAmounts{pods: map[gpu.PodUID]*PodUse{}, nodes: map[string]*nodeUse{}}
}

// setNode sets what pods can use of the node.
func (f *freeAmounts) setNode(name string, allocatable corev1.ResourceList) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.node(name).allocatable = AmountsOf(allocatable)
}

// deleteNode removes the node. Its pods still count, in case it comes back.
func (f *freeAmounts) deleteNode(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n := f.known(name); n != nil {
		n.allocatable = nil
		f.dropUnknown(name, n)
	}
}

// setPod adds or updates a pod, and returns its former state; nil if there was none.
func (f *freeAmounts) setPod(pod *PodUse) (former *PodUse) {
	f.mu.Lock()
	defer f.mu.Unlock()
	former = f.pods[pod.UID]
	f.remove(former)
	f.pods[pod.UID] = pod
	f.count(pod, 1)
	return former
}

// deletePod removes a pod, and returns its last state; nil if there was none.
func (f *freeAmounts) deletePod(uid gpu.PodUID) (last *PodUse) {
	f.mu.Lock()
	defer f.mu.Unlock()
	last = f.pods[uid]
	f.remove(last)
	return last
}

func (f *freeAmounts) remove(pod *PodUse) {
	if pod != nil {
		delete(f.pods, pod.UID)
		f.count(pod, -1)
	}
}

// count adds what the pod uses to its node, times sign.
func (f *freeAmounts) count(pod *PodUse, sign int64) {
	if pod.Node == "" {
		return
	}
	n := f.node(pod.Node)
	for name, amount := range pod.uses() {
		if n.used[name] += sign * amount; n.used[name] == 0 {
			delete(n.used, name)
		}
	}
	f.dropUnknown(pod.Node, n)
}

func (f *freeAmounts) node(name string) *nodeUse {
	n := f.nodes[name]
	if n == nil {
		n = &nodeUse{used: Amounts{}}
		f.nodes[name] = n
	}
	return n
}

// known returns the node; nil if only pods of it are known.
func (f *freeAmounts) known(name string) *nodeUse {
	if n := f.nodes[name]; n != nil && n.allocatable != nil {
		return n
	}
	return nil
}

// dropUnknown drops the node if nothing is known of it any more.
func (f *freeAmounts) dropUnknown(name string, n *nodeUse) {
	if n.allocatable == nil && len(n.used) == 0 {
		delete(f.nodes, name)
	}
}

// FreeResources returns what the bound pods leave of the node beside its cards, which is never negative, and what the node has of that for pods. Of what
// the node doesn't list, everything is free. ok is false if the node isn't known.
func (c *Cluster) FreeResources(name string) (free, all placement.NodeResources, ok bool) {
	f := &c.free
	f.mu.Lock()
	defer f.mu.Unlock()
	n := f.known(name)
	if n == nil {
		return free, all, false
	}
	amounts := func(resource corev1.ResourceName) (free, all int64) {
		allocatable, listed := n.allocatable[resource]
		if !listed {
			return math.MaxInt64, math.MaxInt64
		}
		return max(allocatable-n.used[resource], 0), allocatable
	}
	free.CPU, all.CPU = amounts(corev1.ResourceCPU)
	free.NodeMemory, all.NodeMemory = amounts(corev1.ResourceMemory)
	return free, all, true
}

// Shape implements ledger.Resources.
func (c *Cluster) Shape(uid gpu.PodUID) (shape placement.Shape, ok bool) {
	f := &c.free
	f.mu.Lock()
	defer f.mu.Unlock()
	if pod := f.pods[uid]; pod != nil {
		return pod.Shape(), true
	}
	return placement.Shape{}, false
}

// Requests implements ledger.Resources.
func (c *Cluster) Requests(uid gpu.PodUID) string {
	f := &c.free
	f.mu.Lock()
	pod := f.pods[uid]
	f.mu.Unlock()
	if pod == nil {
		return ""
	}
	return fmt.Sprint(pod.Requests) // It is sorted.
}

// Fits implements ledger.Resources. A node that isn't known, and a pod that isn't, lacks nothing.
func (c *Cluster) Fits(q ledger.ResourceQuery) bool {
	f := &c.free
	f.mu.Lock()
	defer f.mu.Unlock()
	n := f.known(q.Node)
	if n == nil {
		return true
	}
	pods, others := f.allPending(q.Pods), f.allPending(q.Ahead)
	var ending []*PodUse
	for _, uid := range q.Ending {
		if pod := f.pods[uid]; pod != nil && pod.Node == q.Node {
			ending = append(ending, pod)
		}
	}
	for _, pod := range pods {
		for name := range pod.uses() {
			allocatable, listed := n.allocatable[name]
			switch need := sumOf(name, pods); {
			case need <= 0:
			case !listed && q.Listed, listed && need > allocatable-n.used[name]-sumOf(name, others)+sumOf(name, ending):
				return false
			}
		}
	}
	return true
}

// LargestPart implements ledger.Resources.
func (c *Cluster) LargestPart(node string, uids []gpu.PodUID) (most float64) {
	f := &c.free
	f.mu.Lock()
	defer f.mu.Unlock()
	n := f.known(node)
	if n == nil {
		return 0
	}
	pods := f.allPending(uids)
	for name, allocatable := range n.allocatable {
		if need := sumOf(name, pods); need > 0 {
			most = max(most, min(float64(need)/float64(max(allocatable, 1)), 1))
		}
	}
	return most
}

// allPending returns those of the pods that still need a node.
func (f *freeAmounts) allPending(uids []gpu.PodUID) (pending []*PodUse) {
	for _, uid := range uids {
		if pod := f.pods[uid]; pod != nil && pod.pending() {
			pending = append(pending, pod)
		}
	}
	return pending
}

// sumOf returns what the pods use of a resource of their nodes.
func sumOf(name corev1.ResourceName, pods []*PodUse) (sum int64) {
	for _, pod := range pods {
		sum += pod.Use(name)
	}
	return sum
}
