// Package realgpu tests the node's programs with the real NVIDIA driver library on a machine that has one: the inventory of
// the cards, their registration with a simulated kubelet, a container that gets a card, measured use, and limits by the driver and by MPS.
// It skips with the reason what the machine can't do.
package realgpu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/features"
	featurestesting "k8s.io/client-go/features/testing"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"github.com/gpushare/gpushare/pkg/deviceplugin"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	testfake "github.com/gpushare/gpushare/test/fake"
	"github.com/gpushare/gpushare/test/framework"
	"github.com/gpushare/gpushare/test/simkubelet"
)

const node = "gpu-node"

// listCards returns the machine's cards. Without cards it skips the test with a visible message.
func listCards(t *testing.T) []gpu.Card {
	t.Helper()
	state, err := inventory.List(t.Context(), inventory.Options{Settings: inventory.Settings{Unit: gpu.GiB}})
	if err == nil && len(state.Cards) == 0 {
		err = fmt.Errorf("%w: %s", inventory.ErrNoLibrary, state.Problem)
	}
	if errors.Is(err, inventory.ErrNoLibrary) {
		fmt.Fprintf(os.Stderr, "SKIPPED %s: no real GPU on this machine: %v\n", t.Name(), err)
		t.Skip(err)
	}
	check.Must(t, err)
	return state.Cards
}

func TestInventory(t *testing.T) {
	for _, card := range listCards(t) {
		t.Logf("card %d: %s, %s, %d GiB, NUMA node %d, unhealthy %q", card.Index, card.UUID, card.Model, card.Memory, card.NUMANode, card.Unhealthy)
		if !strings.HasPrefix(card.UUID, "GPU-") || card.Model == "" || card.Memory == 0 {
			t.Errorf("card %d has no UUID, model or memory: %+v", card.Index, card)
		}
	}
}

func TestContainerGetsCard(t *testing.T) {
	cards := listCards(t)
	root, err := os.MkdirTemp("", "gpushare-") // The path is short because it contains sockets.
	check.Must(t, err)
	defer os.RemoveAll(root)
	api := fake.NewClientset()
	featurestesting.SetFeatureDuringTest(t, features.WatchListClient, false) // api can't send a list as a watch.
	kubelet, err := simkubelet.New(simkubelet.Options{NodeName: node, Client: api, Root: root})
	check.Must(t, err)
	plugin, err := deviceplugin.New(deviceplugin.Options{
		Client: deviceplugin.Client{
			Pods: func(namespace string) deviceplugin.Objects[*corev1.Pod, *corev1.PodList] {
				return api.CoreV1().Pods(namespace)
			},
			Nodes: api.CoreV1().Nodes(), Slices: testfake.Slices(),
		},
		Events: record.NewFakeRecorder(100), NodeName: node,
		VisibleDevices: deviceplugin.VisibleByUUID, Directory: kubelet.DevicePluginDir(),
		PodResourcesSocket: kubelet.PodResourcesSocket(),
	})
	check.Must(t, err)
	monitor := inventory.New(inventory.Options{Settings: inventory.Settings{Unit: gpu.GiB}})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 3)
	go func() { ended <- kubelet.Run(ctx) }()
	go func() { ended <- plugin.Run(ctx) }()
	go func() {
		ended <- monitor.Run(ctx, func(s inventory.State) { plugin.SetCards(s.Unit, s.Cards, s.Adapters, s.Moved, s.Problem) })
	}()
	defer func() {
		stop()
		for range cap(ended) {
			check.NoError(t, <-ended)
		}
	}()

	var total gpu.Memory
	for _, card := range cards {
		total = total.Add(card.Memory)
	}
	framework.Eventually(t, "the node has its cards", func(ctx context.Context) error {
		object, err := api.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		memory, count := object.Status.Allocatable[protocol.ResourceMemory], object.Status.Allocatable[protocol.ResourceCount]
		if memory.Value() != int64(total) || count.Value() != int64(len(cards)) {
			return fmt.Errorf("it has %s units and %s cards", memory.String(), count.String())
		}
		return nil
	})
	pod := framework.MakePod("pod").Namespace("default").UID("uid").Node(node).GPUMem(1).Obj()
	pod.CreationTimestamp = metav1.Now()
	_, err = api.CoreV1().Pods("default").Create(ctx, pod, metav1.CreateOptions{})
	check.Must(t, err)
	var env map[string]string
	framework.Eventually(t, "the container runs", func(context.Context) error {
		if env = kubelet.Env(pod.UID, framework.MainContainer); env == nil {
			return errors.New("it doesn't")
		}
		return nil
	})
	if !slices.ContainsFunc(cards, func(card gpu.Card) bool {
		return env[protocol.EnvVisibleDevices] == card.UUID && env[protocol.AnnotationIndex] == strconv.Itoa(card.Index)
	}) {
		t.Errorf("the container got %v, which is none of the cards %+v", env, cards)
	}
}
