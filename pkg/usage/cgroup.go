package usage

import (
	"regexp"
	"strings"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Owner is the container to which a process belongs, as the name of its cgroup shows it.
type Owner struct {
	// Pod is the UID under which the kubelet knows the pod; empty if the cgroup's path names no pod.
	Pod gpu.PodUID
	// Container is the container's ID without the runtime's scheme; empty for a cgroup of the pod itself.
	Container string
}

// ParseCgroup returns the owner of a process from the content of /proc/PID/cgroup (cgroups(7)). The zero Owner means that the
// process belongs to no container. A path can be relative to the reader's cgroup namespace, and then begins with "/..".
func ParseCgroup(text string) Owner {
	var best Owner
	for line := range strings.SplitSeq(text, "\n") {
		// HIERARCHY:CONTROLLERS:PATH. A path can contain colons, controllers can't.
		_, rest, _ := strings.Cut(line, ":")
		_, path, _ := strings.Cut(rest, ":")
		// A process can be in cgroups of one container in several hierarchies, and in the root of others.
		owner := ownerOf(strings.TrimSuffix(path, " (deleted)"))
		if owner.Pod != "" && owner.Container != "" {
			return owner
		}
		if best == (Owner{}) || best.Pod == "" && owner.Pod != "" {
			best = owner
		}
	}
	return best
}

// ownerOf returns the owner that a cgroup's path names. The component of a container follows that of its pod: further components
// belong to what runs in the container. A path without a pod is that of another container of the reader's own pod, relative to
// the reader's cgroup, or of a container that belongs to no pod.
func ownerOf(path string) Owner {
	components := strings.Split(path, "/")
	for i, component := range components {
		match := podName.FindStringSubmatch(component)
		if match == nil {
			continue
		}
		owner := Owner{Pod: gpu.PodUID(strings.ReplaceAll(match[1], "_", "-"))}
		if joined := match[2]; joined != "" {
			owner.Container = containerID(joined)
		} else if i+1 < len(components) {
			owner.Container = containerID(components[i+1])
		}
		return owner
	}
	for _, component := range components {
		if id := containerID(component); id != "" {
			return Owner{Container: id}
		}
	}
	return Owner{}
}

var (
	// podName matches the name of a pod's cgroup. The kubelet's names are podUID with the cgroupfs driver and …-podUID.slice with the systemd
	// driver, where dashes of the UID are underscores (k8s.io/kubernetes pkg/kubelet/cm, GetPodContainerName and ToSystemd). A static pod's
	// UID is the hash of its manifest, which has no dashes. With a kubelet that uses systemd and a containerd that doesn't, the
	// container follows in the same name: SLICE:PREFIX:ID.
	podName = regexp.MustCompile(`^(?:.*-)?pod([0-9a-f]{8}(?:(?:-[0-9a-f]{4}){3}-|(?:_[0-9a-f]{4}){3}_)[0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?(?::(.*))?$`)
	// containerName matches the name of a container's cgroup. The names are ID, and with a prefix of the runtime crio-ID, cri-containerd:ID, and
	// cri-containerd-ID.scope, crio-ID.scope, docker-ID.scope, libpod-ID.scope.
	containerName = regexp.MustCompile(`^(?:.*[-:])?([0-9a-f]{64})(?:\.scope)?$`)
)

// containerID returns the ID in a cgroup's name, and "" if it isn't that of a container. CRI-O's monitor of a container has
// crio-conmon-ID.scope.
func containerID(name string) string {
	if match := containerName.FindStringSubmatch(name); match != nil && !strings.Contains(name, "conmon") {
		return match[1]
	}
	return ""
}
