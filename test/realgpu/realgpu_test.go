// Package realgpu runs the node's half against the real NVIDIA driver library, where a machine has one: the cards'
// inventory, their registration with a (simulated) kubelet, and a container that is given a card.
package realgpu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"github.com/gpushare/gpushare/pkg/deviceplugin"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/simkubelet"
)

const (
	node     = "gpu-node"
	patience = time.Minute
)

// cards returns the machine's cards, and skips the test, loudly, where there are none.
func cards(t *testing.T) []gpu.Card {
	t.Helper()
	state, err := inventory.List(t.Context(), inventory.Options{Unit: gpu.GiB})
	if errors.Is(err, inventory.ErrNoLibrary) || err == nil && len(state.Cards) == 0 {
		reason := "no real GPU on this machine: " + state.Problem
		if err != nil {
			reason = "no real GPU on this machine: " + err.Error()
		}
		fmt.Fprintf(os.Stderr, "SKIPPED %s: %s\n", t.Name(), reason)
		t.Skip(reason)
	}
	if err != nil {
		t.Fatal(err)
	}
	return state.Cards
}

func TestInventory(t *testing.T) {
	for _, card := range cards(t) {
		t.Logf("card %d: %s, %s, %d GiB, NUMA node %d, unhealthy %q", card.Index, card.UUID, card.Model, card.Memory, card.NUMANode, card.Unhealthy)
		if !strings.HasPrefix(card.UUID, "GPU-") || card.Model == "" || card.Memory == 0 {
			t.Errorf("card %d lacks its UUID, model or memory: %+v", card.Index, card)
		}
	}
}

func TestAContainerIsGivenACard(t *testing.T) {
	all := cards(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	// Not t.TempDir: Unix sockets lie below it, and their paths may not be long.
	root, err := os.MkdirTemp("", "gpushare-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(root)

	api := fake.NewClientset()
	kubelet, err := simkubelet.New(simkubelet.Options{NodeName: node, Client: api, Root: root, LiftNotReadyTaint: true})
	if err != nil {
		t.Fatal(err)
	}
	plugin, err := deviceplugin.New(deviceplugin.Options{
		Client: deviceplugin.Client{
			Pods: func(namespace string) deviceplugin.Objects[*corev1.Pod, *corev1.PodList] {
				return api.CoreV1().Pods(namespace)
			},
			Nodes: api.CoreV1().Nodes(), PlainLists: true,
		},
		Events: record.NewFakeRecorder(100), NodeName: node, Unit: gpu.GiB,
		VisibleDevices: deviceplugin.VisibleByUUID, Directory: kubelet.DevicePluginDir(),
		PodResourcesSocket: kubelet.PodResourcesSocket(),
	})
	if err != nil {
		t.Fatal(err)
	}
	monitor := inventory.New(inventory.Options{Unit: gpu.GiB})
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 3)
	go func() { ended <- kubelet.Run(running) }()
	go func() { ended <- plugin.Run(running) }()
	go func() {
		ended <- monitor.Run(running, func(s inventory.State) { plugin.SetCards(s.Cards, s.Moved, s.Problem) })
	}()
	defer func() {
		stop()
		for range cap(ended) {
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
	}()

	var total gpu.Memory
	for _, card := range all {
		total = total.Add(card.Memory)
	}
	await(ctx, t, "the node to show its cards", func() bool {
		object, err := api.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
		memory := object.Status.Allocatable[protocol.ResourceMemory]
		count := object.Status.Allocatable[protocol.ResourceCount]
		return err == nil && memory.Value() == int64(total) && count.Value() == int64(len(all))
	})

	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "one", Namespace: "default", UID: "uid-one", CreationTimestamp: metav1.Now()},
		Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{
			Name: "main", Image: "none",
			Resources: corev1.ResourceRequirements{
				Limits:   corev1.ResourceList{protocol.ResourceMemory: *resource.NewQuantity(1, resource.DecimalSI)},
				Requests: corev1.ResourceList{protocol.ResourceMemory: *resource.NewQuantity(1, resource.DecimalSI)},
			},
		}}},
	}
	if _, err := api.CoreV1().Pods("default").Create(ctx, pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	var env map[string]string
	await(ctx, t, "the container to start", func() bool {
		env = kubelet.Env(pod.UID, "main")
		return env != nil
	})
	var uuids []string
	for _, card := range all {
		uuids = append(uuids, card.UUID)
		if env[protocol.EnvVisibleDevices] == card.UUID && env[protocol.AnnotationIndex] == strconv.Itoa(card.Index) {
			return
		}
	}
	t.Errorf("the container got %v, which is none of the cards %v", env, uuids)
}

func await(ctx context.Context, t *testing.T, what string, done func() bool) {
	t.Helper()
	err := wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true, func(context.Context) (bool, error) { return done(), nil })
	if err != nil {
		t.Fatalf("waiting for %s: %v", what, err)
	}
}
