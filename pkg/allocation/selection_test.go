package allocation

import (
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
	preferred := func(card int) Preference { return Preference{Match: ByOrder, Cards: []int{card}} }
	preferredFor := func(pod string, card int) Preference { return Preference{mainOf(pod), ByOrder, []int{card}} }
	holdingNext := holding(1, 9)
	holdingNext.Instance, holdingNext.Next = "containerd://1", gpu.On(0, 9)
	const full = "pod default/a: no card for 8 units of GPU memory: no GPU card has enough free memory"
	for name, test := range map[string]struct {
		cards     []gpu.Card
		pod       Pod // Its last container is served.
		others    []Pod
		given     Allocations
		preferred Preference
		want      int
		result    Result
		text      string // Of the rejection.
		moved     string
	}{
		"the annotated card": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(1, 1)), want: 1, result: ResultKept,
		},
		"the annotated card, although binpack would take another": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(1, 1)),
			others: []Pod{newPod("b", main(8), assumed(0, 1))}, given: Allocations{"uid-b": {"main": onCard(0)}},
			want: 1, result: ResultKept,
		},
		"the pod's own memory doesn't count against it": {
			cards: newCards(16), pod: newPod("a", container("x", 10), container("y", 6), assumed(0, 1)),
			given: Allocations{"uid-a": {"x": onCard(0)}}, want: 0, result: ResultKept,
		},
		"the card of the pod's other containers": {
			cards: newCards(16, 16), pod: newPod("a", container("x", 2), container("y", 2), assumed(0, 1)),
			given: Allocations{"uid-a": {"x": onCard(1)}}, want: 1, result: ResultKept,
		},
		"the checkpoint was lost, and an init container got another card since: the annotated card": {
			cards: newCards(16, 16), pod: newPod("a", initStep(2), main(2), assumed(0, 1), assigned, ran),
			given: Allocations{"uid-a": {"i": onCard(1)}}, want: 0, result: ResultKept,
		},
		"the pod's card, the rest of which others hold now": {
			cards: newCards(16, 16), pod: newPod("a", container("x", 10), container("main", 6), assumed(0, 1)),
			others: []Pod{newPod("b", container("main", 7))}, given: Allocations{"uid-a": {"x": onCard(0)}, "uid-b": {"main": onCard(0)}},
			result: RefusedFull, text: "pod default/a has card 0 for other containers, and other pods leave no room there for the rest of it",
		},
		"the card that the container had, however full it is": {
			cards: newCards(16, 16), pod: newPod("a", container("x", 10), container("main", 6), assumed(0, 1)),
			others: []Pod{newPod("b", container("main", 7))}, given: Allocations{"uid-a": {"x": onCard(0), "main": onCard(0)}, "uid-b": {"main": onCard(0)}},
			want: 0, result: ResultKept,
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
			want: 0, result: ResultKept,
		},
		"annotations of a pod that was not served don't count": {
			cards: newCards(16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []Pod{newPod("forged", main(16), assumed(0, 0))}, want: 0, result: ResultKept,
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
		"no annotated card: the preferred one": {
			cards: newCards(16, 16), pod: newPod("a", main(8)), preferred: preferred(1), want: 1, result: ResultPlaced,
		},
		"no annotated card: the preferred one has no room beside annotated memory": {
			cards: newCards(16, 16), pod: newPod("a", main(8)), preferred: preferred(1),
			others: []Pod{newPod("b", main(12), assumed(1, 1))}, want: 0, result: ResultPlaced,
		},
		"the annotated card, although the kubelet chose devices of another": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(0, 1)), preferred: preferred(1), want: 0, result: ResultKept,
		},
		"the preferred card of this container": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(0, 1)), preferred: preferredFor("a", 1), want: 1, result: ResultMoved,
			moved: "the kubelet chose its devices when card 0 had no room for the pod, or wasn't the pod's",
		},
		"the preferred card of this container has no room now": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(0, 1)), preferred: preferredFor("a", 1),
			others: []Pod{newPod("b", main(12), assumed(1, 1))}, want: 0, result: ResultKept,
		},
		"the preferred card of this container, and others of the pod have another": {
			cards: newCards(16, 16), pod: newPod("a", container("x", 2), main(2), assumed(0, 1)), preferred: preferredFor("a", 1),
			given: Allocations{"uid-a": {"x": onCard(0)}}, want: 0, result: ResultKept,
		},
		"the annotated card is used: the preferred one": {
			cards: newCards(16, 8, 16), pod: newPod("a", main(8), assumed(0, 1)), preferred: preferred(2),
			others: []Pod{newPod("b", main(10))}, given: Allocations{"uid-b": {"main": onCard(0)}},
			want: 2, result: ResultMoved,
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
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(1, 1), running), want: 1, result: ResultKept,
		},
		"a running container gets no other card": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(0, 1), running),
			others: []Pod{newPod("b", main(10))}, given: Allocations{"uid-b": {"main": onCard(0)}},
			result: RefusedUnknownCard, text: "container main of pod default/a runs, and it is not known which card it has",
		},
		"a pod that was given no card holds none": {
			cards: newCards(16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []Pod{newPod("b", main(16), assumed(0, 0), running)},
			given:  Allocations{"uid-b": {"main": noCard}, "uid-new": {"main": noCard}}, want: 0, result: ResultKept,
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
			s := Snapshot{Cards: test.cards, Pods: append(test.others, test.pod), Given: test.given, Preferred: test.preferred}
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
