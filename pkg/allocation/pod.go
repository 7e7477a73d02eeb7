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
	// Ended is true for a pod that no longer holds memory.
	Ended bool
	// LeavesBy is the time up to which a terminating pod is waited for, see protocol.LeavesBy.
	LeavesBy time.Time
	// Mirror is true if the object mirrors a static pod. The kubelet knows a static pod by another UID than the object's.
	Mirror bool
	// Ran is true if a container of the pod has run: the kubelet has admitted the pod and allocated for all its containers.
	Ran bool
	// Containers are the containers that ask for GPU memory, in the order in which the kubelet allocates for them.
	Containers []Container
	// AppRequests are the requests of all app containers, in the order of the spec.
	AppRequests []gpu.Memory
	// Invalid is why no card can be selected for the pod: its label or a container's request. It has no meaning for a pod whose
	// cards are known.
	Invalid error
	// Assumed is true if the annotations name cards over which the pod's request is divided evenly. Assignment has them, ordered
	// by index, and so many Cards has the pod.
	Assumed    bool
	Assignment protocol.Assignment
	// Assigned is what the annotations claim. HasAssumeTime is true if the annotations have an assume time, valid or not,
	// regardless of the other annotations.
	Assigned, HasAssumeTime bool
	// Isolation is the annotation that reports the limits of the containers; empty if there is none.
	Isolation string
	// Overuse is the annotation that reports that the pod uses more than it requests; empty if there is none.
	Overuse string
	// LostCards is the annotation that names cards that the node doesn't have any more; empty if there is none.
	LostCards string
	// Placement is the memory that the annotations name. It is empty if they name none.
	Placement gpu.Placement
}

// Container is a container that asks for GPU memory.
type Container struct {
	Name string
	// Request and Cores are the container's, over all of its cards.
	Request gpu.Memory
	Cores   gpu.Cores
	// Limit is the annotated limit in bytes, over all of the container's cards; 0 if there is none.
	Limit uint64
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

// DemandOver returns what the pod asks for of each card if its request is divided over this number of cards.
func (p *Pod) DemandOver(cards int) gpu.Demand {
	of := p.Pod
	of.Cards = cards
	return of.Demand()
}

// Even reports whether the request of each container can be divided evenly over this number of cards.
func (p *Pod) Even(cards int) bool {
	return !slices.ContainsFunc(p.Containers, func(c Container) bool { return !c.even(cards) })
}

// Share returns what the container gets of each of this number of cards.
func (c Container) Share(cards int) gpu.Demand {
	return gpu.Pod{Request: c.Request, Cores: c.Cores, Cards: cards}.Demand()
}

// limitStep is what limits above requests are rounded up to, so that a node has few different ones: 128 MiB.
const limitStep = 128 << 20

// Allowed returns how much of each of its cards the container may use, in bytes: its limit, at least what it requests and at most what the smallest
// card has. The annotation can have changed since filter has checked it.
func (c Container) Allowed(cards []gpu.Card, unit gpu.Unit) uint64 {
	n := len(cards)
	request := unit.Bytes(c.Share(n).Memory)
	if n == 0 || c.Limit/uint64(n) <= request {
		return request
	}
	allowed := (c.Limit/uint64(n)-1)/limitStep*limitStep + limitStep
	for _, card := range cards {
		allowed = min(allowed, unit.Bytes(card.Memory))
	}
	return max(allowed, request)
}

func (c Container) even(cards int) bool {
	return c.Request%gpu.Memory(cards) == 0 && c.Cores%gpu.Cores(cards) == 0
}

// runs reports whether the container runs, according to the API server, and is not an init container.
func (p *Pod) runs(container string) bool {
	return slices.ContainsFunc(p.Containers, func(c Container) bool { return c.Name == container && c.Running && !c.Init })
}
