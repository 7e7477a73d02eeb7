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

// holding is what one container has of one resource.
type holding struct {
	devices  checkpoint.DevicesPerNUMA
	response *pluginapi.ContainerAllocateResponse
}

func (h holding) ids() sets.Set[string] {
	ids := sets.New[string]()
	for _, perNode := range h.devices {
		ids.Insert(perNode...)
	}
	return ids
}

// books say which container holds which devices (pod_devices.go). They have a lock of their own, and what leaves them
// is a copy.
type books struct {
	mu   sync.RWMutex
	pods map[types.UID]map[string]map[string]holding // by pod, container, resource
}

func newBooks() *books {
	return &books{pods: map[types.UID]map[string]map[string]holding{}}
}

func (b *books) insert(uid types.UID, container, resource string, h holding) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pods[uid] == nil {
		b.pods[uid] = map[string]map[string]holding{}
	}
	if b.pods[uid][container] == nil {
		b.pods[uid][container] = map[string]holding{}
	}
	b.pods[uid][container][resource] = h
}

// keepOnly forgets every pod that isn't in the set, and says whether there was any.
func (b *books) keepOnly(active sets.Set[types.UID]) bool {
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

func (b *books) hasPod(uid types.UID) bool {
	b.mu.RLock()
	defer b.mu.RUnlock()
	_, ok := b.pods[uid]
	return ok
}

// devicesOf returns the container's devices of the resource, nil if the books know of none.
func (b *books) devicesOf(uid types.UID, container, resource string) sets.Set[string] {
	b.mu.RLock()
	defer b.mu.RUnlock()
	h, ok := b.pods[uid][container][resource]
	if !ok {
		return nil
	}
	return h.ids()
}

// holdings returns what the container has, by resource.
func (b *books) holdings(uid types.UID, container string) map[string]holding {
	b.mu.RLock()
	defer b.mu.RUnlock()
	out := make(map[string]holding, len(b.pods[uid][container]))
	maps.Copy(out, b.pods[uid][container])
	return out
}

// allocated returns all devices in use, by resource.
func (b *books) allocated() map[string]sets.Set[string] {
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

// holders returns the pods that hold one of the devices.
func (b *books) holders(resource string, devices sets.Set[string]) sets.Set[types.UID] {
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

// entries returns the books as the checkpoint holds them.
func (b *books) entries() ([]checkpoint.PodDevicesEntry, error) {
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

// load adds a checkpoint's entries.
func (b *books) load(entries []checkpoint.PodDevicesEntry) error {
	for _, entry := range entries {
		response := &pluginapi.ContainerAllocateResponse{}
		if err := proto.Unmarshal(entry.AllocResp, response); err != nil {
			return fmt.Errorf("unmarshal the answer for container %s of pod %s: %w", entry.ContainerName, entry.PodUID, err)
		}
		b.insert(types.UID(entry.PodUID), entry.ContainerName, entry.ResourceName, holding{entry.DeviceIDs, response})
	}
	return nil
}
