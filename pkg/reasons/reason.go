package reasons

import (
	"fmt"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Reason is why a pod is not placed: on one node, as filter answers it, or at all, as a diagnosis says it. The zero value is Fits.
//
// kube-scheduler shows the reasons of nodes in the pod's Events and requeues a pod when its message changes. So there are few of them,
// and their texts are constant and name neither cards nor amounts.
type Reason uint8

// The reasons, those of nodes from Fits to those that can't change on the node, then those of pods only.
const (
	// Fits: enough cards, mostly one, have enough free memory and cores. A pending pod with this reason is about to be tried by
	// kube-scheduler: for the first time, or again because the card had no room at its last try.
	Fits Reason = iota
	// Reserved: a card has enough free memory, but some of it is reserved for a group or pod that came first.
	Reserved
	// ResourcesReserved: enough cards have enough free memory, but a group or pod that came first needs too much of what the node has free besides:
	// CPU, memory, pods, extended resources.
	ResourcesReserved
	// Fragmented: too few cards have enough free memory and cores, but the healthy cards together have.
	Fragmented
	// Full: enough healthy cards are large enough, but all healthy cards together have too little free memory or cores.
	Full
	// Crowded: enough cards have enough free memory and cores, but too few of them take more containers.
	Crowded
	// Unhealthy: too few healthy cards are large enough, but with the unhealthy ones there are enough.
	Unhealthy
	// Elsewhere: the pod has an allocation on another node: it is bound there, or its bind is in flight or unconfirmed.
	Elsewhere
	// TooLarge: the node has too few cards that are large enough, or that take as many containers.
	TooLarge
	// WholeCards: the node also offers its cards by NVIDIA's device plugin or DRA driver, which excludes sharing by memory.
	WholeCards
	// NotShared: the node shares no GPU memory, or is unknown.
	NotShared
	// OldForCards: the node's device plugin doesn't understand pods with several cards.
	OldForCards
	// OldForCores: the node's device plugin doesn't understand cores.
	OldForCores
	// OldForLimits: the node's device plugin doesn't understand limits above requests.
	OldForLimits
	// OneCardOnly: the node's isolation mode allows one card for each pod.
	OneCardOnly
	// NoOwnSharedMemory: the node's isolation mode allows no pod a volume of its own for shared memory.
	NoOwnSharedMemory
	// LimitBelowRequest: the annotated limit of a container is less than it requests, in the node's unit.
	LimitBelowRequest
	// LimitTooLarge: the annotated limit of a container is more than the node's largest card has.
	LimitTooLarge
	// NoLimitAboveRequest: the node's isolation mode allows no limit above the request.
	NoLimitAboveRequest
	// OldForRDMA: the node's device plugin doesn't understand pods that ask for cards near an RDMA adapter.
	OldForRDMA
	// NoAdapter: no card of the node is near an RDMA adapter with an active port.
	NoAdapter

	// Gated: the pod has scheduling gates.
	Gated
	// NotTried: kube-scheduler has not tried the pod for diagnosis.UntriedAfter: perhaps no scheduler of the pod's schedulerName runs.
	NotTried
	// SchedulerError: kube-scheduler could not try or bind the pod. Mostly it can't reach the extender.
	SchedulerError
	// Nominated: the pod is nominated to a node. kube-scheduler tries it there next, or pods of lower priority are leaving.
	Nominated
	// InvalidRequest: no node can give the pod what it asks for, for example because its memory can't be divided over its cards.
	InvalidRequest
	// InvalidGroup: the annotations or labels that name the pod's group are invalid, or those of its members contradict each
	// other.
	InvalidGroup
	// WaitsForGroup: the pod is a member of a group that isn't placed yet. The message says what the group waits for.
	WaitsForGroup
	// WaitsForTurn: tenants share the cluster fairly, and it isn't the pod's turn.
	WaitsForTurn
	// OtherConstraint: a card has room, but kube-scheduler has rejected the pod for something else, such as a lack of CPU.
	OtherConstraint
	// ReservedForOther: a card has enough free memory, but it is reserved for a group or pod that came first, or what the node has free besides is. It
	// is Reserved or ResourcesReserved of all nodes that have a card for the pod.
	ReservedForOther
	// KeptForNominated: a card has enough free memory, but it is reserved for a pod that is nominated to the node.
	KeptForNominated
	// FailedCard: a card has room, but the node's sum, which kube-scheduler counts, has none: the sum doesn't include a failed card, and
	// the pods on that card still count.
	FailedCard
	// WaitsForTermination: a card has room once pods that are being deleted have ended.
	WaitsForTermination
	// NoNode: the pod can't use any of the nodes that share GPU memory.
	NoNode
)

// row is a reason's label for metrics and JSON, its text on the wire if it is one of nodes, and a few words for lists if it is one of pods.
type row struct{ label, text, words string }

var table = [...]row{
	Fits:              {"fits", "fits", "about to be tried"},
	Reserved:          {"reserved", "free GPU memory is reserved for a group or pod that came first", ""},
	ResourcesReserved: {"resources_reserved", "free CPU, memory or pods of the node are reserved for a group or pod that came first", ""},
	Fragmented:        {"fragmented", "no GPU card has enough free memory, though the node's cards together have", "free memory is in pieces"},
	Full:              {"full", "no GPU card has enough free memory", "cards are full"},
	Crowded:           {"crowded", "no GPU card with enough free memory takes more containers by MPS", "cards take no more containers"},
	Unhealthy:         {"unhealthy", "the GPU cards that are large enough are unhealthy", "cards are unhealthy"},
	Elsewhere:         {"elsewhere", "the pod is bound to another node, or an earlier bind to one is unconfirmed", ""},
	TooLarge:          {"too_large", "the pod asks for more GPU memory than any card of the node has", "no card is large enough"},
	WholeCards:        {"whole_cards", "the node also offers its cards by nvidia.com/gpu or DRA, which excludes sharing them", ""},
	NotShared:         {"not_shared", "the node shares no GPU memory", ""},

	OldForCards: {"old_for_cards", "the node's GPU device plugin is too old for pods with several cards", ""},
	OldForCores: {"old_for_cores", "the node's GPU device plugin is too old for aliyun.com/gpu-core.percentage", ""},

	OldForLimits: {"old_for_limits", "the node's GPU device plugin is too old for limits above requests", ""},

	OneCardOnly: {"one_card_only", "the node enforces GPU memory by MPS, which allows one card for each pod", ""},

	NoOwnSharedMemory: {"no_own_shared_memory", "the node enforces GPU memory by MPS, which allows no volume of the pod at /dev/shm", ""},

	LimitBelowRequest: {"limit_below_request", "the annotated limit of GPU memory of a container is less than its request: raise the limit", ""},
	LimitTooLarge:     {"limit_too_large", "the annotated limit of GPU memory of a container is more than any card of the node has: lower the limit", ""},

	NoLimitAboveRequest: {"no_limit_above_request", "the node enforces GPU memory by MPS, which allows no limit above the request: remove the annotation", ""},

	OldForRDMA: {"old_for_rdma", "the node's GPU device plugin is too old for the label gpushare.aliyun.com/rdma", ""},
	NoAdapter:  {"no_adapter", "no GPU card of the node is near an RDMA adapter with an active port", ""},

	Gated:               {"gated", "", "held back by scheduling gates"},
	NotTried:            {"not_tried", "", "no scheduler has tried it"},
	SchedulerError:      {"scheduler_error", "", "kube-scheduler reports an error"},
	Nominated:           {"nominated", "", "nominated to a node"},
	InvalidRequest:      {"invalid_request", "", "its request is invalid"},
	InvalidGroup:        {"invalid_group", "", "its group is invalid"},
	WaitsForGroup:       {"waits_for_group", "", "waits for its group"},
	WaitsForTurn:        {"waits_for_turn", "", "waits for its turn"},
	OtherConstraint:     {"other_constraint", "", "something other than GPU memory"},
	ReservedForOther:    {"reserved_for_other", "", "reserved for a group or pod that came first"},
	KeptForNominated:    {"kept_for_nominated", "", "memory is kept for a nominated pod"},
	FailedCard:          {"failed_card", "", "a failed card blocks its node"},
	WaitsForTermination: {"waits_for_termination", "", "waits for pods to terminate"},
	NoNode:              {"no_node", "", "no node can be used"},
}

// Counts counts nodes by reason.
type Counts [len(table)]int

// Texts are texts by reason.
type Texts [len(table)]string

// OfNodes returns the reasons for which filter rejects nodes: all of nodes except Fits.
func OfNodes() []Reason {
	return which(func(r Reason) bool { return r != Fits && table[r].text != "" })
}

// OfPods returns the reasons for which pods are pending.
func OfPods() []Reason { return which(func(r Reason) bool { return table[r].words != "" }) }

func which(such func(Reason) bool) (found []Reason) {
	for r := range Reason(len(table)) {
		if such(r) {
			found = append(found, r)
		}
	}
	return found
}

func (r Reason) row() row {
	if int(r) >= len(table) {
		return row{"unknown", "unknown reason", "unknown reason"}
	}
	return table[r]
}

// String returns the label for metrics and JSON.
func (r Reason) String() string { return r.row().label }

// MarshalText returns the label.
func (r Reason) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText sets the reason to the one with the label.
func (r *Reason) UnmarshalText(label []byte) error {
	found := which(func(r Reason) bool { return r.String() == string(label) })
	if len(found) == 0 {
		return fmt.Errorf("unknown reason %q", label)
	}
	*r = found[0]
	return nil
}

// Words returns the reason of a pending pod in a few words, for lists in which the message has no room.
func (r Reason) Words() string { return r.row().words }

// Resolvable reports whether the request could fit if other pods left the node. It is false for Fits, as Unresolvable is.
func (r Reason) Resolvable() bool {
	return r == Reserved || r == ResourcesReserved || r == Fragmented || r == Full || r == Crowded
}

// Unresolvable reports whether evicting pods from the node can't help, so that kube-scheduler must not try.
func (r Reason) Unresolvable() bool { return r != Fits && !r.Resolvable() }

// tooLarge is the text of TooLarge for pods with several containers.
const tooLarge = "the pod asks for more GPU memory, or has more containers, than any card of the node takes"

// demanding are the texts of reasons that differ for pods with cores, with several cards, or with both, and for those whose cards must be near
// an adapter, whatever else they ask for.
var demanding = map[Reason]struct{ cores, cards, both, near string }{
	Fragmented: {
		cores: "no GPU card has enough free memory and cores, though the node's cards together have",
		cards: "too few GPU cards have enough free memory, though the node's cards together have",
		both:  "too few GPU cards have enough free memory and cores, though the node's cards together have",
		near:  "too few GPU cards near an RDMA adapter have enough free memory and cores, though the node's cards together have",
	},
	Full: {
		cores: "no GPU card has enough free memory and cores",
		cards: "too few GPU cards have enough free memory",
		both:  "too few GPU cards have enough free memory and cores",
		near:  "too few GPU cards near an RDMA adapter have enough free memory and cores",
	},
	Unhealthy: {table[Unhealthy].text, tooFewHealthy, tooFewHealthy, "too few of the GPU cards near an RDMA adapter that are large enough are healthy"},
	TooLarge:  {table[TooLarge].text, tooFewLarge, tooFewLarge, "too few of the node's GPU cards near an RDMA adapter are large enough"},
}

const (
	tooFewHealthy = "too few of the GPU cards that are large enough are healthy"
	tooFewLarge   = "the pod asks for more GPU cards than the node has that are large enough"
	keptFor       = "free GPU memory is kept for "
	resourcesFor  = "free CPU, memory or pods of the node are kept for "
)

// Text returns the text on the wire for a pod that asks for memory of one card. Users see it.
func (r Reason) Text() string { return r.row().text }

// TextFor returns the text on the wire for a pod with this demand. It names the item that comes first if the reason is
// Reserved or ResourcesReserved and item isn't empty: "group NAMESPACE/NAME" or "pod NAMESPACE/NAME".
func (r Reason) TextFor(demand gpu.Demand, item string) string {
	texts, differs := demanding[r]
	switch {
	case r == Reserved && item != "":
		return keptFor + item
	case r == ResourcesReserved && item != "":
		return resourcesFor + item
	case differs && demand.RDMA == gpu.RDMARequired:
		return texts.near
	case r == TooLarge && demand.Cards == 1 && demand.Containers > 1:
		return tooLarge
	case differs && demand.Cards > 1 && demand.Cores > 0:
		return texts.both
	case differs && demand.Cards > 1:
		return texts.cards
	case differs && demand.Cores > 0:
		return texts.cores
	}
	return r.Text()
}

// AllTexts returns every text of the reason except one that names a group: Text, and those for other demands.
func (r Reason) AllTexts() []string {
	texts := []string{r.Text()}
	if other, differs := demanding[r]; differs {
		texts = append(texts, other.cores, other.cards, other.both, other.near)
	}
	if r == TooLarge {
		texts = append(texts, tooLarge)
	}
	slices.Sort(texts)
	return slices.Compact(texts)
}
