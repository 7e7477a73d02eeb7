package clustercache

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// pendingPods holds the pending pods, as the watch reports them. The zero value is ready for use. mu guards its fields; its methods are safe
// for concurrent use.
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
func (s *pendingPods) list() []*PodInfo {
	s.mu.RLock()
	pods := make([]*PodInfo, 0, len(s.pods))
	for _, pod := range s.pods {
		pods = append(pods, pod.info)
	}
	s.mu.RUnlock()
	slices.SortFunc(pods, byName)
	return pods
}

func (s *pendingPods) get(uid gpu.PodUID) (pod pendingPod, ok bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	pod, ok = s.pods[uid]
	return pod, ok
}

// update adds the pod if it is pending, or else removes it.
func (s *pendingPods) update(pod *PodInfo, now time.Time) {
	if pod.Pending == nil {
		s.remove(pod.UID)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pods == nil {
		s.pods = map[gpu.PodUID]pendingPod{}
	}
	since := now
	if former, known := s.pods[pod.UID]; known && (pod.anyGate() || !former.info.anyGate()) {
		since = former.since
	}
	s.pods[pod.UID] = pendingPod{info: pod, since: since}
}

func (s *pendingPods) remove(uid gpu.PodUID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pods, uid)
}

func byName(a, b *PodInfo) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}
