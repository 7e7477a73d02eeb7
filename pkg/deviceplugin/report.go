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

// reporter reports changes of the node's cards as Events on the node.
type reporter struct {
	cards  *cardState
	events events.EventRecorder
	node   *corev1.ObjectReference
	// limit prevents a flood of Events from an unsteady card: a state that ends before the next Event isn't reported. All
	// Events of a node share an allowance in the client, 25 at once and one in five minutes, of which limit leaves some.
	limit *rate.Limiter
}

func newReporter(cards *cardState, recorder events.EventRecorder, node *corev1.ObjectReference) *reporter {
	return &reporter{cards: cards, events: recorder, node: node, limit: newEventLimit()}
}

// newEventLimit returns a limit of Events about the node, which leaves some of the client's allowance.
func newEventLimit() *rate.Limiter { return rate.NewLimiter(rate.Every(2*time.Minute), 4) }

// Run reports changes until ctx ends.
func (r *reporter) Run(ctx context.Context) error {
	var reported condition
	for {
		cards, changed, problem := r.cards.Get()
		now := conditionOf(cards, problem)
		if len(now.since(reported)) > 0 {
			if err := r.limit.Wait(ctx); err != nil {
				return nil // The context has ended.
			}
			cards, changed, problem = r.cards.Get()
			now = conditionOf(cards, problem)
			for _, n := range now.since(reported) {
				r.events.Event(r.node, n.kind, n.reason, n.text)
			}
			reported = now
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// condition is the state of a node's cards.
type condition struct {
	// problem is the reason why the cards aren't offered, and empty if they are.
	problem string
	// unhealthy maps the name of each unhealthy card to the reason.
	unhealthy map[string]string
	// healthy has the names of the cards that new pods can use.
	healthy map[string]bool
}

func conditionOf(cards []gpu.Card, problem error) condition {
	c := condition{unhealthy: map[string]string{}, healthy: map[string]bool{}}
	if problem != nil && !errors.Is(problem, errNoCardsYet) {
		c.problem = problem.Error()
	}
	for _, card := range cards {
		switch name := cardName(card); {
		case card.Healthy():
			c.healthy[name] = true
		case !isExcluded(card): // The configurator reports the others.
			c.unhealthy[name] = card.Unhealthy
		}
	}
	return c
}

// cardName returns the name of a card for Events.
func cardName(card gpu.Card) string {
	if card.UUID == "" {
		return strconv.Itoa(card.Index)
	}
	return fmt.Sprintf("%d (%s)", card.Index, card.UUID)
}

type notice struct{ kind, reason, text string }

// since returns the notices of the changes since before. Cards with the same reason share a notice.
func (c condition) since(before condition) []notice {
	var out []notice
	switch {
	case c.problem == before.problem:
	case c.problem != "":
		out = append(out, notice{corev1.EventTypeWarning, eventNotOffered, c.problem})
	default:
		out = append(out, notice{corev1.EventTypeNormal, eventOffered, "the node's GPU memory is offered to the kubelet now"})
	}
	groups := map[string][]string{}
	for card, reason := range c.unhealthy {
		if before.unhealthy[card] != reason {
			groups[reason] = append(groups[reason], card)
		}
	}
	for _, reason := range slices.Sorted(maps.Keys(groups)) {
		out = append(out, notice{corev1.EventTypeWarning, eventUnhealthy, fmt.Sprintf("card %s: %s", list(groups[reason]), reason)})
	}
	var recovered []string
	for card := range before.unhealthy {
		if c.healthy[card] {
			recovered = append(recovered, card)
		}
	}
	if len(recovered) > 0 {
		out = append(out, notice{corev1.EventTypeNormal, eventHealthy, fmt.Sprintf("card %s can be used again", list(recovered))})
	}
	return out
}

func list(cards []string) string {
	slices.Sort(cards)
	return strings.Join(cards, ", ")
}
