package reasons

import (
	"fmt"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Reason is why a pod is not placed: on one node, as filter answers it (OfNodes), or at all, as a diagnosis says it (OfPods). Some reasons, such as
// Full, are both: a pod is pending for it if that is what most helps to know of its nodes. The zero value is Fits.
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
	// ReservedForOther: a card has enough free memory, but it is reserved for a group or pod that came first, or what the node has free besides
	// is. It is Reserved or ResourcesReserved of all nodes that have a card for the pod.
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

// row is what is known of a reason.
type row struct {
	// label is for metrics and JSON.
	label string
	// text is the text on the wire; empty if filter gives the reason for no node.
	text string
	// demanding is the text for pods that ask for more than memory of any one card; empty if it is the same.
	demanding string
	// words are a few words for lists; empty if no pod is pending for the reason.
	words string
}

// ofNodes reports whether filter gives the reason for nodes.
func (r row) ofNodes() bool { return r.text != "" }

// ofPods reports whether a pod can be pending for the reason.
func (r row) ofPods() bool { return r.words != "" }

var table = [...]row{
	Fits:              {label: "fits", text: "fits", words: "about to be tried"},
	Reserved:          {label: "reserved", text: "free GPU memory is reserved for a group or pod that came first"},
	ResourcesReserved: {label: "resources_reserved", text: "free CPU, memory or pods of the node are reserved for a group or pod that came first"},
	Fragmented: {label: "fragmented", text: "no GPU card has enough free memory, though the node's cards together have", words: "free memory is in pieces",
		demanding: "too few GPU cards have enough free memory and cores, though the node's cards together have"},
	Full: {label: "full", text: "no GPU card has enough free memory", words: "cards are full",
		demanding: "too few GPU cards have enough free memory and cores"},
	Crowded: {label: "crowded", text: "no GPU card with enough free memory takes more containers by MPS", words: "cards take no more containers"},
	Unhealthy: {label: "unhealthy", text: "the GPU cards that are large enough are unhealthy", words: "cards are unhealthy",
		demanding: "too few of the GPU cards that are large enough are healthy"},
	Elsewhere: {label: "elsewhere", text: "the pod is bound to another node, or an earlier bind to one is unconfirmed"},
	TooLarge: {label: "too_large", text: "the pod asks for more GPU memory than any card of the node has", words: "no card is large enough",
		demanding: "too few GPU cards of the node are large enough for the pod, or take as many containers"},
	WholeCards: {label: "whole_cards", text: "the node also offers its cards by nvidia.com/gpu or DRA, which excludes sharing them"},
	NotShared:  {label: "not_shared", text: "the node shares no GPU memory"},

	OldForCards: {label: "old_for_cards", text: "the node's GPU device plugin is too old for pods with several cards"},
	OldForCores: {label: "old_for_cores", text: "the node's GPU device plugin is too old for aliyun.com/gpu-core.percentage"},

	OldForLimits: {label: "old_for_limits", text: "the node's GPU device plugin is too old for limits above requests"},

	OneCardOnly: {label: "one_card_only", text: "the node enforces GPU memory by MPS, which allows one card for each pod"},

	NoOwnSharedMemory: {label: "no_own_shared_memory", text: "the node enforces GPU memory by MPS, which allows no volume of the pod at /dev/shm"},

	LimitBelowRequest: {label: "limit_below_request", text: "the annotated limit of GPU memory of a container is less than its request: raise the limit"},
	LimitTooLarge:     {label: "limit_too_large", text: "the annotated limit of GPU memory of a container is more than any card of the node has: lower the limit"},

	NoLimitAboveRequest: {label: "no_limit_above_request", text: "the node enforces GPU memory by MPS, which allows no limit above the request: remove the annotation"},

	OldForRDMA: {label: "old_for_rdma", text: "the node's GPU device plugin is too old for the label gpushare.aliyun.com/rdma"},
	NoAdapter:  {label: "no_adapter", text: "no GPU card of the node is near an RDMA adapter with an active port"},

	Gated:               {label: "gated", words: "held back by scheduling gates"},
	NotTried:            {label: "not_tried", words: "no scheduler has tried it"},
	SchedulerError:      {label: "scheduler_error", words: "kube-scheduler reports an error"},
	Nominated:           {label: "nominated", words: "nominated to a node"},
	InvalidRequest:      {label: "invalid_request", words: "its request is invalid"},
	InvalidGroup:        {label: "invalid_group", words: "its group is invalid"},
	WaitsForGroup:       {label: "waits_for_group", words: "waits for its group"},
	WaitsForTurn:        {label: "waits_for_turn", words: "waits for its turn"},
	OtherConstraint:     {label: "other_constraint", words: "something other than GPU memory"},
	ReservedForOther:    {label: "reserved_for_other", words: "reserved for a group or pod that came first"},
	KeptForNominated:    {label: "kept_for_nominated", words: "memory is kept for a nominated pod"},
	FailedCard:          {label: "failed_card", words: "a failed card blocks its node"},
	WaitsForTermination: {label: "waits_for_termination", words: "waits for pods to terminate"},
	NoNode:              {label: "no_node", words: "no node can be used"},
}

// Counts counts nodes by reason.
type Counts [len(table)]int

// Texts are texts by reason.
type Texts [len(table)]string

// OfNodes returns the reasons for which filter rejects nodes: all of nodes except Fits.
func OfNodes() []Reason {
	return which(func(r Reason) bool { return r != Fits && table[r].ofNodes() })
}

// OfPods returns the reasons for which pods are pending.
func OfPods() []Reason { return which(func(r Reason) bool { return table[r].ofPods() }) }

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
		return row{label: "unknown", text: "unknown reason", words: "unknown reason"}
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

const (
	keptFor      = "free GPU memory is kept for "
	resourcesFor = "free CPU, memory or pods of the node are kept for "
)

// Text returns the text on the wire for a pod that asks for memory of one card. Users see it.
func (r Reason) Text() string { return r.row().text }

// TextFor returns the text on the wire for a pod with this demand. It names the item that comes first if the reason is
// Reserved or ResourcesReserved and item isn't empty: "group NAMESPACE/NAME" or "pod NAMESPACE/NAME".
func (r Reason) TextFor(demand gpu.Demand, item string) string {
	demanding := demand.Cards > 1 || demand.Cores > 0 || demand.RDMA == gpu.RDMARequired || r == TooLarge && demand.Containers > 1
	switch text := r.row().demanding; {
	case r == Reserved && item != "":
		return keptFor + item
	case r == ResourcesReserved && item != "":
		return resourcesFor + item
	case demanding && text != "":
		return text
	}
	return r.Text()
}
