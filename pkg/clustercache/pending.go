package clustercache

import (
	"slices"
	"sync"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// pendingPods holds the pending pods, as the watch reports them. The zero value is ready for use. mu guards its fields;
// its methods are safe for concurrent use.
type pendingPods struct {
	mu       sync.RWMutex
	pods     map[gpu.PodUID]pendingPod
	revision uint64 // It increases with each change that list shows.
}

type pendingPod struct {
	info *PodInfo
	// since is when the watch first reported the pod, or reported its last scheduling gate removed.
	since time.Time
}

func (p *pendingPods) list(known uint64) ([]*PodInfo, uint64) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if known == p.revision {
		return nil, known
	}
	pods := make([]*PodInfo, 0, len(p.pods))
	for _, pod := range p.pods {
		pods = append(pods, pod.info)
	}
	slices.SortFunc(pods, byName)
	return pods, p.revision
}

func (p *pendingPods) get(uid gpu.PodUID) (pod pendingPod, ok bool) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	pod, ok = p.pods[uid]
	return pod, ok
}

// update adds the pod, or removes it if it isn't pending.
func (p *pendingPods) update(pod *PodInfo, now time.Time) {
	if pod.Pending == nil {
		p.remove(pod.UID)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pods == nil {
		p.pods = map[gpu.PodUID]pendingPod{}
	}
	former, known := p.pods[pod.UID]
	before, since := former.info, now
	if known && (pod.gated() || !before.gated()) {
		since = former.since
	}
	p.pods[pod.UID] = pendingPod{info: pod, since: since}
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
