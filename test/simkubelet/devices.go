package simkubelet

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/test/simkubelet/checkpoint"
)

// devices is the kubelet's device manager with the topology policy none (cm/devicemanager/manager.go). mu guards the
// fields below it. As in the kubelet, it is released while a plugin is called, so a second allocation can run
// meanwhile.
type devices struct {
	options    Options
	podDevices *podDevices
	// activePods returns the pods whose devices are in use: known pods that neither ended nor were rejected.
	activePods func() []*corev1.Pod
	// sourcesReady reports whether the first batch of pods is processed. Until then no allocation is removed.
	sourcesReady func() bool
	// wasRunning reports whether the container ran when this kubelet started.
	wasRunning func(types.UID, string) bool
	// changed is called after the devices of a resource have changed, with the pods whose devices changed their health.
	changed func(sets.Set[types.UID])

	mu        sync.Mutex
	endpoints map[string]*endpoint
	all       map[string]map[string]*pluginapi.Device
	healthy   map[string]sets.Set[string]
	unhealthy map[string]sets.Set[string]
	allocated map[string]sets.Set[string]
	reusable  reusable
	rand      *rand.Rand // nil: map order.
}

// reusable are the devices of the init containers of the pod that is being admitted, by resource.
type reusable struct {
	uid     types.UID
	devices map[string]sets.Set[string]
}

func newDevices(options Options) *devices {
	d := &devices{
		options:    options,
		podDevices: newPodDevices(),
		endpoints:  map[string]*endpoint{},
		all:        map[string]map[string]*pluginapi.Device{},
		healthy:    map[string]sets.Set[string]{},
		unhealthy:  map[string]sets.Set[string]{},
		allocated:  map[string]sets.Set[string]{},
	}
	if options.Seed != 0 {
		d.rand = rand.New(rand.NewPCG(options.Seed, 0))
	}
	return d
}

// order returns the elements in arbitrary order, or in a repeatable one if the options have a seed. The caller holds
// the lock.
func (d *devices) order(set sets.Set[string]) []string {
	if d.rand == nil {
		return set.UnsortedList()
	}
	list := sets.List(set)
	d.rand.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	return list
}

// plugin sets the resource's endpoint and replaces an earlier one.
func (d *devices) plugin(e *endpoint) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.endpoints[e.resource] = e
}

// pluginGone marks all devices of the resource unhealthy. After EndpointStopGrace the node loses the resource's
// capacity.
func (d *devices) pluginGone(resource string) {
	d.mu.Lock()
	e, ok := d.endpoints[resource]
	if ok {
		lost := d.healthy[resource]
		d.healthy[resource] = sets.New[string]()
		d.unhealthy[resource] = d.unhealthy[resource].Union(lost)
		e.stop(time.Now())
	}
	d.mu.Unlock()
	if ok {
		d.changed(nil)
	}
}

// update replaces the resource's devices by the plugin's list.
func (d *devices) update(ctx context.Context, resource string, list []*pluginapi.Device) {
	d.mu.Lock()
	old := d.all[resource]
	all := make(map[string]*pluginapi.Device, len(list))
	healthy, unhealthy, touched := sets.New[string](), sets.New[string](), sets.New[string]()
	for _, device := range list {
		// A device that is new in the list counts as changed.
		if before, ok := old[device.ID]; !ok || before.Health != device.Health {
			touched.Insert(device.ID)
		}
		all[device.ID] = device
		if device.Health == pluginapi.Healthy {
			healthy.Insert(device.ID)
		} else {
			unhealthy.Insert(device.ID)
		}
	}
	d.all[resource], d.healthy[resource], d.unhealthy[resource] = all, healthy, unhealthy
	d.mu.Unlock()

	if err := d.writeCheckpoint(); err != nil {
		klog.FromContext(ctx).Error(err, "Could not write the checkpoint")
	}
	d.changed(d.podDevices.podsUsing(resource, touched))
}

// capacity returns capacity and allocatable by resource. It removes the resources whose plugin has been gone for longer
// than EndpointStopGrace and returns their names.
func (d *devices) capacity(ctx context.Context) (capacity, allocatable corev1.ResourceList, removed []string) {
	capacity, allocatable = corev1.ResourceList{}, corev1.ResourceList{}
	d.mu.Lock()
	for name := range d.healthy {
		if e := d.endpoints[name]; e == nil || e.stoppedFor(time.Now()) > d.options.EndpointStopGrace {
			removed = append(removed, name)
			continue
		}
		allocatable[corev1.ResourceName(name)] = *resource.NewQuantity(int64(d.healthy[name].Len()), resource.DecimalSI)
		capacity[corev1.ResourceName(name)] = *resource.NewQuantity(
			int64(d.healthy[name].Len()+d.unhealthy[name].Len()), resource.DecimalSI)
	}
	for _, name := range removed {
		delete(d.endpoints, name)
		delete(d.healthy, name)
		delete(d.unhealthy, name)
	}
	d.mu.Unlock()
	if len(removed) > 0 {
		if err := d.writeCheckpoint(); err != nil {
			klog.FromContext(ctx).Error(err, "Could not write the checkpoint")
		}
	}
	return capacity, allocatable, removed
}

// managed reports whether a device plugin provides the resource, now or when the checkpoint was written.
func (d *devices) managed(resource string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, registered := d.healthy[resource]
	_, allocated := d.allocated[resource]
	return registered || allocated
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
	if d.podDevices.keepOnly(active) {
		d.allocated = d.podDevices.allocated()
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
	for resource, h := range d.podDevices.allocations(pod.UID, container.Name) {
		if init {
			reuse[resource] = reuse[resource].Union(h.ids())
		} else {
			// App containers and sidecars keep their devices.
			reuse[resource] = reuse[resource].Difference(h.ids())
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
	collected, served := false, false
	for name, quantity := range container.Resources.Limits {
		resource := string(name)
		if !d.managed(resource) {
			continue
		}
		if !collected {
			d.collect()
			collected = true
		}
		chosen, err := d.choose(ctx, pod, container.Name, resource, int(quantity.Value()), reuse)
		if err != nil {
			return err
		}
		if chosen.Len() == 0 {
			continue
		}
		served = true
		if err := d.callAllocate(ctx, pod, container.Name, resource, chosen); err != nil {
			return err
		}
	}
	if served {
		return d.writeCheckpoint()
	}
	return nil
}

func (d *devices) callAllocate(ctx context.Context, pod *corev1.Pod, container, resource string, chosen sets.Set[string]) error {
	d.mu.Lock()
	e, ok := d.endpoints[resource]
	ids := d.order(chosen)
	if !ok {
		d.allocated = d.podDevices.allocated()
	}
	d.mu.Unlock()
	if !ok {
		return fmt.Errorf("unknown Device Plugin %s", resource)
	}

	response, err := e.allocate(ctx, pod, container, ids)
	if err != nil {
		d.mu.Lock()
		d.allocated = d.podDevices.allocated()
		d.mu.Unlock()
		return err
	}
	if len(response.ContainerResponses) == 0 {
		return fmt.Errorf("no containers return in allocation response %v", response)
	}

	perNUMA := checkpoint.DevicesPerNUMA{}
	d.mu.Lock()
	for _, id := range ids {
		nodes := d.all[resource][id].GetTopology().GetNodes()
		if len(nodes) == 0 {
			perNUMA[noNUMA] = append(perNUMA[noNUMA], id)
		}
		for _, node := range nodes {
			perNUMA[node.ID] = append(perNUMA[node.ID], id)
		}
	}
	d.mu.Unlock()
	d.podDevices.insert(pod.UID, container, resource, allocation{perNUMA, response.ContainerResponses[0]})
	return nil
}

// choose chooses devices for the container and marks them allocated. An empty result means that no Allocate call is
// needed.
func (d *devices) choose(ctx context.Context, pod *corev1.Pod, container, resource string, required int, reuse map[string]sets.Set[string]) (sets.Set[string], error) {
	d.mu.Lock()
	defer d.mu.Unlock()

	needed := required
	held := d.podDevices.devicesOf(pod.UID, container, resource)
	if held != nil {
		needed -= held.Len()
		if needed != 0 {
			return nil, fmt.Errorf("pod %q container %q changed request for resource %q from %d to %d",
				pod.UID, container, resource, held.Len(), required)
		}
	}
	if !d.sourcesReady() && d.wasRunning(pod.UID, container) {
		return nil, nil // The kubelet restarted: the container has its devices.
	}
	healthy, registered := d.healthy[resource]
	switch {
	case !registered:
		return nil, fmt.Errorf("cannot allocate unregistered device %s", resource)
	case healthy.Len() == 0:
		return nil, fmt.Errorf("no healthy devices present; cannot allocate unhealthy devices %s", resource)
	case !healthy.IsSuperset(held):
		return nil, fmt.Errorf("previously allocated devices are no longer healthy; cannot allocate unhealthy devices %s", resource)
	case needed == 0:
		return nil, nil
	}

	chosen := sets.New[string]()
	take := func(from sets.Set[string]) (enough bool) {
		if d.allocated[resource] == nil {
			d.allocated[resource] = sets.New[string]()
		}
		for _, id := range d.order(from.Difference(chosen)) {
			d.allocated[resource].Insert(id)
			chosen.Insert(id)
			needed--
			if needed == 0 {
				return true
			}
		}
		return false
	}

	if take(reuse[resource]) {
		return chosen, nil
	}
	available := healthy.Difference(d.allocated[resource])
	if available.Len() < needed {
		return nil, fmt.Errorf("requested number of devices unavailable for %s. Requested: %d, Available: %d",
			resource, needed, available.Len())
	}
	preferred, err := d.preferred(ctx, pod, container, resource, available.Union(chosen), chosen, required)
	if err != nil {
		return nil, err
	}
	if take(preferred.Intersection(available)) || take(available) {
		return chosen, nil
	}
	return nil, fmt.Errorf("unexpectedly allocated less resources than required. Requested: %d, Got: %d", required, required-needed)
}

// preferred calls GetPreferredAllocation if the plugin supports it. It releases the lock during the call.
func (d *devices) preferred(ctx context.Context, pod *corev1.Pod, container, resource string, available, mustInclude sets.Set[string], size int) (sets.Set[string], error) {
	e, ok := d.endpoints[resource]
	if !ok {
		return nil, fmt.Errorf("endpoint not found in cache for a registered resource: %s", resource)
	}
	if !e.options.GetGetPreferredAllocationAvailable() {
		return nil, nil
	}
	availableIDs, mustIncludeIDs := d.order(available), d.order(mustInclude)
	d.mu.Unlock()
	response, err := e.preferred(ctx, pod, container, availableIDs, mustIncludeIDs, size)
	d.mu.Lock()
	if err != nil {
		return nil, fmt.Errorf("device plugin GetPreferredAllocation rpc failed with err: %v", err) //nolint:errorlint // The pod's status shows this text.
	}
	if len(response.GetContainerResponses()) > 0 {
		return sets.New(response.ContainerResponses[0].DeviceIDs...), nil
	}
	return nil, nil
}

// containerSettings is what the plugins' answers add to a container.
type containerSettings struct {
	env        map[string]string
	cdiDevices []string
	devices    map[string][]string
}

// settings returns the plugins' settings for the start of a container. It allocates if no allocation is recorded, and
// calls PreStartContainer if the plugin requires it (GetDeviceRunContainerOptions).
func (d *devices) settings(ctx context.Context, pod *corev1.Pod, container *corev1.Container) (containerSettings, error) {
	missing := false
	for name, quantity := range container.Resources.Limits {
		resource := string(name)
		if !d.managed(resource) || quantity.Value() == 0 {
			continue
		}
		if err := d.preStart(ctx, pod, container.Name, resource); err != nil {
			return containerSettings{}, err
		}
		if d.active(pod.UID) && d.podDevices.devicesOf(pod.UID, container.Name, resource) == nil {
			missing = true
		}
	}
	if missing {
		if err := d.allocate(ctx, pod, container); err != nil {
			return containerSettings{}, err
		}
	}
	out := containerSettings{env: map[string]string{}, devices: map[string][]string{}}
	seen := sets.New[string]()
	for resource, h := range d.podDevices.allocations(pod.UID, container.Name) {
		out.devices[resource] = sets.List(h.ids())
		for key, value := range h.response.Envs {
			if _, taken := out.env[key]; !taken {
				out.env[key] = value
			}
		}
		for _, device := range h.response.CdiDevices {
			if !seen.Has(device.Name) {
				seen.Insert(device.Name)
				out.cdiDevices = append(out.cdiDevices, device.Name)
			}
		}
	}
	return out, nil
}

func (d *devices) active(uid types.UID) bool {
	for _, pod := range d.activePods() {
		if pod.UID == uid {
			return true
		}
	}
	return false
}

func (d *devices) preStart(ctx context.Context, pod *corev1.Pod, container, resource string) error {
	d.mu.Lock()
	e, ok := d.endpoints[resource]
	d.mu.Unlock()
	if !ok {
		return fmt.Errorf("endpoint not found in cache for a registered resource: %s", resource)
	}
	if !e.options.GetPreStartRequired() {
		return nil
	}
	held := d.podDevices.devicesOf(pod.UID, container, resource)
	if held == nil {
		return fmt.Errorf("no devices found allocated in local cache for pod %s, container %s, resource %s", pod.UID, container, resource)
	}
	if err := e.preStart(ctx, pod, container, held.UnsortedList()); err != nil {
		return fmt.Errorf("device plugin PreStartContainer rpc failed with err: %w", err)
	}
	return nil
}

// raiseAllocatable raises the node's allocatable to the allocated amount, so that pods that have their devices are not
// rejected when a plugin failed (sanitizeNodeAllocatable).
func (d *devices) raiseAllocatable(allocatable corev1.ResourceList) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for name, held := range d.allocated {
		have, ok := allocatable[corev1.ResourceName(name)]
		if !ok || have.Value() < int64(held.Len()) {
			allocatable[corev1.ResourceName(name)] = *resource.NewQuantity(int64(held.Len()), resource.DecimalSI)
		}
	}
}

// health returns the health of the container's devices by resource and ID. A device that the plugin doesn't report
// counts as healthy.
func (d *devices) health(uid types.UID, container string) map[string]map[string]bool {
	out := map[string]map[string]bool{}
	allocations := d.podDevices.allocations(uid, container)
	d.mu.Lock()
	defer d.mu.Unlock()
	for resource, h := range allocations {
		out[resource] = map[string]bool{}
		for id := range h.ids() {
			device, ok := d.all[resource][id]
			out[resource][id] = !ok || device.Health == pluginapi.Healthy
		}
	}
	return out
}

// allocatable returns the healthy devices by resource.
func (d *devices) allocatable() map[string][]*pluginapi.Device {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := map[string][]*pluginapi.Device{}
	for resource, ids := range d.healthy {
		for id := range ids {
			if device, ok := d.all[resource][id]; ok {
				out[resource] = append(out[resource], device)
			}
		}
	}
	return out
}

func (d *devices) writeCheckpoint() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	registered := make(map[string][]string, len(d.healthy))
	for resource, ids := range d.healthy {
		registered[resource] = ids.UnsortedList()
	}
	entries, err := d.podDevices.entries()
	if err != nil {
		return err
	}
	// Written under the lock, so that an older state can't replace a newer one.
	return checkpoint.Write(d.options.checkpointFile(), entries, registered)
}

// readCheckpoint loads the allocations. The resources of the checkpoint have no capacity until their plugins register.
func (d *devices) readCheckpoint() error {
	entries, registered, err := checkpoint.Read(d.options.checkpointFile())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := d.podDevices.load(entries); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.allocated = d.podDevices.allocated()
	for resource := range registered {
		d.healthy[resource] = sets.New[string]()
		d.unhealthy[resource] = sets.New[string]()
		d.endpoints[resource] = stoppedEndpoint(resource)
	}
	return nil
}

// restartable reports whether an init container is a sidecar.
func restartable(container *corev1.Container) bool {
	return container.RestartPolicy != nil && *container.RestartPolicy == corev1.ContainerRestartPolicyAlways
}
