package deviceplugin

import (
	"context"
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
)

// readmission keeps the pods of a failed card running while the kubelet restarts.
//
// A kubelet that starts admits its pods again. Of each container that doesn't run, such as an init container that has ended, it checks the
// devices in its checkpoint. If one of them is not healthy, it fails the pod, whatever else runs in it (k8s.io/kubernetes
// pkg/kubelet/cm/devicemanager/manager.go, devicesToAllocate). The plugin doesn't know that a kubelet has just started. So after each
// registration it reports the devices of the node's pods as healthy until the kubelet knows these pods. No new pod gets a failed card by
// that: Allocate and the inventory depend on the cards alone.
type readmission struct {
	// devices returns the pod of each device in the kubelet's checkpoint.
	devices func() (map[string]gpu.PodUID, error)
	pods    *podSource
	kubelet *podResources
	// interval is the time between two checks of what the kubelet knows.
	interval time.Duration
}

const (
	// readmissionTimeout is how long devices are kept if the kubelet doesn't answer that it knows their pods, as if it can't be asked. Only
	// time in which the API server answers counts, because the kubelet has its pods from there.
	readmissionTimeout = 10 * time.Minute
	// readmissionChecks is how many checks in a row must find that the kubelet knows the pods. It knows a pod a moment before it has admitted
	// it.
	readmissionChecks = 2
)

// keptDevices are the devices that one registration reports as healthy whatever their cards are. Only one goroutine may use them.
type keptDevices struct {
	*readmission
	// until is when devices are no longer kept. It is postponed while the API server is away.
	until time.Time
	// waiting are the pods of the kept devices in the last list. known counts the checks in a row by which the kubelet knew all of them.
	waiting map[gpu.PodUID]bool
	known   int
}

// Begin begins to keep devices, after a registration.
func (r *readmission) Begin() *keptDevices {
	return &keptDevices{readmission: r, until: time.Now().Add(readmissionTimeout)}
}

// In returns the list with the devices of pods that have not ended as healthy ones. It adds those that the list lacks because a card has
// become smaller, unless the message would be too large for the kubelet. It adds no devices of the original gpushare plugin: they would count
// in the node's capacity, which the original extender reads.
func (k *keptDevices) In(ctx context.Context, list []*pluginapi.Device) []*pluginapi.Device {
	k.waiting, k.known = map[gpu.PodUID]bool{}, 0
	if !time.Now().Before(k.until) {
		return list
	}
	kept, err := k.devices()
	if err != nil {
		klog.FromContext(ctx).Error(err, "If the kubelet restarts now, it fails pods that have an unhealthy card and a container that has ended")
	}
	maps.DeleteFunc(kept, func(id string, uid gpu.PodUID) bool { _, lives := k.live(uid); return !lives || !isDeviceID(id) })
	for _, device := range list {
		if uid, ok := kept[device.ID]; ok && device.Health != pluginapi.Healthy {
			device.Health, k.waiting[uid] = pluginapi.Healthy, true
		}
		delete(kept, device.ID)
	}
	longer := slices.Clip(list)
	for id := range kept {
		longer = append(longer, &pluginapi.Device{ID: id, Health: pluginapi.Healthy})
	}
	if len(kept) > 0 && proto.Size(&pluginapi.ListAndWatchResponse{Devices: longer}) > maxMessage {
		return list
	}
	for _, uid := range kept {
		k.waiting[uid] = true
	}
	return longer
}

// live returns a pod that is known and has not ended.
func (r *readmission) live(uid gpu.PodUID) (*allocation.Pod, bool) {
	pod, ok := r.pods.ByUID(uid)
	return &pod, ok && !pod.Terminal
}

// Any reports whether the last list had a kept device.
func (k *keptDevices) Any() bool { return len(k.waiting) > 0 }

// End ends the keeping if the kubelet has admitted the pods, and reports whether no device is kept any more.
func (k *keptDevices) End(ctx context.Context) bool {
	k.known++
	for uid := range k.waiting {
		if pod, lives := k.live(uid); lives && !k.kubelet.Knows(ctx, pod) {
			k.known = 0
			break
		}
	}
	switch {
	case k.known >= readmissionChecks:
		k.until = time.Now()
	case k.known == 0 && k.pods.Ping(ctx) != nil:
		k.until = time.Now().Add(readmissionTimeout)
	}
	return !time.Now().Before(k.until)
}
