package eviction

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/apiserver"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
)

// MemberEvictor evicts the members of broken runs.
type MemberEvictor struct {
	evictor
	// evicted counts the evicted members.
	evicted  func()
	requests chan []gpu.Pod
}

// NewMemberEvictor returns a MemberEvictor. It evicts nothing before Run. evicted is called for each evicted member.
func NewMemberEvictor(o Options, evicted func()) *MemberEvictor {
	return &MemberEvictor{evictor: evictor{o}, evicted: evicted, requests: make(chan []gpu.Pod)}
}

// Evict starts the eviction of the pods. While earlier pods are being evicted it does nothing: the gang's manager requests
// the eviction again.
func (m *MemberEvictor) Evict(pods []gpu.Pod) {
	select {
	case m.requests <- pods:
	default:
	}
}

// Run makes the eviction calls until ctx ends.
func (m *MemberEvictor) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case pods := <-m.requests:
			group := m.NewGroup(maxConcurrent)
			for _, pod := range pods {
				group.Go(func() error { m.EvictMember(ctx, pod); return nil })
			}
			_ = group.Wait() // EvictMember logs its errors.
		}
	}
}

// EvictMember makes one eviction call of Run. Disruption budgets are respected: the manager requests the eviction again until it is
// allowed.
func (m *MemberEvictor) EvictMember(ctx context.Context, pod gpu.Pod) {
	logger := klog.FromContext(ctx).WithValues("pod", klog.KRef(pod.Namespace, pod.Name))
	if m.Leading() != nil {
		return
	}
	switch _, gone, err := m.request(ctx, pod, false); {
	case err != nil:
		logger.Error(err, "Member of a broken group not evicted, trying again")
	case !gone:
		logger.Info("Evicted a member of a broken group")
		m.evicted()
		m.Recorder.Event(apiserver.Reference(pod), corev1.EventTypeWarning, gang.EventEvicted,
			"Evicted: the pod's group was bound in part, and its other members could not be bound in time")
	}
}
