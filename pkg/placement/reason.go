package placement

import "strings"

// Reason is why a request doesn't fit a node. The zero value is Fits.
//
// kube-scheduler shows reasons in the pod's Events and requeues a pod when its message changes. So there are few reasons,
// and their texts are constant and name neither cards nor amounts.
type Reason uint8

// The reasons, from Fits to those that can't change on this node.
const (
	// Fits: a card has enough free memory.
	Fits Reason = iota
	// Reserved: a card has enough free memory, but some of it is held back for a gang that has waited too long.
	Reserved
	// Fragmented: no card has enough free memory, but the healthy cards together have.
	Fragmented
	// Full: a healthy card is large enough, but all healthy cards together have too little free memory.
	Full
	// Unhealthy: only unhealthy cards are large enough.
	Unhealthy
	// Elsewhere: the pod has an allocation on another node: it is bound there, or its bind is in flight or unconfirmed.
	Elsewhere
	// TooLarge: the request is larger than any card.
	TooLarge
	// WholeCards: the node also offers whole cards (nvidia.com/gpu), which excludes sharing by memory.
	WholeCards
	// NotShared: the node shares no GPU memory, or is unknown.
	NotShared
)

// words holds each reason's label for metrics and text for users.
var words = [...]struct{ label, text string }{
	Fits:       {"fits", "fits"},
	Reserved:   {"reserved", "free GPU memory is kept for a group that has waited long"},
	Fragmented: {"fragmented", "no GPU card has enough free memory, though the node's cards together have"},
	Full:       {"full", "no GPU card has enough free memory"},
	Unhealthy:  {"unhealthy", "the GPU cards that are large enough are unhealthy"},
	Elsewhere:  {"elsewhere", "the pod is bound to another node, or an earlier bind to one is unconfirmed"},
	TooLarge:   {"too_large", "the pod asks for more GPU memory than any card of the node has"},
	WholeCards: {"whole_cards", "the node offers nvidia.com/gpu and aliyun.com/gpu-mem at once, which exclude each other"},
	NotShared:  {"not_shared", "the node shares no GPU memory"},
}

// Counts counts nodes by reason.
type Counts [len(words)]int

// Texts are texts by reason.
type Texts [len(words)]string

// Reasons returns all reasons except Fits.
func Reasons() []Reason {
	return []Reason{Reserved, Fragmented, Full, Unhealthy, Elsewhere, TooLarge, WholeCards, NotShared}
}

// String returns the text for users.
func (r Reason) String() string {
	if int(r) >= len(words) {
		return "unknown reason"
	}
	return words[r].text
}

const keptFor = "free GPU memory is kept for group "

// TextFor is String, but names the group for which the memory is kept if the reason is Reserved and group isn't empty.
func (r Reason) TextFor(group string) string {
	if r == Reserved && group != "" {
		return keptFor + group
	}
	return r.String()
}

// ReservedFor returns the group that the text of Reserved names in a message of kube-scheduler, which lists reasons
// with their numbers of nodes, separated by commas.
func ReservedFor(message string) (group string, ok bool) {
	_, rest, ok := strings.Cut(message, keptFor)
	group, _, _ = strings.Cut(rest, " ")
	return strings.TrimRight(group, ".,"), ok
}

// IsText reports whether the text is that of a reason, as String or TextFor return it.
func IsText(text string) bool {
	for _, w := range words {
		if w.text == text {
			return true
		}
	}
	return strings.HasPrefix(text, keptFor)
}

// Label returns the label for metrics.
func (r Reason) Label() string {
	if int(r) >= len(words) {
		return "unknown"
	}
	return words[r].label
}

// Resolvable reports whether the request could fit if other pods left the node.
func (r Reason) Resolvable() bool { return r == Reserved || r == Fragmented || r == Full }

// Unresolvable reports whether evicting pods from the node can't help, so that kube-scheduler must not try.
func (r Reason) Unresolvable() bool { return r != Fits && !r.Resolvable() }
