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
	mu   sync.RWMutex
	pods map[gpu.PodUID]pendingPod
}

type pendingPod struct {
	info *PodInfo
	// since is when the watch first reported the pod, or reported its last scheduling gate removed.
	since time.Time
}

// list returns the pods by name. It sorts them without the lock.
func (p *pendingPods) list() []*PodInfo {
	pods := p.all()
	slices.SortFunc(pods, byName)
	return pods
}

func (p *pendingPods) all() []*PodInfo {
	p.mu.RLock()
	defer p.mu.RUnlock()
	pods := make([]*PodInfo, 0, len(p.pods))
	for _, pod := range p.pods {
		pods = append(pods, pod.info)
	}
	return pods
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
	since := now
	if former, known := p.pods[pod.UID]; known && (pod.gated() || !former.info.gated()) {
		since = former.since
	}
	p.pods[pod.UID] = pendingPod{info: pod, since: since}
}

func (p *pendingPods) remove(uid gpu.PodUID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.pods, uid)
}
