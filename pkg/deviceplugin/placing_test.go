package deviceplugin

import (
	"errors"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
)

func TestCard(t *testing.T) {
	sick := func(cards []gpu.Card, index int) []gpu.Card {
		cards[index].Unhealthy = "Xid 79"
		return cards
	}
	told := func(card int) hint { return hint{by: byOrder, card: card} }
	toldOf := func(pod gpu.PodUID, container string, card int) hint {
		return hint{container: containerKey{pod, container}, by: byOrder, card: card}
	}
	for name, test := range map[string]struct {
		cards  []gpu.Card
		pod    *corev1.Pod
		others []*corev1.Pod
		served served
		// preferred is the result of the preceding GetPreferredAllocation call.
		preferred hint
		want      int
		outcome   outcome
		refused   outcome
		text      string
	}{
		"the card that was chosen": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(1, 1)), want: 1, outcome: kept,
		},
		"also when it isn't the one that binpack would take": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(1, 1)),
			others: []*corev1.Pod{newPod("b", main(8), assumed(0, 1))}, served: served{"uid-b": {"main": given(0)}},
			want: 1, outcome: kept,
		},
		"the pod itself doesn't stand in its way": {
			cards: newCards(16), pod: newPod("a", container("x", 10), container("y", 6), assumed(0, 1)),
			served: served{"uid-a": {"x": given(0)}}, want: 0, outcome: kept,
		},
		"all containers of a pod get the card that the first one got": {
			cards: newCards(16, 16), pod: newPod("a", container("x", 2), container("y", 2), assumed(0, 1)),
			served: served{"uid-a": {"x": given(1)}}, want: 1, outcome: kept,
		},
		"a container that is started again after the books were lost gets the pod's card, whatever an init container was given since": {
			cards: newCards(16, 16), pod: newPod("a", initStep(2), main(2), assumed(0, 1), assigned, ran(false)),
			served: served{"uid-a": {"i": given(1)}}, want: 0, outcome: kept,
		},
		"unless others have taken the rest of that card since": {
			cards: newCards(16, 16), pod: newPod("a", container("x", 10), container("main", 6), assumed(0, 1)),
			others: []*corev1.Pod{newPod("b", container("main", 7))}, served: served{"uid-a": {"x": given(0)}, "uid-b": {"main": given(0)}},
			refused: refusedFull, text: "pod default/a has card 0 for other containers, and other pods leave no room there for the rest of it",
		},
		"what a container had it gets again, however full the card is": {
			cards: newCards(16, 16), pod: newPod("a", container("x", 10), container("main", 6), assumed(0, 1)),
			others: []*corev1.Pod{newPod("b", container("main", 7))}, served: served{"uid-a": {"x": given(0), "main": given(0)}, "uid-b": {"main": given(0)}},
			want: 0, outcome: kept,
		},
		"taken by a pod that was not assumed: another one that fits": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []*corev1.Pod{newPod("b", main(10))}, served: served{"uid-b": {"main": given(0)}},
			want: 1, outcome: moved,
		},
		"a whole request counts, though only a part was served": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []*corev1.Pod{newPod("b", container("x", 1), container("y", 9))}, served: served{"uid-b": {"x": given(0)}},
			want: 1, outcome: moved,
		},
		"a pod in its grace period holds its memory": {
			cards: newCards(16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []*corev1.Pod{newPod("b", main(10), deleting)}, served: served{"uid-b": {"main": given(0)}},
			refused: refusedFull, text: "pod default/a: no card for 8 of GPU memory: no GPU card has enough free memory",
		},
		"one that ended doesn't": {
			cards: newCards(16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []*corev1.Pod{newPod("b", main(10), phase(corev1.PodFailed))}, served: served{"uid-b": {"main": given(0)}},
			want: 0, outcome: kept,
		},
		"a promise to a pod not served yet doesn't stand against an older one": {
			cards: newCards(16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []*corev1.Pod{newPod("forged", main(16), assumed(0, 0))}, want: 0, outcome: kept,
		},
		"it does once it runs": {
			cards: newCards(16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []*corev1.Pod{newPod("b", main(16), assumed(0, 0), ran(true))}, refused: refusedFull,
		},
		"what was served counts where it was served, not where annotations say": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []*corev1.Pod{newPod("b", main(16), assumed(1, 0))}, served: served{"uid-b": {"main": given(0)}},
			want: 1, outcome: moved,
		},
		"a forged request is of no use": {
			cards: newCards(16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []*corev1.Pod{newPod("b", main(16), assumed(0, 0), annotation("ALIYUN_COM_GPU_MEM_POD", "1"))},
			served: served{"uid-b": {"main": given(0)}}, refused: refusedFull,
		},
		"no card chosen: binpack over what is there": {
			cards: newCards(16, 16), pod: newPod("a", main(8)),
			others: []*corev1.Pod{newPod("b", main(4), assumed(1, 1))}, want: 1, outcome: placed,
		},
		"no card chosen: the card whose devices the kubelet takes": {
			cards: newCards(16, 16), pod: newPod("a", main(8)), preferred: told(1), want: 1, outcome: placed,
		},
		"no card chosen: but not beside a promise that leaves too little there": {
			cards: newCards(16, 16), pod: newPod("a", main(8)), preferred: told(1),
			others: []*corev1.Pod{newPod("b", main(12), assumed(1, 1))}, want: 0, outcome: placed,
		},
		"the card that was chosen, whatever devices the kubelet takes": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(0, 1)), preferred: told(1), want: 0, outcome: kept,
		},
		"unless the kubelet was told so of this very container": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(0, 1)), preferred: toldOf("uid-a", "main", 1), want: 1, outcome: moved,
		},
		"which no longer counts where the room is gone": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(0, 1)), preferred: toldOf("uid-a", "main", 1),
			others: []*corev1.Pod{newPod("b", main(12), assumed(1, 1))}, want: 0, outcome: kept,
		},
		"nor where others of the pod have a card": {
			cards: newCards(16, 16), pod: newPod("a", container("x", 2), main(2), assumed(0, 1)), preferred: toldOf("uid-a", "main", 1),
			served: served{"uid-a": {"x": given(0)}}, want: 0, outcome: kept,
		},
		"where that is taken, the one whose devices the kubelet takes": {
			cards: newCards(16, 8, 16), pod: newPod("a", main(8), assumed(0, 1)), preferred: told(2),
			others: []*corev1.Pod{newPod("b", main(10))}, served: served{"uid-b": {"main": given(0)}},
			want: 2, outcome: moved,
		},
		"no card chosen: promises are kept": {
			cards: newCards(16, 16), pod: newPod("a", main(8)),
			others: []*corev1.Pod{newPod("b", main(12), assumed(0, 1))}, want: 1, outcome: placed,
		},
		"no card chosen: the whole pod has to fit": {
			cards: newCards(8, 16), pod: newPod("a", container("x", 6), container("y", 6)), want: 1, outcome: placed,
		},
		"an assignment that can't be parsed counts for no pod": {
			cards: newCards(16), pod: newPod("a", main(8), annotation("ALIYUN_COM_GPU_MEM_IDX", "-1")), want: 0, outcome: placed,
		},
		"pods that the informer doesn't have yet count": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(0, 1)),
			served: served{"unheard-of": {"main": serving{Card: 0, Request: 9}}}, want: 1, outcome: moved,
		},
		"so does a static pod that an earlier version gave a card": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []*corev1.Pod{newPod("static", main(9), mirrors("file"), assumed(0, 0), assigned, ran(true))}, want: 1, outcome: moved,
		},
		"a container that runs holds its card, and the one that its next start gets": {
			cards: newCards(16, 16, 16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []*corev1.Pod{newPod("b", main(9), assumed(1, 0), assigned, ran(true))},
			served: served{"uid-b": {"main": serving{Card: 1, Request: 9, Instance: "containerd://1", Next: 0}}}, want: 2, outcome: moved,
		},
		"one that runs keeps the card that its annotations name": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(1, 1), ran(true)), want: 1, outcome: kept,
		},
		"and gets no other one": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(0, 1), ran(true)),
			others: []*corev1.Pod{newPod("b", main(10))}, served: served{"uid-b": {"main": given(0)}},
			refused: refusedUnknownCard, text: "container main of pod default/a runs, and which card it has can't be told",
		},
		"a pod that was told of no card holds none": {
			cards: newCards(16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []*corev1.Pod{newPod("b", main(16), assumed(0, 0), ran(true))},
			served: served{"uid-b": {"main": given(noCard)}, "unheard-of": {"main": {Card: noCard, Request: 16}}}, want: 0, outcome: kept,
		},
		"but no other pod gets its memory": {
			cards: newCards(16, 16), pod: newPod("a", main(8)),
			others: []*corev1.Pod{newPod("b", main(12), assumed(0, 0))}, served: served{"uid-b": {"main": given(noCard)}},
			want: 1, outcome: placed,
		},
		"one whose answer isn't ours may hold what it was promised": {
			cards: newCards(16), pod: newPod("a", main(8), assumed(0, 1)),
			others: []*corev1.Pod{newPod("b", main(16), assumed(0, 0))}, served: served{"uid-b": {"main": given(unknownCard)}},
			refused: refusedFull,
		},
		"a card that isn't there": {
			cards: newCards(16, 16), pod: newPod("a", main(8), assumed(7, 1)),
			refused: refusedUnknownCard, text: "pod default/a was assigned card 7, which this node doesn't have",
		},
		"an unhealthy card": {
			cards: sick(newCards(16, 16), 1), pod: newPod("a", main(8), assumed(1, 1)),
			refused: refusedUnhealthy, text: "pod default/a was assigned card 1, which is unhealthy: Xid 79",
		},
		"only unhealthy cards have room": {
			cards: sick(newCards(4, 16), 1), pod: newPod("a", main(8)), refused: refusedUnhealthy,
		},
		"no card is large enough": {
			cards: newCards(4, 4), pod: newPod("a", main(8)), refused: refusedFull, text: "pod default/a: no card for 8 of GPU memory: the pod asks for more GPU memory than any card of the node has",
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := &snapshot{
				Cards: test.cards, Pods: views(append(test.others, test.pod)...), Served: test.served, Preferred: test.preferred,
			}
			pod := &s.Pods[len(s.Pods)-1]
			card, outcome, err := s.Card(pod, "main")
			if test.refused != "" {
				var r *refusal
				if !errors.As(err, &r) || r.outcome != test.refused {
					t.Fatalf("got card %d, %v, want refusal %q", card.Index, err, test.refused)
				}
				if !strings.Contains(err.Error(), test.text) {
					t.Errorf("got %q, want %q", err, test.text)
				}
				if code := status.Code(err); code == codes.Unknown || code == codes.OK {
					t.Errorf("the kubelet gets code %s", code)
				}
				return
			}
			if err != nil || card.Index != test.want || outcome != test.outcome {
				t.Errorf("got card %d, %q, %v, want %d, %q", card.Index, outcome, err, test.want, test.outcome)
			}
		})
	}
}
