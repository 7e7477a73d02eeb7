package scheduling

import (
	"errors"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// errCountChanged and errRDMAChanged reject a pod of which that label has changed since the first filter call for the pod. The nodes were
// filtered, and the places of the pod's group are planned, for the value in that call.
var (
	errCountChanged = errors.New("label " + protocol.LabelCount + hasChanged)
	errRDMAChanged  = errors.New("label " + protocol.LabelRDMA + hasChanged)
)

const hasChanged = " of the pod has changed since kube-scheduler first tried it"

// checkRequest returns the pod, or why it gets no node: it is too large, or no node can give it what it asks for. What its labels ask
// for is fixed at the first call.
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
	return pod, s.asked.fix(pod)
}

// asked is what the labels of pending pods ask for, from the first filter call for each. mu guards pods. The zero value is ready for use.
//
// It is in memory only. An extender that starts between a pod's filter and its bind knows nothing of the pod, and binds it by the present labels.
// No memory is given to two pods then: bind uses one number of cards to check the request, to reserve memory, and to write the annotations, on a node
// that supports such a pod. After that only the annotations count. The total is always the request in the spec. Only
// the choice of the node can be bad, because it was made for another number. A group's plan is in memory too, and is made again with the
// present label. So storing the values in the API server would only turn such a bind into an error.
type asked struct {
	mu   sync.Mutex
	pods map[gpu.PodUID]askedByPod
}

type askedByPod struct {
	cards int
	rdma  gpu.RDMA
}

// maxAsked limits the pods that are remembered, so that requests for pods that do not exist cannot exhaust memory. It is far above
// the number of pending pods in a large cluster.
const maxAsked = 100_000

// fix records what the pod asks for. It returns an error if something else is recorded.
func (c *asked) fix(pod gpu.Pod) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, known := c.pods[pod.UID]; known {
		return c.compare(pod)
	}
	if c.pods == nil {
		c.pods = map[gpu.PodUID]askedByPod{}
	}
	if len(c.pods) >= maxAsked {
		for uid := range c.pods {
			delete(c.pods, uid) // Any of them: with so many, most are not pending pods.
			break
		}
	}
	c.pods[pod.UID] = askedByPod{pod.NumCards(), pod.RDMA}
	return nil
}

// check returns an error if something else is recorded for the pod.
func (c *asked) check(pod gpu.Pod) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.compare(pod)
}

// compare is check for callers that hold the lock.
func (c *asked) compare(pod gpu.Pod) error {
	fixed, known := c.pods[pod.UID]
	switch {
	case known && fixed.cards != pod.NumCards():
		return fmt.Errorf("%w: it asked for %d and now asks for %d; set it back, or create the pod again", errCountChanged, fixed.cards, pod.NumCards())
	case known && fixed.rdma != pod.RDMA:
		return fmt.Errorf("%w: set it back, or create the pod again", errRDMAChanged)
	}
	return nil
}

// forget removes a pod that is no longer pending.
func (c *asked) forget(uid gpu.PodUID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.pods, uid)
}
