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

// A card falls off the bus while the plugin is away, and NVML renumbers its cards. It stays in the inventory until the plugin has left
// the node and what it kept there was removed.
func TestCardsAcrossRestarts(t *testing.T) {
	bed := framework.StartForTest(t, framework.Options{MemoryUnit: "GiB"})
	node := addMachine(t, bed, framework.NodeSpec{
		Name: "node", Cards: []uint64{16384, 16384, 16384}, PluginArgs: []string{"--visible-devices=index", "--health-quiet-period=1s"},
	})
	cards := func(ctx context.Context) (protocol.Inventory, error) {
		object, err := bed.Client.CoreV1().Nodes().Get(ctx, node.Name, metav1.GetOptions{})
		if err != nil {
			return protocol.Inventory{}, err
		}
		return protocol.ParseInventory(object.Annotations)
	}

	playOn(t, bed, node, "a card that is left keeps its index, and NVIDIA's runtime is told the driver's", func(s *scene) {
		before, err := cards(s.Context())
		must(s, err)
		must(s, node.Plugin.Terminate(s.Context()))
		var left []fakenvml.Card
		for _, card := range before.Cards[1:] {
			left = append(left, fakenvml.Card{UUID: card.UUID, Model: card.Model, MiB: 16384, NUMANode: card.NUMANode})
		}
		must(s, node.Machine.SetCards(left...))
		must(s, node.Plugin.Start(s.Context()))
		want := slices.Clone(before.Cards)
		want[0].Unhealthy = "the driver doesn't report it any more"
		eventually(s, "the node lists all cards, the missing one as unhealthy", func(ctx context.Context) error {
			now, err := cards(ctx)
			if err != nil {
				return err
			}
			if !slices.Equal(now.Cards, want) {
				return fmt.Errorf("it lists %v", now.Cards)
			}
			return nil
		})
		for i := range 2 {
			pod := s.assigned(s.place(fmt.Sprintf("pod-%d", i), 16, on(node.Name)).Name)
			env := node.Kubelet.Env(pod.UID, "main")
			index, err := strconv.Atoi(env[protocol.AnnotationIndex])
			must(s, err)
			if env[protocol.AnnotationIndex] != pod.Annotations[protocol.AnnotationIndex] || env[protocol.EnvVisibleDevices] != strconv.Itoa(index-1) {
				s.Errorf("annotated with card %s the container got %v", pod.Annotations[protocol.AnnotationIndex], env)
			}
		}
	})

	cleanUp := func() {
		t.Helper()
		must(t, node.Plugin.Terminate(t.Context()))
		out, err := exec.CommandContext(t.Context(), bed.Binary("gpushare-device-plugin"), "--cleanup", "--node-name="+node.Name,
			"--kubeconfig="+bed.KubeconfigPath).CombinedOutput()
		if err != nil {
			t.Fatalf("--cleanup: %v: %s", err, out)
		}
		object, err := bed.Client.CoreV1().Nodes().Get(t.Context(), node.Name, metav1.GetOptions{})
		must(t, err)
		_, inCapacity := object.Status.Capacity[protocol.ResourceCount]
		_, inAllocatable := object.Status.Allocatable[protocol.ResourceCount]
		if _, told := object.Annotations[protocol.AnnotationInventory]; told || inCapacity || inAllocatable {
			t.Errorf("cleaned up (%s), the node has %v and %v", out, object.Annotations, object.Status.Capacity)
		}
	}
	cleanUp()
	playOn(t, bed, node, "the missing card is retired", func(s *scene) {
		must(s, node.Plugin.Start(s.Context()))
		eventually(s, "the node lists the cards that it has", func(ctx context.Context) error {
			now, err := cards(ctx)
			if err == nil && len(now.Cards) != 2 {
				err = fmt.Errorf("it lists %v", now.Cards)
			}
			return err
		})
	})
	cleanUp()
}
