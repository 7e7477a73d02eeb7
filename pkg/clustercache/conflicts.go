package clustercache

import (
	"cmp"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// Conflicts are the properties of a pod by which, beside the resources that it uses, it may keep another pod off its node.
type Conflicts struct {
	// RequiredAntiAffinity is true if the pod has required anti-affinity to other pods.
	RequiredAntiAffinity bool
	// RequiredSpread is true if the pod has a topology spread constraint that forbids nodes (DoNotSchedule).
	RequiredSpread bool
	// RareVolumes is true if the pod has volumes that two pods, or many pods of one node, can't use at the same time.
	RareVolumes bool
	// Claims is true if the pod has resource claims.
	Claims bool
	// HostPorts is the set of host ports of the pod's containers and sidecars, sorted by compareHostPorts.
	HostPorts []HostPort
}

// HostPort is a port that a container uses on its node.
type HostPort struct {
	Port     int32
	Protocol corev1.Protocol
	// Address is empty if the container listens on every address of the node.
	Address string
}

// Interferes reports whether a pod may keep the preemptor off a node by more than the resources that it uses. Then it
// is unknown whether the preemptor fits beside that pod. It approximates the filters of kube-scheduler that depend on
// other pods (NodePorts, InterPodAffinity, PodTopologySpread, VolumeRestrictions, NodeVolumeLimits, DynamicResources).
// It may return true too often, but never false too often.
func Interferes(pod, preemptor *PodInfo) bool {
	if pod.TooLarge || preemptor.TooLarge {
		return true
	}
	a, b := &pod.Conflicts, &preemptor.Conflicts
	return a.RequiredAntiAffinity || b.RequiredAntiAffinity || b.RequiredSpread ||
		a.RareVolumes && b.RareVolumes || a.Claims && b.Claims || a.PortsConflict(b)
}

// Constrained reports whether kube-scheduler may reject a node that the pod can use, because of other pods or of volumes.
func (p *PodInfo) Constrained() bool {
	c := &p.Conflicts
	return p.TooLarge || c.RequiredAntiAffinity || c.RequiredSpread || c.RareVolumes || c.Claims || len(c.HostPorts) > 0
}

func conflictsOf(spec *corev1.PodSpec) Conflicts {
	return Conflicts{
		RequiredAntiAffinity: spec.Affinity != nil && spec.Affinity.PodAntiAffinity != nil &&
			len(spec.Affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution) > 0,
		RequiredSpread: slices.ContainsFunc(spec.TopologySpreadConstraints, func(c corev1.TopologySpreadConstraint) bool {
			return c.WhenUnsatisfiable == corev1.DoNotSchedule
		}),
		RareVolumes: slices.ContainsFunc(spec.Volumes, isRare),
		Claims:      len(spec.ResourceClaims) > 0,
		HostPorts:   hostPorts(spec),
	}
}

func isRare(volume corev1.Volume) bool {
	return volume.EmptyDir == nil && volume.ConfigMap == nil && volume.Secret == nil && volume.Projected == nil &&
		volume.DownwardAPI == nil && volume.HostPath == nil && volume.NFS == nil && volume.Image == nil
}

// hostPorts returns the host ports of the pod's containers and sidecars (init containers that restart always) as a sorted set. The API server
// accepts no port of a pod twice.
func hostPorts(spec *corev1.PodSpec) (ports []HostPort) {
	collect := func(container *corev1.Container) {
		for _, port := range container.Ports {
			if port.HostPort <= 0 {
				continue
			}
			address := port.HostIP
			if address == "0.0.0.0" {
				address = ""
			}
			ports = append(ports, HostPort{Port: port.HostPort, Protocol: cmp.Or(port.Protocol, corev1.ProtocolTCP), Address: address})
		}
	}
	for i := range spec.InitContainers {
		if policy := spec.InitContainers[i].RestartPolicy; policy != nil && *policy == corev1.ContainerRestartPolicyAlways {
			collect(&spec.InitContainers[i])
		}
	}
	for i := range spec.Containers {
		collect(&spec.Containers[i])
	}
	slices.SortFunc(ports, compareHostPorts)
	return ports
}

// compareHostPorts orders by port and protocol. The entry for every address comes first.
func compareHostPorts(a, b HostPort) int {
	return cmp.Or(cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Address, b.Address))
}

// PortsConflict reports whether the two pods have a host port in common.
func (c *Conflicts) PortsConflict(o *Conflicts) bool {
	few, many := c.HostPorts, o.HostPorts
	if len(few) > len(many) {
		few, many = many, few
	}
	return slices.ContainsFunc(few, func(p HostPort) bool {
		everywhere := HostPort{Port: p.Port, Protocol: p.Protocol}
		i, found := slices.BinarySearchFunc(many, everywhere, compareHostPorts)
		if !found && p.Address != "" {
			_, found = slices.BinarySearchFunc(many[i:], p, compareHostPorts)
		} else if !found && i < len(many) { // The next entry is the first for some address.
			found = many[i].Port == p.Port && many[i].Protocol == p.Protocol
		}
		return found
	})
}
