package cluster

import (
	corev1 "k8s.io/api/core/v1"
)

// interferes reports whether a pod may keep the preemptor off a node by more than the resources that it uses. Then it
// is unknown whether the preemptor fits beside that pod. It approximates the filters of kube-scheduler that depend on
// other pods (NodePorts, InterPodAffinity, PodTopologySpread, VolumeRestrictions, NodeVolumeLimits, DynamicResources).
// It may return true too often, but never false too often. pod is as the cache keeps it, see markInterference;
// preemptor is complete.
func interferes(pod, preemptor *corev1.PodSpec) bool {
	return pod.Affinity != nil && pod.Affinity.PodAntiAffinity != nil || minds(preemptor) ||
		len(pod.Volumes) > 0 && hasRareVolumes(preemptor) ||
		len(pod.ResourceClaims) > 0 && len(preemptor.ResourceClaims) > 0 ||
		portsConflict(hostPorts(pod), hostPorts(preemptor))
}

// minds reports whether the pod has constraints on the other pods of its node.
func minds(spec *corev1.PodSpec) bool {
	for _, constraint := range spec.TopologySpreadConstraints {
		if constraint.WhenUnsatisfiable == corev1.DoNotSchedule {
			return true
		}
	}
	return keepsOthersOff(spec)
}

func keepsOthersOff(spec *corev1.PodSpec) bool {
	return spec.Affinity != nil && spec.Affinity.PodAntiAffinity != nil &&
		len(spec.Affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution) > 0
}

// hasRareVolumes reports whether the pod has volumes that two pods, or many pods of one node, can't use at the same
// time.
func hasRareVolumes(spec *corev1.PodSpec) bool {
	for i := range spec.Volumes {
		switch source := &spec.Volumes[i].VolumeSource; {
		case source.EmptyDir != nil, source.ConfigMap != nil, source.Secret != nil, source.Projected != nil,
			source.DownwardAPI != nil, source.HostPath != nil, source.NFS != nil, source.Image != nil:
		default:
			return true
		}
	}
	return false
}

// markInterference marks in slim which fields of full interferes depends on. It copies only their presence, to save
// memory.
func markInterference(slim, full *corev1.PodSpec) {
	if keepsOthersOff(full) {
		slim.Affinity = &someAffinity
	}
	if hasRareVolumes(full) {
		slim.Volumes = someVolumes
	}
	if len(full.ResourceClaims) > 0 {
		slim.ResourceClaims = someClaims
	}
}

// The marks. All pods of the cache share them; they are never changed.
var (
	someAffinity = corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{}}
	someVolumes  = []corev1.Volume{{}}
	someClaims   = []corev1.PodResourceClaim{{}}
)

// hostPorts returns the host ports of the pod's containers and sidecars (init containers that restart always).
func hostPorts(spec *corev1.PodSpec) []corev1.ContainerPort {
	var ports []corev1.ContainerPort
	collect := func(container *corev1.Container) {
		for _, port := range container.Ports {
			if port.HostPort > 0 {
				ports = append(ports, port)
			}
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

// portsConflict reports whether the two lists have a host port in common.
func portsConflict(a, b []corev1.ContainerPort) bool {
	for _, p := range a {
		for _, q := range b {
			if p.HostPort == q.HostPort && protocolOf(p) == protocolOf(q) &&
				(anyAddress(p.HostIP) || anyAddress(q.HostIP) || p.HostIP == q.HostIP) {
				return true
			}
		}
	}
	return false
}

func protocolOf(port corev1.ContainerPort) corev1.Protocol {
	if port.Protocol == "" {
		return corev1.ProtocolTCP
	}
	return port.Protocol
}

func anyAddress(ip string) bool { return ip == "" || ip == "0.0.0.0" }
