package scheduling

import (
	"sync"

	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
)

// waitingSingles are the pods outside groups that wait for GPU memory, as the watch reports them: kube-scheduler has rejected them, or
// fair sharing keeps them at their gate. It is safe for concurrent use.
type waitingSingles struct {
	mu   sync.Mutex
	pods sets.Set[gpu.PodUID]
}

// updated passes on the state of a pod that is or was pending. single is false for a member of a group.
func (w *waitingSingles) updated(pod *clustercache.PodInfo, single bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := pod.Pending
	if p != nil && pod.Managed && single && pod.Request > 0 && pod.RequestError == "" && !pod.GatedOtherwise && !pod.Leaving && (p.Rejected || pod.Gated) {
		w.pods.Insert(pod.UID)
	} else {
		w.pods.Delete(pod.UID)
	}
}

// gone removes a pod that is no longer pending.
func (w *waitingSingles) gone(uid gpu.PodUID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pods.Delete(uid)
}

// any reports whether any pod waits.
func (w *waitingSingles) any() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.pods) > 0
}
