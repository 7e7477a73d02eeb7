package deviceplugin

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	events "k8s.io/client-go/tools/record"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

func TestInventory(t *testing.T) {
	b := newFixture(t)
	k := startKubelet(t, b.dir)
	cards := newCards(16, 24)
	cards[1].Unhealthy = "Xid 79"
	b.start(cards)
	k.awaitDevices(16, 40)
	if _, err := protocol.ParseInventory(b.node().Annotations); err != nil {
		t.Fatalf("registered before the inventory was written: %v", err)
	}
	b.awaitHealthy(1)
	inventory, err := protocol.ParseInventory(b.node().Annotations)
	check.Must(t, err)
	if diff := cmp.Diff(protocol.Inventory{Unit: gpu.GiB, Cards: cards, BootID: "this boot", Features: []string{"cards", "cores", "limits", "rdma"}}, inventory); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	reported := func() bool {
		node := b.node()
		want := corev1.ResourceList{protocol.ResourceCount: *newQuantity(2), protocol.ResourceCores: *newQuantity(200)}
		return cmp.Equal(want, node.Status.Capacity) && cmp.Equal(want, node.Status.Allocatable)
	}
	await.True(t, "the number of cards and their cores", reported)

	// A kubelet that registers its node again sets resources that aren't its own to zero.
	node := b.node()
	node.Status.Capacity[protocol.ResourceCount], node.Status.Allocatable = *newQuantity(0), nil
	if _, err := b.client.CoreV1().Nodes().UpdateStatus(context.Background(), node, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	await.True(t, "both again", reported)

	// The Node object can also be deleted and created again.
	check.Must(t, b.client.CoreV1().Nodes().Delete(context.Background(), testNode, metav1.DeleteOptions{}))
	if _, err := b.client.CoreV1().Nodes().Create(context.Background(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: testNode}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	await.True(t, "the inventory and both on the new node", func() bool {
		return b.node().Annotations[protocol.AnnotationInventory] != "" && reported()
	})
}

// The plugin recognizes what it has written, also if the API server writes it in another form. It would write it again and
// again otherwise.
func TestAmountsAreRecognized(t *testing.T) {
	for _, n := range []int{1, 9, 10, 16, 20, gpu.MaxNodeCards} {
		want := amounts(newCards(make([]gpu.Memory, n)...))
		data, err := json.Marshal(want)
		check.Must(t, err)
		var list corev1.ResourceList
		check.Must(t, json.Unmarshal(data, &list))
		if !has(list, want) {
			t.Errorf("%d cards: the amounts aren't recognized in %s", n, data)
		}
	}
}

// A plugin that is killed during its writes, or loses its API server, must not leave a node that reads as a node of the
// existing plugin: all cards of such a node are read as equal and healthy.
func TestNodeIsWrittenInOnePatch(t *testing.T) {
	b := newFixture(t)
	k := startKubelet(t, b.dir)
	cards := newCards(16, 16, 16, 16)
	cards[1].Unhealthy = "Xid 79"
	var writes atomic.Int32
	b.client.PrependReactor("patch", "nodes", func(action clienttesting.Action) (bool, runtime.Object, error) {
		// A write of the former cards can be repeated while the informer is behind.
		isNew := strings.Contains(string(action.(clienttesting.PatchAction).GetPatch()), "GPU-3")
		return isNew && writes.Add(1) > 1, nil, errors.New("the API server is away")
	})
	p, _ := b.start(cards[:3])
	k.awaitDevices(32, 48)
	b.awaitHealthy(2)
	node := b.node()
	node.Status.Capacity[protocol.ResourceMemory] = *newQuantity(48)
	if _, err := b.client.CoreV1().Nodes().UpdateStatus(t.Context(), node, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	p.SetCards(gpu.GiB, cards, nil, nil, "")
	await.True(t, "a write", func() bool { return writes.Load() > 0 })
	k.awaitDevices(48, 64)
	await.True(t, "the new inventory", func() bool { return len(protocol.ParseNode(b.node()).Cards) == 4 })
	for _, card := range protocol.ParseNode(b.node()).Cards[:3] { // The kubelet got the devices of card 3 after this write.
		if want := card.Index != 1; card.Healthy() != want {
			t.Errorf("card %d is healthy: %t, want %t", card.Index, card.Healthy(), want)
		}
	}
}

func TestNodeLabelsAndWholeCards(t *testing.T) {
	b := newFixture(t)
	node := b.node()
	node.Labels = map[string]string{protocol.LabelDisableIsolation: "true"}
	node.Status.Capacity = corev1.ResourceList{"nvidia.com/gpu.shared": *newQuantity(2), "nvidia.com/mig-1g.10gb": *newQuantity(7)}
	check.Must(t, b.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), node, ""))
	k, p := b.up(16)
	b.awaitEvent("GPUCardSharedTwice the node offers nvidia.com/gpu.shared, nvidia.com/mig-1g.10gb and aliyun.com/gpu-mem at once")
	pod := newPod("a", main(4), assumed(0, 1))
	b.create(p, pod)
	if env := k.mustAdmit(pod)["main"]; env["CGPU_DISABLE"] != "true" {
		t.Errorf("no CGPU_DISABLE in %v", env)
	}
}

// TestTwoPlugins: two plugins with different cards on one node, as when two releases have the node.
func TestTwoPlugins(t *testing.T) {
	b := newFixture(t)
	var writes atomic.Int32
	b.client.PrependReactor("patch", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
		writes.Add(1)
		return false, nil, nil
	})
	k := startKubelet(t, b.dir)
	b.start(newCards(16))
	k.awaitDevices(16, 16)
	b.start([]gpu.Card{{Index: 0, UUID: "GPU-0", Memory: 15}})
	b.awaitEvent("GPUNodeContested another program changes the inventory or the amounts of this node again and again")
	// Both can have written often before one notices.
	if n := writes.Load(); n > 4*manyRepeats {
		t.Errorf("%d writes", n)
	}
}

// TestPause: an annotation that another program has undone is written again a few times at once, and then every half minute. A new one is written
// at once.
func TestPause(t *testing.T) {
	k, err := newNodeKeeper(fakeClient(fake.NewClientset()), testNode, newCardState(), events.NewFakeRecorder(1), &isolator{})
	check.Must(t, err)
	k.last = "mine"
	for range manyRepeats {
		if pause := k.pause(t.Context(), "mine"); pause != 0 {
			t.Fatalf("one of the first writes waits for %v", pause)
		}
	}
	if pause := k.pause(t.Context(), "mine"); pause <= nodeRecheck/2 || pause > nodeRecheck {
		t.Errorf("the next one waits for %v, want up to %v", pause, nodeRecheck)
	}
	if pause := k.pause(t.Context(), "new"); pause != 0 {
		t.Errorf("a new annotation waits for %v", pause)
	}
}
