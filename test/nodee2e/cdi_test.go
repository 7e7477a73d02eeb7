package nodee2e

import (
	"slices"
	"strconv"
	"testing"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
	"github.com/gpushare/gpushare/test/simkubelet"
)

// TestCDI: with --device-list-strategy=cdi-cri the container also gets the card as a CDI device. The device is in the
// plugin's answer, as the kubelet's checkpoint keeps it, and in the kubelet's request to the container runtime. The test
// doesn't cover the runtime itself, because Debian's containerd is too old for CDI devices in the request.
func TestCDI(t *testing.T) {
	c := startCluster(t, cardMiB, cardMiB)
	cri := startCRIProxy(t, c.node.outside("lib/cri.sock"), c.node.machine.path("run/containerd/containerd.sock"))
	framework.Must(t, c.node.kubelet.Kill())
	framework.Must(t, c.node.configureKubelet("/var/lib/cri.sock"))
	framework.Must(t, c.node.kubelet.Start(t.Context()))
	framework.Must(t, c.node.restartPlugin(t.Context(), "--device-list-strategy=cdi-cri"))
	c.waitCards(t)
	c.run(t, "each container gets the device of its card", func(s *scenario) {
		s.createAndWait(
			s.pod(2).Container("second", 1), s.pod(10).Container("second", 1), s.pod(1).InitContainer("init", 2), s.pod(8),
		)
		checkpoint, err := simkubelet.ReadCheckpoint(s.node.checkpoint())
		framework.Must(s, err)
		answers := map[containerOf][]string{}
		for _, entry := range checkpoint.PodDeviceEntries {
			answer, err := entry.Response()
			framework.Must(s, err)
			for _, device := range answer.CdiDevices {
				id := containerOf{entry.PodUID, entry.ContainerName}
				answers[id] = append(answers[id], device.Name)
			}
		}
		requested, err := cri.requested()
		framework.Must(s, err)
		for _, pod := range s.list() {
			card, err := strconv.Atoi(pod.Annotations[protocol.AnnotationIndex])
			framework.Must(s, err)
			want := []string{"nvidia.com/gpu=" + cardUUID(card)}
			for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
				id := containerOf{string(pod.UID), c.Name}
				if !slices.Equal(answers[id], want) || !slices.Equal(requested[id], want) {
					s.Errorf("container %s of pod %s: the plugin returned the CDI devices %v and the kubelet requested %v, want %v",
						c.Name, pod.Name, answers[id], requested[id], want)
				}
			}
		}
	})
}
