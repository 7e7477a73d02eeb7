package clustercache

import (
	"maps"
	"slices"
	"sync"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// pendingPods holds the pending pods, as the watch reports them. The zero value is ready for use. mu guards its fields;
// its methods are safe for concurrent use.
type pendingPods struct {
	mu       sync.RWMutex
	pods     map[gpu.PodUID]*PodInfo
	revision uint64 // It increases with each change that list shows.
}

func (p *pendingPods) list(known uint64) ([]*PodInfo, uint64) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if known == p.revision {
		return nil, known
	}
	return slices.SortedFunc(maps.Values(p.pods), byName), p.revision
}

func (p *pendingPods) get(uid gpu.PodUID) (*PodInfo, bool) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	pod, ok := p.pods[uid]
	return pod, ok
}

// update adds the pod, or removes it if it isn't pending.
func (p *pendingPods) update(pod *PodInfo) {
	if pod.Pending == nil {
		p.remove(pod.UID)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pods == nil {
		p.pods = map[gpu.PodUID]*PodInfo{}
	}
	before, known := p.pods[pod.UID]
	p.pods[pod.UID] = pod
	if !known || before.Pod != pod.Pod || before.Pending.Message != pod.Pending.Message || !before.Pending.Created.Equal(pod.Pending.Created) {
		p.revision++
	}
}

func (p *pendingPods) remove(uid gpu.PodUID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, known := p.pods[uid]; known {
		delete(p.pods, uid)
		p.revision++
	}
}
