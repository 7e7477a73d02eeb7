package usage

import (
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
		// With a kubelet that uses systemd and a containerd that doesn't, one component has both: SLICE:PREFIX:ID.
		slice, scope, joined := strings.Cut(component, ":")
		uid := podUID(slice)
		switch {
		case uid == "":
		case joined:
			return Owner{Pod: uid, Container: containerID(scope)}
		case i+1 < len(components):
			return Owner{Pod: uid, Container: containerID(components[i+1])}
		default:
			return Owner{Pod: uid}
		}
	}
	for _, component := range components {
		if id := containerID(component); id != "" {
			return Owner{Container: id}
		}
	}
	return Owner{}
}

// podUID returns the pod's UID from a cgroup's name, and "" if it isn't that of a pod. The kubelet's names are podUID with the
// cgroupfs driver and …-podUID.slice with the systemd driver, where dashes of the UID are underscores
// (k8s.io/kubernetes pkg/kubelet/cm, GetPodContainerName and ToSystemd).
func podUID(name string) gpu.PodUID {
	if slice, ok := strings.CutSuffix(name, ".slice"); ok {
		name = slice[strings.LastIndexByte(slice, '-')+1:]
		if strings.IndexByte(slice, '-') < 0 {
			return "" // The kubelet's own slices come before it.
		}
		name = strings.ReplaceAll(name, "_", "-")
	}
	uid, ok := strings.CutPrefix(name, "pod")
	if !ok || !isUID(uid) {
		return ""
	}
	return gpu.PodUID(uid)
}

// isUID reports whether a text is a pod's UID: a UUID, or the hash of a static pod's manifest, which has no dashes.
func isUID(s string) bool {
	digits := 0
	for i := range len(s) {
		switch {
		case isHex(s[i]):
			digits++
		case s[i] != '-' || len(s) != 36:
			return false
		}
	}
	return digits == 32
}

// containerID returns the ID in a cgroup's name, and "" if it isn't that of a container. The names are ID, and with a prefix of
// the runtime crio-ID, cri-containerd:ID, and cri-containerd-ID.scope, crio-ID.scope, docker-ID.scope, libpod-ID.scope. CRI-O's
// monitor of a container has crio-conmon-ID.scope.
func containerID(name string) string {
	name = strings.TrimSuffix(name, ".scope")
	if strings.Contains(name, "conmon") {
		return ""
	}
	id := name[strings.LastIndexAny(name, "-:")+1:]
	if len(id) != 64 {
		return ""
	}
	for i := range len(id) {
		if !isHex(id[i]) {
			return ""
		}
	}
	return id
}

func isHex(c byte) bool { return '0' <= c && c <= '9' || 'a' <= c && c <= 'f' }
