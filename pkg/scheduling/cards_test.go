package scheduling

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// inventoried returns a node with two cards of 16 and a change of its inventory.
func inventoried(t *testing.T, name string, change func(*protocol.Inventory)) *corev1.Node {
	t.Helper()
	node := fake.Node(name, 16, 16)
	inventory, err := protocol.ParseInventory(node.Annotations)
	check.Must(t, err)
	change(&inventory)
	if node.Annotations[protocol.AnnotationInventory], err = inventory.Annotation(); err != nil {
		t.Fatal(err)
	}
	return node
}

// Filter gives each node the reason that keeps a pod with several cards, with cores, with its own shared memory, with a limit above its request,
// or one that needs cards near an adapter, off it.
func TestFilterCards(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, Options{},
			fake.Node("fits", 16, 16, 16), fake.Node("one-card", 16),
			fake.Node("one-free", 16, 16), fake.Pod("a", 14, fake.Bound("one-free", 0)),
			fake.Node("cores", 16, 16), fake.Pod("b", 2, fake.Cores(80), fake.Bound("cores", 0)), fake.Pod("c", 2, fake.Cores(70), fake.Bound("cores", 1)),
			inventoried(t, "old", func(i *protocol.Inventory) { i.Features = nil }),
			inventoried(t, "mps", func(i *protocol.Inventory) { i.Isolation = protocol.IsolationMPS }),
			nearAdapter(t, "rdma", 1), fake.Pod("d", 2, fake.Bound("rdma", 1)),
		)
		nodes := []string{"fits", "one-card", "one-free", "cores", "old", "mps", "rdma"}
		const fits = reasons.Fits
		for name, test := range map[string]struct {
			pod  *corev1.Pod
			want []reasons.Reason
		}{
			"one card": {fake.Pod("one", 8), []reasons.Reason{fits, fits, fits, fits, fits, fits, fits}},
			"a card near an adapter": {fake.Pod("near", 8, fake.RDMA("required")), []reasons.Reason{
				reasons.NoAdapter, reasons.NoAdapter, reasons.NoAdapter, reasons.NoAdapter, reasons.OldForRDMA, reasons.NoAdapter, fits,
			}},
			"a card near an adapter, but only the other one has room": {fake.Pod("large", 15, fake.RDMA("required")), []reasons.Reason{
				reasons.NoAdapter, reasons.NoAdapter, reasons.NoAdapter, reasons.NoAdapter, reasons.OldForRDMA, reasons.NoAdapter, reasons.Fragmented,
			}},
			"two cards near an adapter": {fake.Pod("two-near", 8, fake.Cards(2), fake.RDMA("required")), []reasons.Reason{
				reasons.NoAdapter, reasons.NoAdapter, reasons.NoAdapter, reasons.NoAdapter, reasons.OldForCards, reasons.OneCardOnly, reasons.TooLarge,
			}},
			"a card near an adapter, preferred": {fake.Pod("prefers", 8, fake.RDMA("preferred")), []reasons.Reason{fits, fits, fits, fits, fits, fits, fits}},
			"two cards": {fake.Pod("two", 16, fake.Cards(2)), []reasons.Reason{
				fits, reasons.TooLarge, reasons.Fragmented, fits, reasons.OldForCards, reasons.OneCardOnly, fits,
			}},
			"cores of one card": {fake.Pod("cores", 8, fake.Cores(40)), []reasons.Reason{
				fits, fits, fits, reasons.Fragmented, reasons.OldForCores, fits, fits,
			}},
			"cores of two cards": {fake.Pod("both", 8, fake.Cards(2), fake.Cores(60)), []reasons.Reason{
				fits, reasons.TooLarge, reasons.Fragmented, reasons.Full, reasons.OldForCards, reasons.OneCardOnly, fits,
			}},
			"its own volume at /dev/shm": {fake.Pod("torch", 8, fake.SharedMemory), []reasons.Reason{
				fits, fits, fits, fits, fits, reasons.NoOwnSharedMemory, fits,
			}},
			"a limit above the request": {fake.Pod("notebook", 2, limitedTo("16Mi")), []reasons.Reason{
				fits, fits, fits, fits, reasons.OldForLimits, reasons.NoLimitAboveRequest, fits,
			}},
			"a limit below the request": {fake.Pod("below", 2, limitedTo("1Mi")), []reasons.Reason{
				reasons.LimitBelowRequest, reasons.LimitBelowRequest, reasons.LimitBelowRequest, reasons.LimitBelowRequest, reasons.OldForLimits,
				reasons.NoLimitAboveRequest, reasons.LimitBelowRequest,
			}},
			"a limit above the largest card": {fake.Pod("above", 2, limitedTo("17Mi")), []reasons.Reason{
				reasons.LimitTooLarge, reasons.LimitTooLarge, reasons.LimitTooLarge, reasons.LimitTooLarge, reasons.OldForLimits, reasons.NoLimitAboveRequest, reasons.LimitTooLarge,
			}},
		} {
			check.Equal(t, name, test.want, f.filter(test.pod, nodes...).Reasons)
		}
	})
}

// limitedTo annotates a limit above the request.
func limitedTo(limit string) func(*corev1.Pod) {
	return fake.Annotation(protocol.AnnotationLimit("main"), limit)
}

// nearAdapter returns a node with two cards of 16, of which these are near an adapter.
func nearAdapter(t *testing.T, name string, cards ...int) *corev1.Node {
	t.Helper()
	return inventoried(t, name, func(i *protocol.Inventory) {
		for _, card := range cards {
			i.Cards[card].RDMAPorts = "mlx5_0:1"
		}
	})
}

// TestRDMA: a pod that needs a card near an adapter is tried again once a port becomes active, and is not bound if none is active any more. Another
// value is refused.
func TestRDMA(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pod := fake.Pod("p", 8, fake.RDMA("required"))
		f := start(t, Options{}, nearAdapter(t, "n1"), pod)
		update := func(node *corev1.Node, want reasons.Reason) {
			t.Helper()
			f.publishNode(node)
			if got := f.filter(pod, "n1").Reasons; !slices.Equal(got, []reasons.Reason{want}) {
				t.Errorf("filter: %v, want %v", got, want)
			}
		}
		update(nearAdapter(t, "n1"), reasons.NoAdapter)
		update(nearAdapter(t, "n1", 0), reasons.Fits)
		update(nearAdapter(t, "n1"), reasons.NoAdapter)
		if err := f.bind(pod); err == nil {
			t.Error("the pod was bound to a node without an active port")
		}
		update(nearAdapter(t, "n1", 1), reasons.Fits)

		if err := f.bind(pod); err != nil {
			t.Errorf("bind: %v", err)
		}
		f.want(pod, "bound n1 card 1")

		odd := fake.Pod("odd", 8, fake.RDMA("yes"))
		const wrong = `label gpushare.aliyun.com/rdma: "yes" is neither preferred nor required: write one of these, or remove the label`
		if result := f.filter(odd, "n1"); result.Message != wrong || len(result.Passed) > 0 {
			t.Errorf("filter of another value: %+v", result)
		}
	})
}

// A pod that no node can give what it asks for is rejected on all nodes, and no eviction is tried for it. Package protocol tests
// which requests are invalid.
func TestInvalidRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const want = "container main: aliyun.com/gpu-mem 7 can't be divided evenly over 2 cards"
		pod := fake.Pod("p", 7, fake.Cards(2), fake.Priority(5))
		f := start(t, Options{EvictFragmented: true}, fake.Node("n1", 16, 16), fake.Pod("a", 1, fake.Bound("n1", 0)), pod)
		if result := f.filter(pod, "n1"); result.Message != want || len(result.Passed) > 0 || result.Reasons != nil {
			t.Errorf("filter: %+v", result)
		}
		victims := map[string]preemption.Victims{"n1": {Pods: []gpu.PodUID{"uid-a"}}}
		if got, err := f.Preempt(t.Context(), pod, victims); len(got) > 0 || err != nil {
			t.Errorf("preempt: %v, %v", got, err)
		}
		if err := f.bind(pod); err == nil || err.Error() != want || f.observer.Count("bind "+string(reasons.ResultInvalidRequest)) != 1 {
			t.Errorf("bind: %v", err)
		}
		f.want(pod, "none")
	})
}

// Nodes that share their cards stand beside nodes that give out whole ones, and a node moves from one kind to the other.
func TestWholeAndSharedCards(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		offering := func(name string, whole int64, cards ...int64) *corev1.Node {
			node := fake.Node(name, cards...)
			if whole > 0 {
				maps.Copy(node.Status.Capacity, fake.Amount(protocol.ResourceWholeCard, whole))
			}
			if len(cards) == 0 {
				node.Annotations = nil
				maps.DeleteFunc(node.Status.Capacity, func(name corev1.ResourceName, _ resource.Quantity) bool {
					return strings.HasPrefix(string(name), "aliyun.com/")
				})
			}
			return node
		}
		whole := fake.Pod("whole", 0, func(pod *corev1.Pod) {
			pod.Spec.Containers[0].Resources.Limits = fake.Amount(protocol.ResourceWholeCard, 1)
		})
		f := start(t, Options{}, offering("shared", 0, 16, 16), offering("other", 2), fake.Pod("a", 4, fake.Bound("shared", 0)), whole)
		small, large := fake.Pod("small", 4), fake.Pod("large", 16)
		expect := func(what string, pod *corev1.Pod, want ...reasons.Reason) {
			t.Helper()
			check.Equal(t, what, want, f.filter(pod, "shared", "other").Reasons)
		}
		expect("memory of a card", large, reasons.Fits, reasons.NotShared)
		if got := f.filter(whole, "shared", "other").Names(); len(got) != 2 {
			t.Errorf("a pod that asks for a whole card: %q, want both, since kube-scheduler counts whole cards", got)
		}
		for _, pod := range []*corev1.Pod{small, large} {
			f.server.Set(pod)
			check.Must(t, f.Bind(t.Context(), request(pod, "shared")))
		}
		f.want(small, "bound shared card 0") // The card in use, so that the other one stays empty.
		f.want(large, "bound shared card 1")
		expect("another whole card's memory", fake.Pod("larger", 16), reasons.Full, reasons.NotShared)

		for _, step := range []struct {
			what string
			node *corev1.Node
			want reasons.Reason
		}{
			{"the kubelet still reports whole cards", offering("other", 2, 16, 16), reasons.WholeCards},
			{"the node has moved", offering("other", 0, 16, 16), reasons.Fits},
			{"NVIDIA's plugin started too early", offering("other", 2, 16, 16), reasons.WholeCards},
			{"the node has moved back", offering("other", 2), reasons.NotShared},
		} {
			f.publishNode(step.node)
			if got := f.filter(fake.Pod("next", 16), "other").Reasons[0]; got != step.want {
				t.Errorf("%s: %v, want %v", step.what, got, step.want)
			}
		}
	})
}

// The number of cards can change between filter and bind. Bind goes by the label as it is: the pod gets all that its spec and the label ask for, on a
// node that takes such a pod, or nothing.
func TestCountChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for name, test := range map[string]struct {
			node       *corev1.Node
			from, to   int
			bound      string
			wantResult reasons.Result
		}{
			"more cards":                              {fake.Node("n1", 16, 16, 16), 2, 3, "bound n1 cards 0, 1, 2", reasons.ResultBound},
			"fewer cards":                             {fake.Node("n1", 16, 16, 16), 3, 2, "bound n1 cards 0, 1", reasons.ResultBound},
			"more cards than the node has":            {fake.Node("n1", 16, 16), 2, 3, "none", reasons.ResultNoRoom},
			"fewer cards than have room for it all":   {fake.Node("n1", 8, 8), 2, 1, "none", reasons.ResultNoRoom},
			"a number that doesn't divide the memory": {fake.Node("n1", 16, 16, 16, 16, 16), 2, 5, "none", reasons.ResultInvalidRequest},
			"several cards on a node that gives each pod one": {
				inventoried(t, "n1", func(i *protocol.Inventory) { i.Isolation = protocol.IsolationMPS }), 1, 2, "none", reasons.ResultNoRoom,
			},
			"several cards on a node whose device plugin is too old": {
				inventoried(t, "n1", func(i *protocol.Inventory) { i.Features = nil }), 1, 2, "none", reasons.ResultNoRoom,
			},
		} {
			pod := fake.Pod("p", 12, fake.Cards(test.from))
			f := start(t, Options{}, test.node, pod)
			f.filter(pod, "n1")
			changed := fake.Edited(pod, fake.Cards(test.to))
			f.server.Set(changed)
			f.publish(changed)
			err := f.bind(changed)
			if (err == nil) != (test.wantResult == reasons.ResultBound) || f.observer.Count("bind "+string(test.wantResult)) != 1 {
				t.Errorf("%s: bind: %v, %v", name, err, f.observer.Counts())
			}
			f.want(pod, test.bound)
			if _, allocation, ok := f.ledger.Lookup("uid-p"); ok && allocation.Placement.Total() != 12 {
				t.Errorf("%s: %v of 12 are allocated", name, allocation.Placement)
			}
		}
	})
}

// Bind writes all cards of the pod. An extender that starts later has the same allocations, in both dimensions.
func TestBindCards(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pod := fake.Pod("p", 8, fake.Cards(2), fake.Cores(60), func(pod *corev1.Pod) {
			pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{
				Name: "side", Resources: corev1.ResourceRequirements{Limits: fake.Amount(protocol.ResourceMemory, 4)},
			})
		})
		other := fake.Pod("other", 3, fake.Cores(10), fake.Bound("n1", 1))
		forged := fake.Pod("forged", 6, fake.Cards(2), fake.Bound("n2", 0, 1), fake.Annotation(protocol.AnnotationAllocation, `{"0":{"0":1,"1":1}}`))
		objects := []runtime.Object{fake.Node("n1", 16, 24, 16), fake.Node("n2", 16, 16), other, forged}
		f := start(t, Options{}, append(objects, pod)...)
		check.Must(t, f.bind(pod))
		f.wantEvent("Normal GPUCardAssumed Assumed GPU cards 0, 2 of node n1: 12 MiB in total")
		want := map[string]string{
			"ALIYUN_COM_GPU_MEM_IDX": "0,2", "ALIYUN_COM_GPU_MEM_DEV": "16,16", "ALIYUN_COM_GPU_MEM_POD": "12", "ALIYUN_COM_GPU_MEM_ASSIGNED": "false",
			"ALIYUN_COM_GPU_MEM_ASSUME_TIME":          fmt.Sprint(begin.UnixNano()),
			"scheduler.framework.gpushare.allocation": `{"0":{"0":4,"2":4},"1":{"0":2,"2":2}}`,
		}
		bound := f.server.Get(pod)
		check.Equal(t, "annotations", want, bound.Annotations)

		restarted := start(t, Options{}, append(objects, bound)...)
		wantShares := gpu.Placement{{Card: 0, Memory: 6, Cores: 30, Containers: 2}, {Card: 2, Memory: 6, Cores: 30, Containers: 2}}
		for name, s := range map[string]*fixture{"the extender that bound it": f, "one that starts later": restarted} {
			s.want(pod, "bound n1 cards 0, 2")
			_, allocation, _ := s.ledger.Lookup("uid-p")
			node, _ := s.ledger.Node("n1")
			if diff := cmp.Diff(wantShares, allocation.Placement); diff != "" {
				t.Errorf("%s: shares (-want +got):\n%s", name, diff)
			}
			if !slices.Equal(node.Used, []gpu.Memory{6, 3, 6}) || !slices.Equal(node.UsedCores, []gpu.Cores{30, 10, 30}) {
				t.Errorf("%s: %v and %v are used", name, node.Used, node.UsedCores)
			}
			if _, allocation, _ = s.ledger.Lookup("uid-forged"); !allocation.Presumed || len(allocation.Placement) != 2 || allocation.Placement.Total() != 6 {
				t.Errorf("%s: annotations that don't add up to the spec: %+v", name, allocation)
			}
		}
	})
}
