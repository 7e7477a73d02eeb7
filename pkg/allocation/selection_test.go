package allocation

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
)

func TestSelectCards(t *testing.T) {
	unhealthy := func(cards []gpu.Card, index int) []gpu.Card {
		cards[index].Unhealthy = "Xid 79"
		return cards
	}
	taking := func(most int, cards []gpu.Card) []gpu.Card {
		for i := range cards {
			cards[i].MaxContainers = most
		}
		return cards
	}
	containers := func(n int32) podOption { return func(pod *Pod) { pod.Pod.Containers = n } }
	holdingNext := holding(1, 9)
	holdingNext.Instance, holdingNext.Next = "containerd://1", gpu.On(0, 9)
	const full = "pod default/a: no card for 8 units of GPU memory: no GPU card has enough free memory"
	for name, test := range map[string]struct {
		cards  []gpu.Card
		pod    Pod // Its last container is served.
		others []Pod
		given  Allocations
		want   int
		result Result
		text   string // Of the rejection.
		moved  string
	}{
		"the annotated card": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(1, 1)), want: 1, result: ResultAssumed,
		},
		"the annotated card, although binpack would take another": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(1, 1)),
			others: []Pod{newPod("b", main(8), assumed(0, 1))}, given: Allocations{"uid-b": {"main": onCard(0)}},
			want: 1, result: ResultAssumed,
		},
		"the pod's own memory doesn't count against it": {
			cards: newCards(16), pod: newPod("a", container("x", 10), container("y", 6), assumed(0, 1)),
			given: Allocations{"uid-a": {"x": onCard(0)}}, want: 0, result: ResultAssumed,
		},
		"the card of the pod's other containers": {
			cards: newCards(16, 16), pod: newPod("a", container("x", 2), container("y", 2), assumed(0, 1)),
			given: Allocations{"uid-a": {"x": onCard(1)}}, want: 1, result: ResultAssumed,
		},
		"the checkpoint was lost, and an init container got another card since: the annotated card": {
			cards: newCards(16, 16), pod: newPod("a", initStep(2), main(2), assumed(0, 1), assigned, ran),
			given: Allocations{"uid-a": {"i": onCard(1)}}, want: 0, result: ResultAssumed,
		},
		"the pod's card, the rest of which others hold now": {
			cards: newCards(16, 16), pod: newPod("a", container("x", 10), container("main", 6), assumed(0, 1)),
			others: []Pod{newPod("b", container("main", 7))}, given: Allocations{"uid-a": {"x": onCard(0)}, "uid-b": {"main": onCard(0)}},
			result: RefusedFull, text: "pod default/a has card 0 for other containers, and other pods leave no room there for the rest of it",
		},
		"the card that the container had, however full it is": {
			cards: newCards(16, 16), pod: newPod("a", container("x", 10), container("main", 6), assumed(0, 1)),
			others: []Pod{newPod("b", container("main", 7))}, given: Allocations{"uid-a": {"x": onCard(0), "main": onCard(0)}, "uid-b": {"main": onCard(0)}},
			want: 0, result: ResultAssumed,
		},
		"the annotated card is used by another pod": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []Pod{newPod("b", main(10))}, given: Allocations{"uid-b": {"main": onCard(0)}},
			want: 1, result: ResultMoved,
		},
		"the other pod counts with its whole request": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []Pod{newPod("b", container("x", 1), container("y", 9))}, given: Allocations{"uid-b": {"x": onCard(0)}},
			want: 1, result: ResultMoved,
		},
		"a terminating pod holds its memory": {
			cards: newCards(16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []Pod{newPod("b", main(10), leaving)}, given: Allocations{"uid-b": {"main": onCard(0)}},
			result: RefusedFull, text: full,
		},
		"a pod that ended holds none": {
			cards: newCards(16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []Pod{newPod("b", main(10), ended)}, given: Allocations{"uid-b": {"main": onCard(0)}},
			want: 0, result: ResultAssumed,
		},
		"annotations of a pod that was not served don't count": {
			cards: newCards(16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []Pod{newPod("forged", main(16), assumed(0, 0))}, want: 0, result: ResultAssumed,
		},
		"annotations of a pod that runs count": {
			cards: newCards(16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []Pod{newPod("b", main(16), assumed(0, 0), running)}, result: RefusedFull, text: full,
		},
		"a pod counts on the card that it got, not on the annotated one": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []Pod{newPod("b", main(16), assumed(1, 0))}, given: Allocations{"uid-b": {"main": onCard(0)}},
			want: 1, result: ResultMoved,
		},
		"no annotated card: binpack beside the annotated memory of others": {
			cards: newCards(16, 16), pod: newPod("a", main(8)),
			others: []Pod{newPod("b", main(4), assumed(1, 1))}, want: 1, result: ResultPlaced,
		},
		"no annotated card: annotated memory of others stays free": {
			cards: newCards(16, 16), pod: newPod("a", main(8)),
			others: []Pod{newPod("b", main(12), assumed(0, 1))}, want: 1, result: ResultPlaced,
		},
		"no annotated card: the whole pod must fit": {
			cards: newCards(8, 16), pod: newPod("a", container("x", 6), container("y", 6)), want: 1, result: ResultPlaced,
		},
		"pods that the watch has not delivered count": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(0, 1)),
			given: Allocations{"uid-new": {"main": holding(0, 9)}}, want: 1, result: ResultMoved,
		},
		"a static pod that an earlier version gave a card counts": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []Pod{newPod("static", main(9), mirror, assumed(0, 0), assigned, running)}, want: 1, result: ResultMoved,
		},
		"a running container holds its card and that of its next start": {
			cards: newCards(16, 16, 16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []Pod{newPod("b", main(9), assumed(1, 0), assigned, running)},
			given:  Allocations{"uid-b": {"main": holdingNext}}, want: 2, result: ResultMoved,
		},
		"a running container keeps the annotated card": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(1, 1), running), want: 1, result: ResultAssumed,
		},
		"a running container gets no other card": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(0, 1), running),
			others: []Pod{newPod("b", main(10))}, given: Allocations{"uid-b": {"main": onCard(0)}},
			result: RefusedUnknownCard, text: "container main of pod default/a runs, and it is not known which card it has",
		},
		"a pod that was given no card holds none": {
			cards: newCards(16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []Pod{newPod("b", main(16), assumed(0, 0), running)},
			given:  Allocations{"uid-b": {"main": noCard}, "uid-new": {"main": noCard}}, want: 0, result: ResultAssumed,
		},
		"but its annotated memory stays free": {
			cards: newCards(16, 16), pod: newPod("a", main(8)),
			others: []Pod{newPod("b", main(12), assumed(0, 0))}, given: Allocations{"uid-b": {"main": noCard}},
			want: 1, result: ResultPlaced,
		},
		"a pod with another plugin's response may hold its annotated memory": {
			cards: newCards(16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []Pod{newPod("b", main(16), assumed(0, 0))}, given: Allocations{"uid-b": {"main": unknownCard}},
			result: RefusedFull, text: full,
		},
		"a card that takes no more containers": {
			cards: taking(2, newCards(16, 16)), pod: newPod("a", main(1)),
			others: []Pod{newPod("b", container("x", 4), container("y", 4), containers(2))}, given: Allocations{"uid-b": {"x": onCard(0), "y": onCard(0)}},
			want: 1, result: ResultPlaced,
		},
		"containers that use a card at the same time count, started or not": {
			cards: taking(3, newCards(16)), pod: newPod("a", main(1), assumed(0, 1)),
			others: []Pod{newPod("b", container("s1", 1), container("s2", 1), initStep(1), containers(3))}, given: Allocations{"uid-b": {"s1": onCard(0)}},
			result: RefusedFull, text: "pod default/a: no card for 1 units of GPU memory: no GPU card with enough free memory takes more containers by MPS",
		},
		"containers of a pod that the watch has not delivered count": {
			cards: taking(2, newCards(16)), pod: newPod("a", main(1), assumed(0, 1)),
			given:  Allocations{"uid-unseen": {"x": holding(0, 1), "y": holding(0, 1)}},
			result: RefusedFull, text: "pod default/a: no card for 1 units of GPU memory: no GPU card with enough free memory takes more containers by MPS",
		},
		"a card that the node doesn't have": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(7, 1)),
			result: RefusedUnknownCard, text: "pod default/a was assigned card 7, which this node doesn't have",
		},
		"an unhealthy card": {
			cards: unhealthy(newCards(16, 16), 1), pod: newPod("a", main(8), assumed(1, 1)),
			result: RefusedUnhealthy, text: "pod default/a was assigned card 1, which is unhealthy: Xid 79",
		},
		"only unhealthy cards have room": {
			cards: unhealthy(newCards(4, 16), 1), pod: newPod("a", main(8)), result: RefusedUnhealthy,
			text: "pod default/a: no card for 8 units of GPU memory: the GPU cards that are large enough are unhealthy",
		},
		"no card is large enough": {
			cards: newCards(4, 4), pod: newPod("a", main(8)), result: RefusedFull, text: "pod default/a: no card for 8 units of GPU memory: the pod asks for more GPU memory than any card of the node has",
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := Snapshot{Cards: test.cards, Pods: append(test.others, test.pod), Given: test.given}
			pod := &s.Pods[len(s.Pods)-1]
			got := s.selectCards(Decision{Pod: pod, Container: pod.Containers[len(pod.Containers)-1]})
			var text string
			if got.Rejection != nil {
				text = got.Rejection.Text
				if full := strings.Contains(text, "no card for") || strings.Contains(text, "no room"); got.Rejection.NoRoom != full {
					t.Errorf("NoRoom is %t: %s", got.Rejection.NoRoom, text)
				}
			}
			if test.moved != "" && got.Moved != test.moved {
				t.Errorf("moved because %q, want %q", got.Moved, test.moved)
			}
			if got.Result != test.result || got.Rejection == nil && !slices.Equal(got.Indexes(), []int{test.want}) || text != test.text {
				t.Errorf("got cards %v, %q, %q, want %d, %q, %q", got.Indexes(), got.Result, text, test.want, test.result, test.text)
			}
		})
	}
}

func TestSelectSeveralCards(t *testing.T) {
	served := func(pod Pod, cards ...int) PodAllocations {
		given := PodAllocations{}
		for _, c := range pod.Containers {
			var of []gpu.Card
			for _, card := range cards {
				of = append(of, gpu.Card{Index: card, Memory: 16})
			}
			given[c.Name] = Give(c, of)
		}
		return given
	}
	two := newPod("two", main(8), cores(100), assumedOn(0, 2))
	sick := newCards(16, 16, 16)
	sick[2].Unhealthy = "Xid 79"
	for name, test := range map[string]struct {
		cards  []gpu.Card // newCards(16, 16, 16) by default.
		pod    Pod        // Its last container is served.
		others []Pod
		given  Allocations
		want   []int
		result Result
		text   string // The begin of the rejection's. The reason is package placement's.
	}{
		"the annotated cards": {pod: newPod("a", main(8), assumedOn(0, 2)), want: []int{0, 2}, result: ResultAssumed},
		"a pod that holds a share of each leaves the rest": {
			pod: newPod("a", main(24), assumedOn(0, 2)), others: []Pod{two}, given: Allocations{"uid-two": served(two, 0, 2)},
			want: []int{0, 2}, result: ResultAssumed,
		},
		"one of the annotated cards has no room": {
			pod: newPod("a", main(24), assumedOn(0, 1)), others: []Pod{newPod("b", main(6))}, given: Allocations{"uid-b": {"main": holding(0, 6)}},
			want: []int{1, 2}, result: ResultMoved,
		},
		"one of the annotated cards has too few cores": {
			pod: newPod("a", main(2), cores(120), assumedOn(0, 1)), others: []Pod{two}, given: Allocations{"uid-two": served(two, 0, 2)},
			result: RefusedFull, text: "pod default/a: no card for 1 units of GPU memory and 60% of its cores on each of 2 cards",
		},
		"cores of one card": {
			pod: newPod("a", main(1), cores(60), assumedOn(0)), others: []Pod{two}, given: Allocations{"uid-two": served(two, 0, 2)},
			want: []int{1}, result: ResultMoved,
		},
		"a pod without cores is charged none": {
			pod: newPod("a", main(1), assumedOn(0)), others: []Pod{two}, given: Allocations{"uid-two": served(two, 0, 2)},
			want: []int{0}, result: ResultAssumed,
		},
		"one of the annotated cards is unhealthy": {
			cards: sick, pod: newPod("a", main(8), assumedOn(0, 2)),
			result: RefusedUnhealthy, text: "pod default/a was assigned card 2, which is unhealthy: Xid 79",
		},
		"one of the annotated cards is not the node's": {
			pod: newPod("a", main(8), assumedOn(0, 3)), result: RefusedUnknownCard, text: "pod default/a was assigned card 3, which this node doesn't have",
		},
		"the cards of the pod's other containers": {
			pod: newPod("a", container("x", 2), container("y", 4), assumedOn(0, 1)), given: Allocations{"uid-a": {"x": onCards([]int{1, 2}, "10", "20")}},
			want: []int{1, 2}, result: ResultAssumed,
		},
		"their number counts too": {
			pod: newPod("a", container("x", 2), container("y", 4), labelled(2)), given: Allocations{"uid-a": {"x": holding(1, 2)}},
			want: []int{1}, result: ResultAssumed,
		},
		"a request that can't be divided over them": {
			pod: newPod("a", container("x", 2), container("y", 3)), given: Allocations{"uid-a": {"x": onCards([]int{1, 2}, "10", "20")}},
			result: RefusedInvalid, text: "container y of pod default/a: its request can't be divided evenly over cards 1, 2",
		},
		"the same call again": {
			pod: newPod("a", main(32), assumedOn(0, 1)), given: Allocations{"uid-a": {"main": onCards([]int{0, 1})}, "uid-new": {"main": holding(0, 16)}},
			want: []int{0, 1}, result: ResultAssumed,
		},
		"no annotated cards: the fullest beside the annotated shares of others": {
			pod: newPod("a", main(8), labelled(2)), others: []Pod{newPod("b", main(4), assumedOn(1, 2))}, want: []int{1, 2}, result: ResultPlaced,
		},
		"too few cards have room": {
			pod: newPod("a", main(20), labelled(2)), others: []Pod{newPod("b", main(14))}, given: Allocations{"uid-b": {"main": onCards([]int{0, 1}, make([]string, 14)...)}},
			result: RefusedFull, text: "pod default/a: no card for 10 units of GPU memory on each of 2 cards",
		},
		"an older extender gave the pod one card, whatever its label says": {
			pod: newPod("a", main(8), labelled(2), assumedOn(1)), want: []int{1}, result: ResultAssumed,
		},
		"an invalid request": {
			pod:    newPod("a", main(3), func(pod *Pod) { pod.Invalid = errors.New("container main: 3 can't be divided") }),
			result: RefusedInvalid, text: "pod default/a: container main: 3 can't be divided",
		},
		"a label that became invalid after the bind, and one of the annotated cards has no room": {
			pod:    newPod("a", main(24), assumedOn(0, 1), func(pod *Pod) { pod.Invalid = errors.New("label: not a number") }),
			others: []Pod{newPod("b", main(6))}, given: Allocations{"uid-b": {"main": holding(0, 6)}},
			want: []int{1, 2}, result: ResultMoved,
		},
		"a container that runs with other cards than the rest of its pod holds both": {
			pod:    newPod("a", main(20), assumedOn(0, 1)),
			others: []Pod{newPod("b", container("x", 8), container("y", 8), assumedOn(1, 2), running)},
			given:  Allocations{"uid-b": {"x": onCards([]int{1, 2}), "y": Give(Container{Request: 8}, newCards(16, 16)[:1])}},
			result: RefusedFull, text: "pod default/a: no card for 10 units of GPU memory on each of 2 cards",
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := Snapshot{Cards: test.cards, Pods: append(test.others, test.pod), Given: test.given}
			if s.Cards == nil {
				s.Cards = newCards(16, 16, 16)
			}
			pod := &s.Pods[len(s.Pods)-1]
			got := s.selectCards(Decision{Pod: pod, Container: pod.Containers[len(pod.Containers)-1]})
			var text string
			if got.Rejection != nil {
				text = got.Rejection.Text
			}
			if got.Result != test.result || got.Rejection == nil && !slices.Equal(got.Indexes(), test.want) || !strings.HasPrefix(text, test.text) || test.text == "" && text != "" {
				t.Errorf("got cards %v, %q, %q, want %v, %q, %q", got.Indexes(), got.Result, text, test.want, test.result, test.text)
			}
		})
	}
}
