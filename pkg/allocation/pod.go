package allocation

import (
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// Pod is the part of a pod that decisions read. The pod asks for GPU memory.
type Pod struct {
	gpu.Pod
	Created time.Time
	// Version grows with each write of any pod. The last write of a pod that has not been admitted is usually its Binding, so
	// versions show the order in which pods came to the node.
	Version uint64
	// Terminal is true for a pod that no longer holds memory.
	Terminal bool
	// Mirror is true if the object mirrors a static pod. The kubelet knows a static pod by another UID than the object's.
	Mirror bool
	// Resized is true if the kubelet hasn't reported on the pod's latest spec, so it may be admitting the pod for a resize now.
	// ResizePending is true if the kubelet has deferred a resize, which it retries from time to time. Both are set only for pods
	// that were just read from the API server.
	Resized, ResizePending bool
	// Ran is true if a container of the pod has run: the kubelet has admitted the pod and allocated for all its containers.
	Ran bool
	// Containers are the containers that ask for GPU memory, in the order in which the kubelet allocates for them.
	Containers []Container
	// Assumed is true if the annotations name a card. Assignment has it.
	Assumed    bool
	Assignment protocol.Assignment
	// Assigned is what the annotations claim. HasAssumeTime is true if the annotations have an assume time, valid or not,
	// regardless of the other annotations.
	Assigned, HasAssumeTime bool
	// Isolation is the annotation that reports the limits of the containers; empty if there is none.
	Isolation string
	// Overuse is the annotation that reports that the pod uses more than it requests; empty if there is none.
	Overuse string
	// Placement is the memory that the annotations name. It is empty if they name none.
	Placement gpu.Placement
}

// Container is a container that asks for GPU memory.
type Container struct {
	Name    string
	Request gpu.Memory
	// Init is true for an ordinary init container, which the kubelet's PodResources service doesn't list.
	Init bool
	// Running is true if the container runs, or is an init container that has ended, because a container after it runs.
	Running bool
	// SharedMemory is true if the container mounts a volume of its pod at /dev/shm.
	SharedMemory bool
}

// ContainerKey identifies a container of a node.
type ContainerKey struct {
	UID  gpu.PodUID
	Name string
}

// runs reports whether the container runs, according to the API server, and is not an init container.
func (p *Pod) runs(container string) bool {
	return slices.ContainsFunc(p.Containers, func(c Container) bool { return c.Name == container && c.Running && !c.Init })
}
