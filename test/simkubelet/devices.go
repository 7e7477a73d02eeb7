package simkubelet

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"sync"

	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// devices is the kubelet's device manager with the topology policy none (cm/devicemanager/manager.go). mu guards the
// fields below it. As in the kubelet, it is released while a plugin is called, so a second allocation can run
// meanwhile. The functions above it take other locks and are called without it.
type devices struct {
	checkpoint string
	// activePods returns the pods whose devices are in use: known pods that neither ended nor were rejected.
	activePods func() []*corev1.Pod
	// sourcesReady reports whether the first batch of pods is processed. Until then no allocation is removed.
	sourcesReady func() bool
	// wasRunning reports whether the container ran when this kubelet started.
	wasRunning func(types.UID, string) bool
	// changed is called after the devices of a resource have changed, with the pods whose devices changed their health.
	changed func(sets.Set[types.UID])

	mu          sync.Mutex
	resources   map[string]*deviceResource
	allocations map[types.UID]map[string]map[string]allocation // By pod, container, resource.
	reusable    reusable
}

// deviceResource is a resource of a plugin that has registered with this kubelet or with its predecessor.
type deviceResource struct {
	plugin *plugin // The latest registration; nil until the first.
	// connected are the plugins that the kubelet takes for connected, by socket.
	connected map[string]*plugin
	// devices are the plugin's devices, true if healthy; nil until the plugin has listed them.
	devices map[string]bool
	// gone is true while no plugin is connected. Then no device counts as healthy.
	gone bool
	// allocated holds the allocated devices, including those of an allocation in progress.
	allocated sets.Set[string]
}

func (r *deviceResource) healthy() sets.Set[string] {
	out := sets.New[string]()
	for id, healthy := range r.devices {
		if healthy && !r.gone {
			out.Insert(id)
		}
	}
	return out
}

// allocation is the devices of one resource that a container has, and the plugin's answer.
type allocation struct {
	ids      sets.Set[string]
	response *pluginapi.ContainerAllocateResponse
}

// reusable are the devices of the init containers of the pod that is being admitted, by resource.
type reusable struct {
	uid     types.UID
	devices map[string]sets.Set[string]
}

func newDevices(checkpoint string) *devices {
	return &devices{
		checkpoint: checkpoint, resources: map[string]*deviceResource{},
		allocations: map[types.UID]map[string]map[string]allocation{},
	}
}

// resource returns the resource's state, which it creates if necessary. The caller holds the lock.
func (d *devices) resource(name string) *deviceResource {
	if d.resources[name] == nil {
		d.resources[name] = &deviceResource{allocated: sets.New[string](), connected: map[string]*plugin{}}
	}
	return d.resources[name]
}

// registered makes the plugin the resource's. A plugin whose socket is connected is refused (PluginConnected).
func (d *devices) registered(p *plugin) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.resource(p.resource)
	if r.connected[p.socket] != nil {
		return fmt.Errorf("device plugin already connected: %s", p.socket)
	}
	r.plugin, r.connected[p.socket] = p, p
	return nil
}

// pluginGone takes the plugin for disconnected. Another one that is connected takes its place; without one all devices of the
// resource become unhealthy (PluginDisconnected). The kubelet removes the capacity five minutes later, which no test waits for.
func (d *devices) pluginGone(p *plugin) {
	d.mu.Lock()
	r := d.resource(p.resource)
	gone := r.connected[p.socket]
	if gone == nil {
		d.mu.Unlock()
		return
	}
	gone.stopped.Store(true)
	delete(r.connected, p.socket)
	r.gone = len(r.connected) == 0
	for _, other := range r.connected {
		r.plugin = other
	}
	if r.gone && r.devices == nil {
		r.devices = map[string]bool{}
	}
	d.mu.Unlock()
	d.changed(nil)
}

// update replaces the resource's devices by the plugin's list.
func (d *devices) update(ctx context.Context, name string, list []*pluginapi.Device) {
	d.mu.Lock()
	r := d.resource(name)
	old := r.devices
	r.devices, r.gone = make(map[string]bool, len(list)), false
	changed := sets.New[string]()
	for _, device := range list {
		healthy := device.Health == pluginapi.Healthy
		r.devices[device.ID] = healthy
		// A device that is new in the list counts as changed.
		if before, ok := old[device.ID]; !ok || before != healthy {
			changed.Insert(device.ID)
		}
	}
	ids, pods := changed.UnsortedList(), sets.New[types.UID]()
	for uid, containers := range d.allocations {
		for _, resources := range containers {
			if resources[name].ids.HasAny(ids...) {
				pods.Insert(uid)
			}
		}
	}
	err := d.writeCheckpoint()
	d.mu.Unlock()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Could not write the checkpoint")
	}
	d.changed(pods)
}

// capacity returns capacity and allocatable by resource.
func (d *devices) capacity() (capacity, allocatable corev1.ResourceList) {
	capacity, allocatable = corev1.ResourceList{}, corev1.ResourceList{}
	d.mu.Lock()
	defer d.mu.Unlock()
	for name, r := range d.resources {
		if r.devices != nil {
			capacity[corev1.ResourceName(name)] = *resource.NewQuantity(int64(len(r.devices)), resource.DecimalSI)
			allocatable[corev1.ResourceName(name)] = *resource.NewQuantity(int64(r.healthy().Len()), resource.DecimalSI)
		}
	}
	return capacity, allocatable
}

// managed reports whether a device plugin provides the resource, now or when the checkpoint was written.
func (d *devices) managed(name string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.resources[name]
	return r != nil && r.devices != nil
}

// collect removes the allocations of ended pods.
func (d *devices) collect() {
	pods := d.activePods()
	if !d.sourcesReady() {
		return
	}
	active := sets.New[types.UID]()
	for _, pod := range pods {
		active.Insert(pod.UID)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	before := len(d.allocations)
	for uid := range d.allocations {
		if !active.Has(uid) {
			delete(d.allocations, uid)
		}
	}
	if len(d.allocations) != before {
		d.recount()
	}
}

// recount computes the allocated devices from the allocations. Like the kubelet, it forgets allocations in progress. The
// caller holds the lock.
func (d *devices) recount() {
	for _, r := range d.resources {
		r.allocated = sets.New[string]()
	}
	for _, containers := range d.allocations {
		for _, resources := range containers {
			for name, a := range resources {
				d.resource(name).allocated.Insert(a.ids.UnsortedList()...)
			}
		}
	}
}

// allocate allocates the container's devices, with one Allocate call for each resource of a plugin. Admission calls it
// for each container, init containers first. The start of a container calls it again if no allocation is recorded.
func (d *devices) allocate(ctx context.Context, pod *corev1.Pod, container *corev1.Container) error {
	reuse := d.reusableFor(pod.UID)
	if err := d.allocateResources(ctx, pod, container, reuse); err != nil {
		return err
	}
	init := false
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		init = init || c.Name == container.Name && !restartable(c)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for name, a := range d.allocations[pod.UID][container.Name] {
		if init {
			reuse[name] = reuse[name].Union(a.ids)
		} else {
			// App containers and sidecars keep their devices.
			reuse[name] = reuse[name].Difference(a.ids)
		}
	}
	return nil
}

// reusableFor returns the pod's reusable devices and discards those of any other pod.
func (d *devices) reusableFor(uid types.UID) map[string]sets.Set[string] {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.reusable.uid != uid || d.reusable.devices == nil {
		d.reusable = reusable{uid: uid, devices: map[string]sets.Set[string]{}}
	}
	return d.reusable.devices
}

func (d *devices) allocateResources(ctx context.Context, pod *corev1.Pod, container *corev1.Container, reuse map[string]sets.Set[string]) error {
	collected := false
	for limit, quantity := range container.Resources.Limits {
		name := string(limit)
		if !d.managed(name) {
			continue
		}
		if !collected {
			d.collect()
			collected = true
		}
		chosen, err := d.choose(ctx, pod, container.Name, name, int(quantity.Value()), reuse[name])
		if err != nil {
			return err
		}
		if chosen.Len() == 0 {
			continue
		}
		if err := d.callAllocate(ctx, pod.UID, container.Name, name, chosen); err != nil {
			return err
		}
	}
	return nil
}

func (d *devices) callAllocate(ctx context.Context, uid types.UID, container, name string, chosen sets.Set[string]) error {
	d.mu.Lock()
	p := d.resource(name).plugin
	d.mu.Unlock()
	response, err := p.allocate(ctx, uid, chosen.UnsortedList())
	d.mu.Lock()
	defer d.mu.Unlock()
	if err != nil {
		d.recount()
		return err
	}
	if len(response.ContainerResponses) == 0 {
		return fmt.Errorf("no containers return in allocation response %v", response)
	}
	d.insert(uid, container, name, allocation{chosen, response.ContainerResponses[0]})
	return d.writeCheckpoint()
}

// insert records an allocation. The caller holds the lock.
func (d *devices) insert(uid types.UID, container, name string, a allocation) {
	if d.allocations[uid] == nil {
		d.allocations[uid] = map[string]map[string]allocation{}
	}
	if d.allocations[uid][container] == nil {
		d.allocations[uid][container] = map[string]allocation{}
	}
	d.allocations[uid][container][name] = a
}

// choose chooses devices for the container and marks them allocated. An empty result means that no Allocate call is
// needed.
func (d *devices) choose(ctx context.Context, pod *corev1.Pod, container, name string, required int, reuse sets.Set[string]) (sets.Set[string], error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	needed := required
	held, allocated := d.allocations[pod.UID][container][name]
	if allocated {
		needed -= held.ids.Len()
		if needed != 0 {
			return nil, fmt.Errorf("pod %q container %q changed request for resource %q from %d to %d",
				pod.UID, container, name, held.ids.Len(), required)
		}
	}
	if !d.sourcesReady() && d.wasRunning(pod.UID, container) {
		return nil, nil // The kubelet restarted: the container has its devices.
	}
	r := d.resource(name)
	healthy := r.healthy()
	switch {
	case healthy.Len() == 0:
		return nil, fmt.Errorf("no healthy devices present; cannot allocate unhealthy devices %s", name)
	case !healthy.IsSuperset(held.ids):
		return nil, fmt.Errorf("previously allocated devices are no longer healthy; cannot allocate unhealthy devices %s", name)
	case needed == 0:
		return nil, nil
	}

	chosen := sets.New[string]()
	take := func(from sets.Set[string]) (enough bool) {
		for id := range from.Difference(chosen) {
			r.allocated.Insert(id)
			chosen.Insert(id)
			needed--
			if needed == 0 {
				return true
			}
		}
		return false
	}
	if take(reuse) {
		return chosen, nil
	}
	available := healthy.Difference(r.allocated)
	if available.Len() < needed {
		return nil, fmt.Errorf("requested number of devices unavailable for %s. Requested: %d, Available: %d",
			name, needed, available.Len())
	}
	var preferred sets.Set[string]
	if p := r.plugin; p.prefers {
		d.mu.Unlock()
		ids, err := p.preferred(ctx, pod.UID, available.Union(chosen).UnsortedList(), chosen.UnsortedList(), required)
		d.mu.Lock()
		if err != nil {
			return nil, fmt.Errorf("device plugin GetPreferredAllocation rpc failed with err: %v", err) //nolint:errorlint // The pod's status shows this text.
		}
		preferred = sets.New(ids...)
	}
	if take(preferred.Intersection(available)) || take(available) {
		return chosen, nil
	}
	return nil, fmt.Errorf("unexpectedly allocated less resources than required. Requested: %d, Got: %d", required, required-needed)
}

// env returns the environment that the plugins' answers add to a container that starts. It allocates if no allocation is
// recorded (GetDeviceRunContainerOptions).
func (d *devices) env(ctx context.Context, pod *corev1.Pod, container *corev1.Container) (map[string]string, error) {
	active := false
	for _, p := range d.activePods() {
		active = active || p.UID == pod.UID
	}
	missing := false
	for limit, quantity := range container.Resources.Limits {
		if name := string(limit); active && quantity.Value() != 0 && d.managed(name) {
			_, allocated := d.allocated(pod.UID, container.Name)[name]
			missing = missing || !allocated
		}
	}
	if missing {
		if err := d.allocate(ctx, pod, container); err != nil {
			return nil, err
		}
	}
	env := map[string]string{}
	for _, a := range d.allocated(pod.UID, container.Name) {
		maps.Copy(env, a.response.Envs)
	}
	return env, nil
}

// allocated returns the container's allocations by resource.
func (d *devices) allocated(uid types.UID, container string) map[string]allocation {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.allocations[uid][container])
}

// health returns the health of the container's devices by resource and ID. A device that the plugin doesn't report
// counts as healthy.
func (d *devices) health(uid types.UID, container string) map[string]map[string]bool {
	out := map[string]map[string]bool{}
	d.mu.Lock()
	defer d.mu.Unlock()
	for name, a := range d.allocations[uid][container] {
		out[name] = map[string]bool{}
		for id := range a.ids {
			healthy, listed := d.resource(name).devices[id]
			out[name][id] = healthy || !listed
		}
	}
	return out
}

// writeCheckpoint is called with the lock, so that an older state can't replace a newer one.
func (d *devices) writeCheckpoint() error {
	c := Checkpoint{RegisteredDevices: map[string][]string{}}
	for name, r := range d.resources {
		if r.devices != nil {
			c.RegisteredDevices[name] = r.healthy().UnsortedList()
		}
	}
	for uid, containers := range d.allocations {
		for container, resources := range containers {
			for name, a := range resources {
				response, err := proto.Marshal(a.response)
				if err != nil {
					return fmt.Errorf("marshal the answer for container %s of pod %s: %w", container, uid, err)
				}
				c.PodDeviceEntries = append(c.PodDeviceEntries, CheckpointEntry{
					PodUID: string(uid), ContainerName: container, ResourceName: name,
					DeviceIDs: map[int64][]string{noNUMA: a.ids.UnsortedList()}, AllocResp: response,
				})
			}
		}
	}
	return c.write(d.checkpoint)
}

// readCheckpoint loads the allocations. The resources of the checkpoint have no capacity until their plugins register.
func (d *devices) readCheckpoint() error {
	c, err := ReadCheckpoint(d.checkpoint)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range c.PodDeviceEntries {
		entry := &c.PodDeviceEntries[i]
		response, err := entry.Response()
		if err != nil {
			return err
		}
		d.insert(types.UID(entry.PodUID), entry.ContainerName, entry.ResourceName, allocation{sets.New(entry.devices()...), response})
	}
	for name := range c.RegisteredDevices {
		r := d.resource(name)
		r.devices, r.gone = map[string]bool{}, true
	}
	d.recount()
	return nil
}

// restartable reports whether an init container is a sidecar.
func restartable(container *corev1.Container) bool {
	return container.RestartPolicy != nil && *container.RestartPolicy == corev1.ContainerRestartPolicyAlways
}
