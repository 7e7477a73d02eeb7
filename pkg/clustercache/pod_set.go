package clustercache

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// podSet holds some of the pods, as the watch reports them. The zero value is ready for use. mu guards its fields; its methods are safe for
// concurrent use.
type podSet struct {
	mu   sync.RWMutex
	pods map[gpu.PodUID]podSince
}

type podSince struct {
	info *PodInfo
	// since is when the watch first reported the pod as one of the set, or reported its last scheduling gate removed.
	since time.Time
}

// list returns the pods by name. It sorts them without the lock.
func (s *podSet) list() []*PodInfo {
	pods := s.all()
	slices.SortFunc(pods, byName)
	return pods
}

func (s *podSet) all() []*PodInfo {
	s.mu.RLock()
	defer s.mu.RUnlock()
	pods := make([]*PodInfo, 0, len(s.pods))
	for _, pod := range s.pods {
		pods = append(pods, pod.info)
	}
	return pods
}

func (s *podSet) get(uid gpu.PodUID) (pod podSince, ok bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	pod, ok = s.pods[uid]
	return pod, ok
}

// update adds the pod if it belongs to the set, or else removes it.
func (s *podSet) update(pod *PodInfo, belongs bool, now time.Time) {
	if !belongs {
		s.remove(pod.UID)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pods == nil {
		s.pods = map[gpu.PodUID]podSince{}
	}
	since := now
	if former, known := s.pods[pod.UID]; known && (pod.gated() || !former.info.gated()) {
		since = former.since
	}
	s.pods[pod.UID] = podSince{info: pod, since: since}
}

func (s *podSet) remove(uid gpu.PodUID) {
	if _, known := s.get(uid); !known {
		return // Almost every pod.
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pods, uid)
}

func byName(a, b *PodInfo) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}
