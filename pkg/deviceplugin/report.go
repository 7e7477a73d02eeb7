package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	events "k8s.io/client-go/tools/record"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// The reasons of the plugin's Events. docs/events.md describes each of them.
const (
	eventRefused  = "GPUCardRefused"
	eventMoved    = "GPUCardMoved"
	eventRepaired = "GPUCardRepaired"
	eventLost     = "GPUCardLost"
	eventNoDevice = "GPUDeviceNotFound"

	eventNotRecorded = "GPUCardNotRecorded"

	eventNoAdapter = "GPUAdapterNotGiven"

	eventLimitNotInForce = "GPULimitNotInForce"
	eventOveruse         = "GPUMemoryOveruse"

	eventUnhealthy   = "GPUCardUnhealthy"
	eventHealthy     = "GPUCardHealthy"
	eventNotOffered  = "GPUCardNotOffered"
	eventOffered     = "GPUCardOffered"
	eventSharedTwice = "GPUCardSharedTwice"
	eventContested   = "GPUNodeContested"
	eventCannotAsk   = "GPUKubeletNotAsked"

	eventConfigChanged  = "GPUConfigChanged"
	eventConfigRejected = "GPUConfigRejected"
	eventConfigWaits    = "GPUConfigWaits"
)

// nodeReference returns the object to which a node's Events are attached. As in the kubelet's Events, the UID is the
// node's name, because `kubectl describe node` finds the Events by it.
func nodeReference(name string) *corev1.ObjectReference {
	return &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: name, UID: types.UID(name)}
}

// reporter reports changes of the node's cards as Events on the node. The client drops Events of an unsteady card that come too often.
type reporter struct {
	cards  *cardState
	events events.EventRecorder
	node   *corev1.ObjectReference
}

// Run reports changes until ctx ends.
func (r *reporter) Run(ctx context.Context) error {
	var before condition
	for {
		view := r.cards.Get()
		now := conditionOf(view.Cards, view.Problem)
		for _, n := range now.since(before) {
			r.events.Event(r.node, n.kind, n.reason, n.text)
		}
		before = now
		select {
		case <-ctx.Done():
			return nil
		case <-view.Changed:
		}
	}
}

// condition is the state of a node's cards.
type condition struct {
	// problem is the reason why the cards aren't offered, and empty if they are.
	problem string
	cards   []gpu.Card
}

func conditionOf(cards []gpu.Card, problem error) condition {
	c := condition{cards: slices.DeleteFunc(slices.Clone(cards), isExcluded)} // The configurator reports the others.
	if problem != nil && !errors.Is(problem, errNoCardsYet) {
		c.problem = problem.Error()
	}
	return c
}

type notice struct{ kind, reason, text string }

// since returns the notices of the changes since before. Cards with the same reason share one: the driver can take all cards away, again and again, and the
// client limits all Events of a node.
func (c condition) since(before condition) []notice {
	var out []notice
	switch {
	case c.problem == before.problem:
	case c.problem != "":
		out = append(out, notice{corev1.EventTypeWarning, eventNotOffered, c.problem})
	default:
		out = append(out, notice{corev1.EventTypeNormal, eventOffered, "the node's GPU memory is offered to the kubelet now"})
	}
	changed := map[string][]string{} // The names of cards, by what they are unhealthy for now.
	for _, card := range c.cards {
		var was gpu.Card
		if i := slices.IndexFunc(before.cards, func(c gpu.Card) bool { return c.Index == card.Index }); i >= 0 {
			was = before.cards[i]
		}
		if card.Unhealthy != was.Unhealthy {
			changed[card.Unhealthy] = append(changed[card.Unhealthy], strings.TrimSpace(fmt.Sprintf("%d %s", card.Index, card.UUID)))
		}
	}
	for _, reason := range slices.Sorted(maps.Keys(changed)) {
		switch names := "card " + strings.Join(changed[reason], ", "); reason {
		case "":
			out = append(out, notice{corev1.EventTypeNormal, eventHealthy, names + " can be used again"})
		default:
			out = append(out, notice{corev1.EventTypeWarning, eventUnhealthy, names + ": " + reason})
		}
	}
	return out
}
