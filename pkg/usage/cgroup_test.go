package usage

import (
	"strings"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
)

const (
	uidA = gpu.PodUID("2b4ee5b1-5c8c-4b9e-9a35-2ce1b9b1f0a1")
	hash = gpu.PodUID("0123456789abcdef0123456789abcdef") // The UID of a static pod.
)

var (
	underscored = strings.ReplaceAll(string(uidA), "-", "_")
	idA         = strings.Repeat("a1b2c3d4", 8)
	idB         = strings.Repeat("0f", 32)
)

func TestParseCgroup(t *testing.T) {
	for name, test := range map[string]struct {
		text string
		want Owner
	}{
		"v2, systemd, containerd": {
			"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + underscored + ".slice/cri-containerd-" + idA + ".scope\n", Owner{uidA, idA}},
		"v2, systemd, guaranteed": {
			"0::/kubepods.slice/kubepods-pod" + underscored + ".slice/cri-containerd-" + idA + ".scope", Owner{uidA, idA}},
		"v2, systemd, CRI-O with crun": {
			"0::/kubepods.slice/kubepods-pod" + underscored + ".slice/crio-" + idA + ".scope/container", Owner{uidA, idA}},
		"CRI-O's monitor is no container": {
			"0::/kubepods.slice/kubepods-pod" + underscored + ".slice/crio-conmon-" + idA + ".scope", Owner{uidA, ""}},
		"v2, systemd, docker": {
			"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod" + underscored + ".slice/docker-" + idA + ".scope", Owner{uidA, idA}},
		"v2, cgroupfs":          {"0::/kubepods/burstable/pod" + string(uidA) + "/" + idA, Owner{uidA, idA}},
		"v2, cgroupfs, CRI-O":   {"0::/kubepods/pod" + string(uidA) + "/crio-" + idA, Owner{uidA, idA}},
		"a static pod":          {"0::/kubepods/burstable/pod" + string(hash) + "/" + idA, Owner{hash, idA}},
		"a static pod, systemd": {"0::/kubepods.slice/kubepods-pod" + string(hash) + ".slice/cri-containerd-" + idA + ".scope", Owner{hash, idA}},
		"kubelet with systemd, containerd without": {
			"0::/system.slice/containerd.service/kubepods-burstable-pod" + underscored + ".slice:cri-containerd:" + idA, Owner{uidA, idA}},
		"a cgroup root of the kubelet's own": {
			"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod" + underscored + ".slice/cri-containerd-" + idA + ".scope", Owner{uidA, idA}},
		"a node that is a container itself": {
			"0::/docker/" + idB + "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod" + underscored + ".slice/cri-containerd-" + idA + ".scope", Owner{uidA, idA}},
		"a container in a container": {
			"0::/kubepods/pod" + string(uidA) + "/" + idA + "/docker/" + idB, Owner{uidA, idA}},
		"systemd in a container": {
			"0::/kubepods.slice/kubepods-pod" + underscored + ".slice/cri-containerd-" + idA + ".scope/system.slice/sshd.service", Owner{uidA, idA}},
		"a private cgroup namespace, another pod":            {"0::/../../kubepods-burstable-pod" + underscored + ".slice/cri-containerd-" + idA + ".scope", Owner{uidA, idA}},
		"a private cgroup namespace, another class of pods":  {"0::/../../../kubepods-pod" + underscored + ".slice/cri-containerd-" + idA + ".scope", Owner{uidA, idA}},
		"a private cgroup namespace, the reader's own pod":   {"0::/../cri-containerd-" + idA + ".scope", Owner{"", idA}},
		"a private cgroup namespace, the reader's container": {"0::/", Owner{}},
		"v1": {"12:memory:/kubepods/burstable/pod" + string(uidA) + "/" + idA + "\n1:name=systemd:/kubepods/burstable/pod" + string(uidA) + "/" + idA, Owner{uidA, idA}},
		"v1 and v2, with the container in v1 only": {
			"3:cpu,cpuacct:/kubepods.slice/kubepods-pod" + underscored + ".slice/cri-containerd-" + idA + ".scope\n0::/system.slice/containerd.service", Owner{uidA, idA}},
		"v1, the root first":                {"9:name=systemd:/\n4:memory:/kubepods/pod" + string(uidA) + "/" + idA, Owner{uidA, idA}},
		"a cgroup that is being removed":    {"0::/kubepods/pod" + string(uidA) + "/" + idA + " (deleted)", Owner{uidA, idA}},
		"the pod's own cgroup":              {"0::/kubepods/pod" + string(uidA), Owner{uidA, ""}},
		"the pod's own cgroup in one of v1": {"2:cpu:/kubepods/pod" + string(uidA) + "\n1:memory:/kubepods/pod" + string(uidA) + "/" + idA, Owner{uidA, idA}},
		"a service of the host":             {"0::/system.slice/nvidia-persistenced.service", Owner{}},
		"a user's session":                  {"0::/user.slice/user-1000.slice/session-3.scope", Owner{}},
		"docker without Kubernetes":         {"0::/system.slice/docker-" + idB + ".scope", Owner{"", idB}},
		"a service named like a pod":        {"0::/system.slice/podman-pod.slice/x", Owner{}},
		"too short a UID":                   {"0::/kubepods/pod1234/" + idA, Owner{"", idA}},
		"a UID with other letters":          {"0::/kubepods/podzb4ee5b1-5c8c-4b9e-9a35-2ce1b9b1f0a1/x", Owner{}},
		"no text":                           {"", Owner{}},
		"no colons":                         {"kubepods", Owner{}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := ParseCgroup(test.text); got != test.want {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
		})
	}
}

// FuzzParseCgroup checks that every owner that is found has valid names, and is found again in the paths that kubelet and runtimes
// make of these names.
func FuzzParseCgroup(f *testing.F) {
	f.Add("0::/kubepods.slice/kubepods-pod" + underscored + ".slice/cri-containerd-" + idA + ".scope\n")
	f.Add("4:memory:/kubepods/pod" + string(hash) + "/" + idA + "\n0::/")
	f.Add("0::/../cri-containerd-" + idA + ".scope")
	f.Add("0::/system.slice/x-pod" + underscored + ".slice:cri-containerd:" + idA)
	f.Fuzz(func(t *testing.T, text string) {
		owner := ParseCgroup(text)
		if owner.Pod == "" && owner.Container == "" {
			return
		}
		pod, slice, id := string(owner.Pod), strings.ReplaceAll(string(owner.Pod), "-", "_"), owner.Container
		if !strings.Contains(text, pod) && !strings.Contains(text, slice) || !strings.Contains(text, id) {
			t.Fatalf("%q has no %+v", text, owner)
		}
		if pod == "" || id == "" {
			return
		}
		for _, path := range []string{
			"0::/kubepods/pod" + pod + "/" + id,
			"0::/kubepods.slice/kubepods-pod" + slice + ".slice/crio-" + id + ".scope/container",
			"7:devices:/kubepods/besteffort/pod" + pod + "/" + id + "\n" + text,
		} {
			if got := ParseCgroup(path); got != owner {
				t.Fatalf("%q: got %+v, want %+v", path, got, owner)
			}
		}
	})
}
