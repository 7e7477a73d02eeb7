package diagnosis

import (
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// Reason is the reason why a pod is pending, in one word. It is a label value of the metrics.
type Reason string

// The reasons.
const (
	// Gated: the pod has scheduling gates.
	Gated Reason = "gated"
	// Nominated: pods are being evicted to make room for it.
	Nominated Reason = "nominated"
	// WaitsForGroup: the pod is a member of a group that isn't placed yet. The message says what the group waits for.
	WaitsForGroup Reason = "waits_for_group"
	// Fits: a card has room. Either kube-scheduler has not tried yet, or the pod lacks something else than GPU memory.
	Fits Reason = "fits"
	// Fragmented: a node has enough free memory in total, but no card has.
	Fragmented Reason = "fragmented"
	// Full: a card would be large enough, but other pods use too much of it, or memory is kept for a group.
	Full Reason = "full"
	// Unhealthy: only unhealthy cards would be large enough.
	Unhealthy Reason = "unhealthy"
	// TooLarge: no card is large enough, even if empty.
	TooLarge Reason = "too_large"
	// NoNode: the pod can't use any of the nodes that share GPU memory.
	NoNode Reason = "no_node"
)

// cardReasons are the reasons that depend on a node's cards. The first one that any node has is the pod's reason.
var cardReasons = []Reason{Fits, Fragmented, Full, Unhealthy, TooLarge}

// ownReasons are the reasons that hold for a member of a group by itself, however many others exist and however much memory
// is free. They come before WaitsForGroup.
var ownReasons = []Reason{Unhealthy, TooLarge, NoNode}

// Reasons returns all reasons.
func Reasons() []Reason {
	return slices.Concat([]Reason{Gated, Nominated, WaitsForGroup}, cardReasons, []Reason{NoNode})
}

// reasonFor returns why the request fits no card of a node, or Fits.
func reasonFor(cards []placement.Card, request gpu.Memory) Reason {
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
