package gpu

// PodUID is a pod's identity over its whole life (metadata.uid). Names are used again, UIDs never.
type PodUID string

// Pod is what the scheduling of GPU memory needs to know of a pod.
type Pod struct {
	UID       PodUID
	Namespace string
	Name      string
	// Request is the pod's whole request, in the unit of whatever node it lands on.
	Request Memory
	// Priority is spec.priority: a pod of higher priority may take the place of one of lower.
	Priority int32
	// Leaving says that the pod is being deleted. It holds what it holds until it has gone.
	Leaving bool
}

// String returns namespace/name, as people and logs write it.
func (p Pod) String() string { return p.Namespace + "/" + p.Name }
