package simkubelet

import (
	"fmt"
	"maps"
	"sync"

	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/test/simkubelet/checkpoint"
)

// noNUMA is the NUMA node of devices without one.
const noNUMA = -1

// allocation is the devices of one resource that a container has.
type allocation struct {
	devices  checkpoint.DevicesPerNUMA
	response *pluginapi.ContainerAllocateResponse
}

func (h allocation) ids() sets.Set[string] {
	ids := sets.New[string]()
	for _, perNode := range h.devices {
		ids.Insert(perNode...)
	}
	return ids
}

// podDevices holds the devices of each container (pod_devices.go). mu guards pods; the methods return copies.
type podDevices struct {
	mu   sync.RWMutex
	pods map[types.UID]map[string]map[string]allocation // By pod, container, resource.
}

func newPodDevices() *podDevices {
	return &podDevices{pods: map[types.UID]map[string]map[string]allocation{}}
}

func (b *podDevices) insert(uid types.UID, container, resource string, h allocation) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pods[uid] == nil {
		b.pods[uid] = map[string]map[string]allocation{}
	}
	if b.pods[uid][container] == nil {
		b.pods[uid][container] = map[string]allocation{}
	}
	b.pods[uid][container][resource] = h
}

// keepOnly removes the pods that aren't in the set. It reports whether there were any.
func (b *podDevices) keepOnly(active sets.Set[types.UID]) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	before := len(b.pods)
	for uid := range b.pods {
		if !active.Has(uid) {
			delete(b.pods, uid)
		}
	}
	return len(b.pods) != before
}

func (b *podDevices) hasPod(uid types.UID) bool {
	b.mu.RLock()
	defer b.mu.RUnlock()
	_, ok := b.pods[uid]
	return ok
}

// devicesOf returns the container's devices of the resource, or nil if none are recorded.
func (b *podDevices) devicesOf(uid types.UID, container, resource string) sets.Set[string] {
	b.mu.RLock()
	defer b.mu.RUnlock()
	h, ok := b.pods[uid][container][resource]
	if !ok {
		return nil
	}
	return h.ids()
}

// allocations returns the container's devices by resource.
func (b *podDevices) allocations(uid types.UID, container string) map[string]allocation {
	b.mu.RLock()
	defer b.mu.RUnlock()
	out := make(map[string]allocation, len(b.pods[uid][container]))
	maps.Copy(out, b.pods[uid][container])
	return out
}

// allocated returns all allocated devices by resource.
func (b *podDevices) allocated() map[string]sets.Set[string] {
	b.mu.RLock()
	defer b.mu.RUnlock()
	out := map[string]sets.Set[string]{}
	for _, containers := range b.pods {
		for _, resources := range containers {
			for resource, h := range resources {
				if out[resource] == nil {
					out[resource] = sets.New[string]()
				}
				for _, perNode := range h.devices {
					out[resource].Insert(perNode...)
				}
			}
		}
	}
	return out
}

// podsUsing returns the pods that have one of the devices.
func (b *podDevices) podsUsing(resource string, devices sets.Set[string]) sets.Set[types.UID] {
	b.mu.RLock()
	defer b.mu.RUnlock()
	out := sets.New[types.UID]()
	if devices.Len() == 0 {
		return out
	}
	for uid, containers := range b.pods {
		for _, resources := range containers {
			for _, perNode := range resources[resource].devices {
				if devices.HasAny(perNode...) {
					out.Insert(uid)
				}
			}
		}
	}
	return out
}

// entries returns the content of the checkpoint.
func (b *podDevices) entries() ([]checkpoint.PodDevicesEntry, error) {
	b.mu.RLock()
	defer b.mu.RUnlock()
	var out []checkpoint.PodDevicesEntry
	for uid, containers := range b.pods {
		for container, resources := range containers {
			for resource, h := range resources {
				response, err := proto.Marshal(h.response)
				if err != nil {
					return nil, fmt.Errorf("marshal the answer for container %s of pod %s: %w", container, uid, err)
				}
				out = append(out, checkpoint.PodDevicesEntry{
					PodUID: string(uid), ContainerName: container, ResourceName: resource,
					DeviceIDs: h.devices, AllocResp: response,
				})
			}
		}
	}
	return out, nil
}

// load adds the entries of a checkpoint.
func (b *podDevices) load(entries []checkpoint.PodDevicesEntry) error {
	for _, entry := range entries {
		response := &pluginapi.ContainerAllocateResponse{}
		if err := proto.Unmarshal(entry.AllocResp, response); err != nil {
			return fmt.Errorf("unmarshal the answer for container %s of pod %s: %w", entry.ContainerName, entry.PodUID, err)
		}
		b.insert(types.UID(entry.PodUID), entry.ContainerName, entry.ResourceName, allocation{entry.DeviceIDs, response})
	}
	return nil
}
