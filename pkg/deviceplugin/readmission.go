package deviceplugin

import (
	"context"
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// readmissionTime is how long the devices of pods are reported as healthy after a registration. A kubelet that starts knows its pods within seconds, or
// once it reaches the API server.
const readmissionTime = 10 * time.Minute

// readmission keeps the pods of a failed card running while the kubelet restarts.
//
// A kubelet that starts admits its pods again. Of each container that doesn't run, such as an init container that has ended, it checks the
// devices in its checkpoint. If one of them is not healthy, it fails the pod, whatever else runs in it (k8s.io/kubernetes
// pkg/kubelet/cm/devicemanager/manager.go, devicesToAllocate). The plugin doesn't know that a kubelet has just started. So after each
// registration it reports the devices of the node's pods as healthy for some time. No new pod gets a failed card by that: Allocate and the
// inventory depend on the cards alone.
type readmission struct {
	// devices returns the pod of each device in the kubelet's checkpoint.
	devices func() (map[string]gpu.PodUID, error)
	pods    *podSource
	// time is readmissionTime.
	time time.Duration
}

// Keep returns the list with the devices of pods that have not ended as healthy ones. It adds those that the list lacks because a card has
// become smaller, unless the message would be too large for the kubelet. It adds no devices of the original gpushare plugin: they would count
// in the node's capacity, which the original extender reads.
func (r *readmission) Keep(ctx context.Context, list []*pluginapi.Device) []*pluginapi.Device {
	kept, err := r.devices()
	if err != nil {
		klog.FromContext(ctx).Error(err, "If the kubelet restarts now, it fails pods that have an unhealthy card and a container that has ended")
	}
	maps.DeleteFunc(kept, func(id string, uid gpu.PodUID) bool {
		pod, known := r.pods.ByUID(uid)
		return !known || pod.Ended || !isDeviceID(id)
	})
	for _, device := range list {
		if _, ok := kept[device.ID]; ok {
			device.Health = pluginapi.Healthy
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
	return longer
}
