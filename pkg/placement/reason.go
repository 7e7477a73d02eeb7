package placement

// Reason says why a request can't be placed on a node. The zero value is Fits.
//
// Reasons are shown to users in pod events and grouped by kube-scheduler, which wakes pods when their texts change: so
// they are few, constant, and name neither cards nor amounts.
type Reason uint8

// The reasons, from "yes" to "never here".
const (
	// Fits: there is a card with room.
	Fits Reason = iota
	// Fragmented: no card has room, though the healthy cards together have as much free as is asked for.
	Fragmented
	// Full: a healthy card would be large enough, but too much of it is taken, and too much of all of them together.
	Full
	// Unhealthy: a card would be large enough, but only unhealthy ones are.
	Unhealthy
	// Elsewhere: an earlier bind of the same pod to another node hasn't been settled yet, so the pod may be there.
	Elsewhere
	// TooLarge: even an empty card is too small.
	TooLarge
	// WholeCards: the node gives out whole cards (nvidia.com/gpu) as well, which excludes sharing by memory.
	WholeCards
	// NotShared: the node shares no GPU memory, or isn't known.
	NotShared
)

// words are a reason's two forms: a label for metrics, and a text for users.
var words = [...]struct{ label, text string }{
	Fits:       {"fits", "fits"},
	Fragmented: {"fragmented", "no GPU card has enough free memory, though the node's cards together have"},
	Full:       {"full", "no GPU card has enough free memory"},
	Unhealthy:  {"unhealthy", "the GPU cards that are large enough are unhealthy"},
	Elsewhere:  {"elsewhere", "an earlier bind of this pod to another node is not settled yet"},
	TooLarge:   {"too_large", "the pod asks for more GPU memory than any card of the node has"},
	WholeCards: {"whole_cards", "the node offers nvidia.com/gpu and aliyun.com/gpu-mem at once, which exclude each other"},
	NotShared:  {"not_shared", "the node shares no GPU memory"},
}

// Counts counts nodes by reason.
type Counts [len(words)]int

// Reasons lists every reason but Fits, for metrics and documentation.
func Reasons() []Reason {
	return []Reason{Fragmented, Full, Unhealthy, Elsewhere, TooLarge, WholeCards, NotShared}
}

// String returns the words that users read.
func (r Reason) String() string {
	if int(r) >= len(words) {
		return "unknown reason"
	}
	return words[r].text
}

// Label returns a short constant name for metrics.
func (r Reason) Label() string {
	if int(r) >= len(words) {
		return "unknown"
	}
	return words[r].label
}

// Resolvable reports whether there would be room if other pods left a card.
func (r Reason) Resolvable() bool { return r == Fragmented || r == Full }

// Unresolvable reports whether no other pod's leaving can help, so that kube-scheduler must not evict any for it.
func (r Reason) Unresolvable() bool { return r != Fits && !r.Resolvable() }
