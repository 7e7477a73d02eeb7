package scheduling

import (
	"errors"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// errCountChanged rejects a pod whose number of cards has changed since the first filter call for the pod. The nodes were filtered, and the
// places of the pod's group are planned, for the number in that call.
var errCountChanged = errors.New("label " + protocol.LabelCount + " of the pod has changed since kube-scheduler first tried it")

// checkRequest returns the pod, or why it gets no node: it is too large, or no node can give it what it asks for. The pod's number of cards is
// fixed at the first call.
func (s *Scheduler) checkRequest(object *corev1.Pod) (gpu.Pod, error) {
	if err := protocol.CheckSize(object); err != nil {
		return gpu.Pod{}, err
	}
	if err := protocol.CheckRequest(object); err != nil {
		return gpu.Pod{}, err
	}
	pod := protocol.Pod(object)
	if pod.Request == 0 {
		return pod, nil
	}
	return pod, s.counts.fix(pod)
}

// counts are the numbers of cards of pending pods, from the first filter call for each. mu guards pods. The zero value is ready for use.
//
// They are in memory only. An extender that starts between a pod's filter and its bind has no number for the pod, and binds it with the
// present value of the label. This gives no memory to two pods: bind uses one number to check the request, to reserve memory, on a node that
// supports such a pod, and to write the annotations. After that only the annotations count. The total is always the request in the spec. Only
// the choice of the node can be bad, because it was made for another number. A group's plan is in memory too, and is made again with the
// present label. So storing each number in the API server would only turn such a bind into an error.
type counts struct {
	mu   sync.Mutex
	pods map[gpu.PodUID]int
}

// maxCounts limits the pods that are remembered, so that requests for pods that do not exist cannot exhaust memory. It is far above
// the number of pending pods in a large cluster.
const maxCounts = 100_000

// fix records the pod's number of cards. It returns an error if another number is recorded.
func (c *counts) fix(pod gpu.Pod) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, known := c.pods[pod.UID]; known {
		return c.compare(pod)
	}
	if c.pods == nil {
		c.pods = map[gpu.PodUID]int{}
	}
	if len(c.pods) >= maxCounts {
		for uid := range c.pods {
			delete(c.pods, uid) // Any of them: with so many, most are not pending pods.
			break
		}
	}
	c.pods[pod.UID] = pod.NumCards()
	return nil
}

// check returns an error if another number of cards is recorded for the pod.
func (c *counts) check(pod gpu.Pod) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.compare(pod)
}

// compare is check for callers that hold the lock.
func (c *counts) compare(pod gpu.Pod) error {
	if fixed, known := c.pods[pod.UID]; known && fixed != pod.NumCards() {
		return fmt.Errorf("%w: it asked for %d and now asks for %d; set it back, or create the pod again", errCountChanged, fixed, pod.NumCards())
	}
	return nil
}

// forget removes a pod that is no longer pending.
func (c *counts) forget(uid gpu.PodUID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.pods, uid)
}
