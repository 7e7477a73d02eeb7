package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/fakenvml"
	"github.com/gpushare/gpushare/test/framework"
)

// inventory returns the inventory in the node's annotation.
func (s *scene) inventory(ctx context.Context, m machine) (protocol.Inventory, error) {
	object, err := s.Cluster.Client.CoreV1().Nodes().Get(ctx, m.Name, metav1.GetOptions{})
	if err != nil {
		return protocol.Inventory{}, err
	}
	return protocol.ParseInventory(object.Annotations)
}

// TestFailedCard shows what docs/operations.md says of a failed card: the node has the memory of its healthy cards, and
// kube-scheduler still subtracts the requests of the pods on the failed card from it.
func TestFailedCard(t *testing.T) {
	c := shared.Start(t)
	m := addMachine(t, c, framework.NodeSpec{Name: "node", MemoryUnit: "GiB", Cards: []uint64{16384, 16384}})
	playOn(t, c, m, "a pod is pending although the healthy card is free", func(s *scene) {
		s.Place(s.Pod("first", 16).OnNode(m.Name))
		first := s.WaitAssigned("first")
		inventory, err := s.inventory(s.Context(), m)
		must(s, err)
		must(s, m.Machine.Xid(inventory.Cards[s.CardOf(first)].UUID, 79))
		s.waitAllocatable(m, 16)
		s.Create(s.Pod("second", 16).OnNode(m.Name))
		s.rejected("second", "Insufficient "+string(protocol.ResourceMemory))
		s.remove("first")
		s.WaitAssigned("second")
	})
}

// TestMissingCard removes a card while the plugin is away, so that NVML renumbers the others. The card stays in the inventory
// until the plugin has left the node and --cleanup has removed what it wrote there.
func TestMissingCard(t *testing.T) {
	c := shared.Start(t)
	m := addMachine(t, c, framework.NodeSpec{
		Name: "node", MemoryUnit: "GiB", Cards: []uint64{16384, 16384, 16384}, PluginArgs: []string{"--visible-devices=index", "--health-quiet-period=1s"},
	})

	playOn(t, c, m, "the other cards keep their index, and NVIDIA's runtime gets the driver's", func(s *scene) {
		before, err := s.inventory(s.Context(), m)
		must(s, err)
		must(s, m.Plugin.Terminate(s.Context()))
		var left []fakenvml.Card
		for _, card := range before.Cards[1:] {
			left = append(left, fakenvml.Card{UUID: card.UUID, Model: card.Model, MiB: 16384, NUMANode: card.NUMANode})
		}
		must(s, m.Machine.SetCards(left...))
		must(s, m.Plugin.Start(s.Context()))
		want := slices.Clone(before.Cards)
		want[0].Unhealthy = "the driver doesn't report it any more"
		s.Eventually("the inventory has the missing card as unhealthy", func(ctx context.Context) error {
			now, err := s.inventory(ctx, m)
			if err == nil && !slices.Equal(now.Cards, want) {
				err = fmt.Errorf("it has %v", now.Cards)
			}
			return err
		})
		for i := range 2 {
			s.Create(s.Pod(fmt.Sprintf("pod-%d", i), 16).OnNode(m.Name))
			pod := s.WaitAssigned(fmt.Sprintf("pod-%d", i))
			env := m.Kubelet.Env(pod.UID, framework.MainContainer)
			index, err := strconv.Atoi(env[protocol.AnnotationIndex])
			must(s, err)
			if env[protocol.AnnotationIndex] != pod.Annotations[protocol.AnnotationIndex] || env[protocol.EnvVisibleDevices] != strconv.Itoa(index-1) {
				s.Errorf("the pod is annotated with card %s, its container has %v", pod.Annotations[protocol.AnnotationIndex], env)
			}
		}
	})

	playOn(t, c, m, "it is retired by --cleanup", func(s *scene) {
		must(s, m.Plugin.Terminate(s.Context()))
		out, err := exec.CommandContext(s.Context(), c.Binary("gpushare-device-plugin"), "--cleanup", "--node-name="+m.Name,
			"--kubeconfig="+c.KubeconfigPath).CombinedOutput()
		if err != nil {
			s.Fatalf("--cleanup: %v: %s", err, out)
		}
		object, err := c.Client.CoreV1().Nodes().Get(s.Context(), m.Name, metav1.GetOptions{})
		must(s, err)
		_, inCapacity := object.Status.Capacity[protocol.ResourceCount]
		_, inAllocatable := object.Status.Allocatable[protocol.ResourceCount]
		if _, found := object.Annotations[protocol.AnnotationInventory]; found || inCapacity || inAllocatable {
			s.Errorf("after --cleanup (%s) the node has %v and %v", out, object.Annotations, object.Status.Capacity)
		}
		must(s, m.Plugin.Start(s.Context()))
		s.Eventually("the inventory has the two remaining cards", func(ctx context.Context) error {
			now, err := s.inventory(ctx, m)
			if err == nil && len(now.Cards) != 2 {
				err = fmt.Errorf("it has %v", now.Cards)
			}
			return err
		})
	})
}
