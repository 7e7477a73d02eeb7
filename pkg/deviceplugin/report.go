package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	events "k8s.io/client-go/tools/record"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// The reasons of the plugin's events; docs/events.md has what each means.
const (
	eventRefused  = "GPUCardRefused"
	eventMoved    = "GPUCardMoved"
	eventRepaired = "GPUCardRepaired"

	eventUnhealthy   = "GPUCardUnhealthy"
	eventHealthy     = "GPUCardHealthy"
	eventNotOffered  = "GPUCardNotOffered"
	eventOffered     = "GPUCardOffered"
	eventSharedTwice = "GPUCardSharedTwice"
)

// nodeReference returns what a node's events are attached to. Like the kubelet's they carry the name as UID, which is
// how `kubectl describe node` finds them.
func nodeReference(name string) *corev1.ObjectReference {
	return &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: name, UID: types.UID(name)}
}

// reporter tells by events on the node what becomes of its cards.
type reporter struct {
	cards  *cardState
	events events.EventRecorder
	node   *corev1.ObjectReference
	// limit keeps an unsteady card or driver from flooding: what comes and goes in between isn't told. All events of a
	// node share one allowance in the client, 25 at once and one in five minutes, and this leaves others some of it.
	limit *rate.Limiter
}

func newReporter(cards *cardState, recorder events.EventRecorder, node *corev1.ObjectReference) *reporter {
	return &reporter{cards: cards, events: recorder, node: node, limit: rate.NewLimiter(rate.Every(2*time.Minute), 4)}
}

// Run reports until the context ends.
func (r *reporter) Run(ctx context.Context) error {
	var told condition
	for {
		cards, changed, problem := r.cards.Get()
		now := conditionOf(cards, problem)
		if len(now.since(told)) > 0 {
			if err := r.limit.Wait(ctx); err != nil {
				return nil // The context has ended.
			}
			cards, changed, problem = r.cards.Get()
			now = conditionOf(cards, problem)
			for _, n := range now.since(told) {
				r.events.Event(r.node, n.kind, n.reason, n.text)
			}
			told = now
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// Refused tells that the kubelet doesn't want the plugin.
func (r *reporter) Refused(reason error) {
	r.events.Event(r.node, corev1.EventTypeWarning, eventNotOffered, reason.Error())
}

// condition is how a node's cards are.
type condition struct {
	// problem is why they aren't offered, empty where they are.
	problem string
	// sick are the cards that can't be used, by name, with the reason.
	sick map[string]string
}

func conditionOf(cards []gpu.Card, problem error) condition {
	c := condition{sick: map[string]string{}}
	if problem != nil && !errors.Is(problem, errNoCardsYet) {
		c.problem = problem.Error()
	}
	for _, card := range cards {
		if !card.Healthy() {
			name := strconv.Itoa(card.Index)
			if card.UUID != "" {
				name += " (" + card.UUID + ")"
			}
			c.sick[name] = card.Unhealthy
		}
	}
	return c
}

// notice is an event to be.
type notice struct{ kind, reason, text string }

// since returns what has changed: cards that share a reason in one notice.
func (c condition) since(before condition) []notice {
	var out []notice
	switch {
	case c.problem == before.problem:
	case c.problem != "":
		out = append(out, notice{corev1.EventTypeWarning, eventNotOffered, c.problem})
	default:
		out = append(out, notice{corev1.EventTypeNormal, eventOffered, "the node's GPU memory is offered to the kubelet now"})
	}
	fell := map[string][]string{}
	for card, reason := range c.sick {
		if before.sick[card] != reason {
			fell[reason] = append(fell[reason], card)
		}
	}
	for _, reason := range slices.Sorted(maps.Keys(fell)) {
		out = append(out, notice{corev1.EventTypeWarning, eventUnhealthy, fmt.Sprintf("card %s: %s", list(fell[reason]), reason)})
	}
	var rose []string
	for card := range before.sick {
		if _, still := c.sick[card]; !still {
			rose = append(rose, card)
		}
	}
	if len(rose) > 0 {
		out = append(out, notice{corev1.EventTypeNormal, eventHealthy, fmt.Sprintf("card %s can be used again", list(rose))})
	}
	return out
}

func list(cards []string) string {
	slices.Sort(cards)
	return strings.Join(cards, ", ")
}
