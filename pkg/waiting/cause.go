package waiting

import (
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// Cause is why a pod waits, in one word.
type Cause string

// The causes, roughly from the pod's own to the cluster's.
const (
	// Gated: the pod asks not to be scheduled yet.
	Gated Cause = "gated"
	// Nominated: pods are being evicted to make room for it.
	Nominated Cause = "nominated"
	// Fits: a card has room, so it is kube-scheduler's turn, or something else is in the way.
	Fits Cause = "fits"
	// Fragmented: a node has enough free in all, but not on one card.
	Fragmented Cause = "fragmented"
	// Full: a card would be large enough, but others hold too much.
	Full Cause = "full"
	// Unhealthy: only cards that have failed would be large enough.
	Unhealthy Cause = "unhealthy"
	// TooLarge: no card is large enough, even when empty.
	TooLarge Cause = "too_large"
	// NoNode: no node that shares GPU memory may take the pod.
	NoNode Cause = "no_node"
)

// ofCards are the causes that a node's cards give, the mildest first: what it takes until there is room.
var ofCards = []Cause{Fits, Fragmented, Full, Unhealthy, TooLarge}

// Causes lists them all.
func Causes() []Cause { return slices.Concat([]Cause{Gated, Nominated}, ofCards, []Cause{NoNode}) }

// causeOf is why the request finds no card of a node, or Fits.
func causeOf(cards []placement.Card, request gpu.Memory) Cause {
	switch placement.Fit(cards, request) {
	case placement.Fits:
		return Fits
	case placement.Fragmented:
		return Fragmented
	case placement.Full:
		return Full
	case placement.Unhealthy:
		return Unhealthy
	}
	return TooLarge
}
