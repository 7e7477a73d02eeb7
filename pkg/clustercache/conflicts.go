package clustercache

import (
	"cmp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
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
	// HostPorts are the host ports of the pod's containers and sidecars, whatever their addresses; nil if there are none.
	HostPorts sets.Set[HostPort]
}

// HostPort is a port that a container uses on its node.
type HostPort struct {
	Port     int32
	Protocol corev1.Protocol
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

// PortsConflict reports whether the two pods have a host port in common.
func (c *Conflicts) PortsConflict(o *Conflicts) bool {
	return len(c.HostPorts.Intersection(o.HostPorts)) > 0
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

// hostPorts returns the host ports of the pod's containers and sidecars (init containers that restart always).
func hostPorts(spec *corev1.PodSpec) (ports sets.Set[HostPort]) {
	collect := func(container *corev1.Container) {
		for _, port := range container.Ports {
			if port.HostPort <= 0 {
				continue
			}
			if ports == nil {
				ports = sets.Set[HostPort]{}
			}
			ports.Insert(HostPort{port.HostPort, cmp.Or(port.Protocol, corev1.ProtocolTCP)})
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
	return ports
}
