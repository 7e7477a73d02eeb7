package scheduling

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/apiserver"
	"github.com/gpushare/gpushare/pkg/clustercache"
)

// EventBypassed is the reason of the Event on a pod that was bound without the extender, see docs/events.md.
const EventBypassed = "GPUExtenderNotCalled"

// If no scheduler calls the extender, a Deployment can create ten pods a second, and each of them fails. The first bypassBurst of them, and
// then one each bypassPause, are reported by the log and an Event.
const (
	bypassBurst = 10
	bypassPause = 10 * time.Second
)

// reportBypass reports the pod if the watch has shown it pending, and shows now that it was bound without the extender
// (clustercache.PodInfo.WithoutExtender).
func (h *eventHandlers) reportBypass(old, pod *clustercache.PodInfo) {
	if !pod.WithoutExtender || old == nil || old.Node != "" {
		return
	}
	h.Observer.BoundWithoutExtender()
	if h.Leading() != nil || !h.bypassReports.AllowN(h.Clock.Now(), 1) {
		return
	}
	klog.Background().Error(nil, "Pod bound without the extender: configure its scheduler to call the extender",
		"pod", klog.KRef(pod.Namespace, pod.Name), "node", pod.Node)
	h.Recorder.Eventf(apiserver.Reference(pod.Pod), corev1.EventTypeWarning, EventBypassed,
		"The pod was bound to node %s without the extender, so no GPU card was chosen for it: configure its scheduler to call the extender", pod.Node)
}
