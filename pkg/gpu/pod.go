package gpu

// PodUID is a pod's metadata.uid. Names can be reused, UIDs can't.
type PodUID string

// Pod holds the fields of a pod that decisions about cards use.
type Pod struct {
	UID       PodUID
	Namespace string
	Name      string
	// Request is the sum over the pod's containers, in the unit of the node that the pod runs on.
	Request Memory
	// Cards is the number of distinct cards of one node over which Request and Cores are divided evenly. 0 and 1 both mean one
	// card, see NumCards.
	Cards int
	// Cores is the sum over the pod's containers of the computing that they ask for; zero if the pod asks for none.
	Cores Cores
	// Containers is how many of its containers have a share of its cards at the same time. 0 and 1 both mean one container.
	Containers int32
	// Priority is spec.priority. A pod can preempt pods of lower priority.
	Priority int32
	// SharedMemory is true if one of these containers has a volume of its own for shared memory.
	SharedMemory bool
	// RDMA is whether its cards must be near an adapter.
	RDMA RDMA
	// Limits are those of its containers that may use more than they request.
	Limits Limits
	// Leaving is true if the pod is terminating. It keeps its allocation until it has ended.
	Leaving bool
	// Lingers is true if it is terminating with so long a grace period that it isn't waited for. An eviction shortens that.
	Lingers bool
}

// LeavesSoon reports whether the pod is terminating, and is waited for.
func (p *Pod) LeavesSoon() bool { return p.Leaving && !p.Lingers }

func (p Pod) String() string { return p.Namespace + "/" + p.Name }
