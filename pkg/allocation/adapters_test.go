package allocation

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
)

// TestAdapters: a container gets the adapters near its cards if its pod asks for them, and the same again if the call is repeated. Where a pod must
// have them, it gets no card without one, annotated or not.
func TestAdapters(t *testing.T) {
	cards := func(ports ...string) []gpu.Card {
		all := newCards(16, 16, 16)
		for i, near := range ports {
			all[i].RDMAPorts = near
		}
		return all
	}
	asking := func(rdma gpu.RDMA, options ...podOption) Pod {
		pod := newPod("a", options...)
		pod.RDMA = rdma
		return pod
	}
	const both = "mlx5_0:1,mlx5_1:1"
	before := Adapters{Ports: "mlx5_9:1", Devices: []string{"uverbs9"}}
	served := onCard(0)
	served.Adapters = before
	for name, tc := range map[string]struct {
		cards    []gpu.Card
		pod      Pod
		others   []Pod
		given    Allocations
		want     Adapters
		on       []int
		rejected string
	}{
		"not asked for":                {cards: cards(both), pod: asking(gpu.RDMANone, main(8), assumed(0, 1)), on: []int{0}},
		"preferred, and none is near":  {cards: cards("", both), pod: asking(gpu.RDMAPreferred, main(8), assumed(0, 1)), on: []int{0}},
		"two near the card":            {cards: cards(both), pod: asking(gpu.RDMAPreferred, main(8), assumed(0, 1)), want: Adapters{both, []string{"uverbs0", "uverbs1"}}, on: []int{0}},
		"two ports of one adapter":     {cards: cards("mlx5_1:1,mlx5_1:2"), pod: asking(gpu.RDMARequired, main(8), assumed(0, 1)), want: Adapters{"mlx5_1:1,mlx5_1:2", []string{"uverbs1"}}, on: []int{0}},
		"required, no card annotated":  {cards: cards("", "mlx5_1:1"), pod: asking(gpu.RDMARequired, main(8)), want: Adapters{"mlx5_1:1", []string{"uverbs1"}}, on: []int{1}},
		"required, and none is near":   {cards: cards("", ""), pod: asking(gpu.RDMARequired, main(8)), rejected: "pod default/a: no card for 8 units of GPU memory: no GPU card of the node is near an RDMA adapter with an active port"},
		"an adapter that is gone":      {cards: cards("mlx5_7:1,mlx5_0:1"), pod: asking(gpu.RDMAPreferred, main(8), assumed(0, 1)), want: Adapters{"mlx5_0:1", []string{"uverbs0"}}, on: []int{0}},
		"the call is repeated":         {cards: cards("mlx5_0:1"), pod: asking(gpu.RDMARequired, main(8), assumed(0, 1)), given: Allocations{"uid-a": {"main": served}}, want: before, on: []int{0}},
		"… and the port isn't active":  {cards: cards(), pod: asking(gpu.RDMARequired, main(8), assumed(0, 1)), given: Allocations{"uid-a": {"main": served}}, want: before, on: []int{0}},
		"… and the label was removed":  {cards: cards(both), pod: asking(gpu.RDMANone, main(8), assumed(0, 1)), given: Allocations{"uid-a": {"main": served}}, want: before, on: []int{0}},
		"… and the label was added":    {cards: cards(both), pod: asking(gpu.RDMARequired, main(8), assumed(0, 1)), given: Allocations{"uid-a": {"main": onCard(0)}}, on: []int{0}},
		"required, and none is active": {cards: cards("", both), pod: asking(gpu.RDMARequired, main(8), assumed(0, 1)), rejected: "pod default/a must have cards near an RDMA adapter, and near at least one of its cards no port is active any more: card 0"},
		"required, an adapter that is gone": {
			cards: cards("mlx5_7:1"), pod: asking(gpu.RDMARequired, main(8), assumed(0, 1)),
			rejected: "pod default/a must have cards near an RDMA adapter, and near at least one of its cards no port is active any more: card 0",
		},
		"required, gone from one of two cards": {
			cards: cards("mlx5_1:1", "mlx5_10:1"), pod: asking(gpu.RDMARequired, main(8), assumedOn(0, 1)),
			rejected: "pod default/a must have cards near an RDMA adapter, and near at least one of its cards no port is active any more: cards 0, 1",
		},
		"required, gone, and no card annotated": {
			cards: cards("", "mlx5_7:1"), pod: asking(gpu.RDMARequired, main(8)),
			rejected: "pod default/a must have cards near an RDMA adapter, and near at least one of its cards no port is active any more: card 1",
		},
		"required, the card is full": {
			cards: cards("mlx5_0:1", "", "mlx5_1:1"), pod: asking(gpu.RDMARequired, main(8), assumed(0, 1)), others: []Pod{newPod("b", main(16))},
			given: Allocations{"uid-b": {"main": holding(0, 16)}}, want: Adapters{"mlx5_1:1", []string{"uverbs1"}}, on: []int{2},
		},
		"required, all such cards are full": {
			cards: cards("mlx5_0:1"), pod: asking(gpu.RDMARequired, main(8), assumed(0, 1)), others: []Pod{newPod("b", main(16))},
			given:    Allocations{"uid-b": {"main": holding(0, 16)}},
			rejected: "pod default/a: no card for 8 units of GPU memory: too few GPU cards have enough free memory and cores, though the node's cards together have",
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := Snapshot{Cards: tc.cards, Pods: append(tc.others, tc.pod), Given: tc.given, Adapters: []gpu.Adapter{{Name: "mlx5_0", Device: "uverbs0"}, {Name: "mlx5_1", Device: "uverbs1"}}}
			pod := &s.Pods[len(s.Pods)-1]
			d := s.withAdapters(s.selectCards(Decision{Pod: pod, Container: pod.Containers[0]}), false)
			text := ""
			if d.Rejection != nil {
				text = d.Rejection.Text
			}
			check.Equal(t, "rejected", tc.rejected, text)
			check.Equal(t, "the result", tc.want, d.Adapters)
			if diff := cmp.Diff(tc.on, d.Indexes()); diff != "" && tc.rejected == "" {
				t.Errorf("cards (-want +got):\n%s", diff)
			}
		})
	}
}

// TestAdaptersUnsure: if the call can be for a pod with another value of the label, the container gets none. One that must have them is rejected,
// and of one that prefers them the decision says why it gets none.
func TestAdaptersUnsure(t *testing.T) {
	const differs = "the kubelet can't be asked which of several pods with the same request it starts, and they differ in the label gpushare.aliyun.com/rdma"
	near, far := newCards(16), newCards(16)
	near[0].RDMAPorts = "mlx5_0:1"
	for name, tc := range map[string]struct {
		cards               []gpu.Card
		rdma, other         gpu.RDMA
		noAdapter, rejected string
		want                Adapters
	}{
		"required":                      {cards: near, rdma: gpu.RDMARequired, rejected: "pod default/a must have an RDMA adapter, and " + differs},
		"preferred":                     {cards: near, rdma: gpu.RDMAPreferred, noAdapter: differs},
		"preferred, and none is near":   {cards: far, rdma: gpu.RDMAPreferred},
		"not asked for":                 {cards: near, other: gpu.RDMARequired},
		"the other one asks for it too": {cards: near, rdma: gpu.RDMARequired, other: gpu.RDMARequired, want: Adapters{"mlx5_0:1", []string{"uverbs0"}}},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := newPod("a", main(2), assumed(0, 1)), newPod("b", main(2), assumed(0, 2))
			a.RDMA, b.RDMA = tc.rdma, tc.other
			d := Decide(Snapshot{
				Cards: tc.cards, Adapters: []gpu.Adapter{{Name: "mlx5_0", Device: "uverbs0"}}, Pods: []Pod{a, b}, Kubelet: &kubelet{unreachable: true}, Freshness: Live,
			}, 2)
			rejected := ""
			if d.Rejection != nil {
				rejected = d.Rejection.Text
			}
			if d.Match != ByOrder || d.Pod.Name != "a" || rejected != tc.rejected || d.NoAdapter != tc.noAdapter {
				t.Errorf("pod %v by %s: rejected %q, no adapter %q", d.Pod, d.Match, rejected, d.NoAdapter)
			}
			check.Equal(t, "adapters", tc.want, d.Adapters)
		})
	}
}
