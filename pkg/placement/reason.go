package placement

import (
	"slices"
	"strings"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Reason is why a request doesn't fit a node. The zero value is Fits.
//
// kube-scheduler shows reasons in the pod's Events and requeues a pod when its message changes. So there are few reasons,
// and their texts are constant and name neither cards nor amounts.
type Reason uint8

// The reasons, from Fits to those that can't change on this node.
const (
	// Fits: enough cards, mostly one, have enough free memory and cores.
	Fits Reason = iota
	// Reserved: a card has enough free memory, but some of it is held back for a gang that has waited too long.
	Reserved
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
	// OneCardOnly: the node's isolation mode allows one card for each pod.
	OneCardOnly
	// NoOwnSharedMemory: the node's isolation mode allows no pod a volume of its own for shared memory.
	NoOwnSharedMemory
)

// words holds each reason's label for metrics and text for users.
var words = [...]struct{ label, text string }{
	Fits:       {"fits", "fits"},
	Reserved:   {"reserved", "free GPU memory is kept for a group that has waited long"},
	Fragmented: {"fragmented", "no GPU card has enough free memory, though the node's cards together have"},
	Full:       {"full", "no GPU card has enough free memory"},
	Crowded:    {"crowded", "no GPU card with enough free memory takes more containers by MPS"},
	Unhealthy:  {"unhealthy", "the GPU cards that are large enough are unhealthy"},
	Elsewhere:  {"elsewhere", "the pod is bound to another node, or an earlier bind to one is unconfirmed"},
	TooLarge:   {"too_large", "the pod asks for more GPU memory than any card of the node has"},
	WholeCards: {"whole_cards", "the node also offers its cards by nvidia.com/gpu or DRA, which excludes sharing them"},
	NotShared:  {"not_shared", "the node shares no GPU memory"},

	OldForCards: {"old_for_cards", "the node's GPU device plugin is too old for pods with several cards"},
	OldForCores: {"old_for_cores", "the node's GPU device plugin is too old for aliyun.com/gpu-core.percentage"},
	OneCardOnly: {"one_card_only", "the node enforces GPU memory by MPS, which allows one card for each pod"},

	NoOwnSharedMemory: {"no_own_shared_memory", "the node enforces GPU memory by MPS, which allows no volume of the pod at /dev/shm"},
}

// tooLarge is the text of TooLarge for pods with several containers.
const tooLarge = "the pod asks for more GPU memory, or has more containers, than any card of the node takes"

// demanding are the texts of reasons that differ for pods with cores, with several cards, or with both.
var demanding = map[Reason]struct{ cores, cards, both string }{
	Fragmented: {
		cores: "no GPU card has enough free memory and cores, though the node's cards together have",
		cards: "too few GPU cards have enough free memory, though the node's cards together have",
		both:  "too few GPU cards have enough free memory and cores, though the node's cards together have",
	},
	Full: {
		cores: "no GPU card has enough free memory and cores",
		cards: "too few GPU cards have enough free memory",
		both:  "too few GPU cards have enough free memory and cores",
	},
	Unhealthy: {words[Unhealthy].text, tooFewHealthy, tooFewHealthy},
	TooLarge:  {words[TooLarge].text, tooFewLarge, tooFewLarge},
}

const (
	tooFewHealthy = "too few of the GPU cards that are large enough are healthy"
	tooFewLarge   = "the pod asks for more GPU cards than the node has that are large enough"
)

// Counts counts nodes by reason.
type Counts [len(words)]int

// Texts are texts by reason.
type Texts [len(words)]string

// Reasons returns all reasons except Fits.
func Reasons() []Reason {
	return []Reason{Reserved, Fragmented, Full, Crowded, Unhealthy, Elsewhere, TooLarge, WholeCards, NotShared, OldForCards, OldForCores, OneCardOnly, NoOwnSharedMemory}
}

// String returns the text for users whose pod asks for memory of one card.
func (r Reason) String() string {
	if int(r) >= len(words) {
		return "unknown reason"
	}
	return words[r].text
}

const keptFor = "free GPU memory is kept for group "

// TextFor returns the text for a pod with this demand. It names the group for which the memory is kept if the reason is Reserved
// and group isn't empty.
func (r Reason) TextFor(demand gpu.Demand, group string) string {
	texts, differs := demanding[r]
	switch {
	case r == Reserved && group != "":
		return keptFor + group
	case r == TooLarge && demand.Cards == 1 && demand.Containers > 1:
		return tooLarge
	case differs && demand.Cards > 1 && demand.Cores > 0:
		return texts.both
	case differs && demand.Cards > 1:
		return texts.cards
	case differs && demand.Cores > 0:
		return texts.cores
	}
	return r.String()
}

// AllTexts returns every text of the reason except one that names a group: String, and those for other demands.
func (r Reason) AllTexts() []string {
	texts := []string{r.String()}
	if other, differs := demanding[r]; differs {
		texts = append(texts, other.cores, other.cards, other.both)
	}
	if r == TooLarge {
		texts = append(texts, tooLarge)
	}
	slices.Sort(texts)
	return slices.Compact(texts)
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
	return allTexts[text] || strings.HasPrefix(text, keptFor)
}

var allTexts = func() map[string]bool {
	all := map[string]bool{}
	for r := range words {
		for _, text := range Reason(r).AllTexts() {
			all[text] = true
		}
	}
	return all
}()

// Label returns the label for metrics.
func (r Reason) Label() string {
	if int(r) >= len(words) {
		return "unknown"
	}
	return words[r].label
}

// Resolvable reports whether the request could fit if other pods left the node. It is false for Fits, as Unresolvable is.
func (r Reason) Resolvable() bool {
	return r == Reserved || r == Fragmented || r == Full || r == Crowded
}

// Unresolvable reports whether evicting pods from the node can't help, so that kube-scheduler must not try.
func (r Reason) Unresolvable() bool { return r != Fits && !r.Resolvable() }
