package scheduling

import (
	"cmp"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
)

// freeResources caches the free resources of nodes besides GPU memory: what the bound pods leave. Plans of gangs can
// read thousands of nodes under the ledger's lock, and most nodes don't change between two plans. A node is
// computed when it is first read, and cached until it or one of its pods changes. mu guards nodes.
type freeResources struct {
	cache capacityCache
	mu    sync.Mutex
	nodes map[string]*nodeResources
}

// capacityCache is the part of package clustercache that counts free resources.
type capacityCache interface {
	Node(name string) (*corev1.Node, bool)
	PodsOn(node string) []*clustercache.PodInfo
	PendingPod(uid gpu.PodUID) (*clustercache.PodInfo, bool)
}

// nodeResources is what is kept of a node. It is never changed after it was built.
type nodeResources struct {
	object *corev1.Node
	// bound and nominated are the pods of the node.
	bound, nominated []*clustercache.PodInfo
	// free is what the bound pods leave of each resource that the node lists, negative if they use too much. withoutGPU
	// is the same if only those pods count that ask for no GPU memory.
	free, withoutGPU map[corev1.ResourceName]int64
}

func newFreeResources(cache capacityCache) *freeResources {
	return &freeResources{cache: cache, nodes: map[string]*nodeResources{}}
}

// podsChanged drops the cached nodes of the pods. The cluster cache must have the change already. A pod can be nil.
func (f *freeResources) podsChanged(pods ...*clustercache.PodInfo) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, pod := range pods {
		if pod != nil {
			delete(f.nodes, cmp.Or(pod.Node, pod.NominatedNode))
		}
	}
}

// nodeDeleted drops the cached node.
func (f *freeResources) nodeDeleted(name string) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.nodes, name)
}

// of returns the resources of the node; nil if there is no such node.
func (f *freeResources) of(name string) *nodeResources {
	object, ok := f.cache.Node(name)
	if !ok {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	n := f.nodes[name]
	if n == nil || n.object != object {
		// mu is held while the pods are read, so that podsChanged can't run in between.
		n = newNodeResources(object, f.cache.PodsOn(name))
		f.nodes[name] = n
	}
	return n
}

func newNodeResources(object *corev1.Node, pods []*clustercache.PodInfo) *nodeResources {
	n := &nodeResources{object: object, free: map[corev1.ResourceName]int64{}, withoutGPU: map[corev1.ResourceName]int64{}}
	n.bound = slices.DeleteFunc(pods, func(pod *clustercache.PodInfo) bool {
		if pod.Node == "" {
			n.nominated = append(n.nominated, pod)
		}
		return pod.Node == ""
	})
	var resources clustercache.Resources
	for name := range object.Status.Allocatable {
		resources = append(resources, name)
	}
	for i, amount := range resources.Amounts(object.Status.Allocatable) {
		free, withoutGPU := amount, amount
		for _, pod := range n.bound {
			use := resources.Use(i, pod)
			free -= use
			if pod.Request == 0 {
				withoutGPU -= use
			}
		}
		n.free[resources[i]], n.withoutGPU[resources[i]] = free, withoutGPU
	}
	return n
}
