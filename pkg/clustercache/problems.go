package clustercache

import (
	"cmp"
	"maps"
	"slices"
	"sync"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// problemPods holds the pods that have a RequestProblem and have not ended. The zero value is ready for use. mu guards pods;
// its methods are safe for concurrent use.
type problemPods struct {
	mu   sync.RWMutex
	pods map[gpu.PodUID]*PodInfo
}

func (p *problemPods) list() []*PodInfo {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return slices.SortedFunc(maps.Values(p.pods), byName)
}

// update adds the pod, or removes it if it has no problem or has ended.
func (p *problemPods) update(pod *PodInfo) {
	if pod.RequestProblem == "" || pod.Ended || pod.Leaving {
		p.remove(pod.UID)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pods == nil {
		p.pods = map[gpu.PodUID]*PodInfo{}
	}
	p.pods[pod.UID] = pod
}

func (p *problemPods) remove(uid gpu.PodUID) {
	p.mu.RLock()
	_, known := p.pods[uid]
	p.mu.RUnlock()
	if !known {
		return // Almost every pod.
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.pods, uid)
}

func byName(a, b *PodInfo) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}
