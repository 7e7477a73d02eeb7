package protocol

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// OveruseLife is how long a report of over-use counts. The device plugin renews it well before, as long as the over-use lasts.
const OveruseLife = 3 * time.Minute

// Overuse is the value of a pod's AnnotationOveruse, in JSON. Amounts are in MiB, rounded down.
type Overuse struct {
	// Used and Requested are the sums over Cards.
	Used      int64 `json:"usedMiB"`
	Requested int64 `json:"requestedMiB"`
	// Since is when the over-use began, At when it was last measured.
	Since time.Time `json:"since"`
	At    time.Time `json:"at"`
	// Cards are the cards on which a container of the pod uses more than it may, or borrows while the card is low on free memory, by index, with
	// the use of all of its containers there.
	Cards map[int]CardOveruse `json:"cards"`
}

// CardOveruse is a pod's use and request of one card.
type CardOveruse struct {
	Used      int64 `json:"usedMiB"`
	Requested int64 `json:"requestedMiB"`
	// Limit is what the pod may use of the card if that is more than it requests; else 0.
	Limit int64 `json:"limitMiB,omitempty"`
	// Short is by how much the card lacks free memory, so that others may not get what they request; 0 for a pod that has exceeded its limit for
	// longer than the grace period.
	Short int64 `json:"shortMiB,omitempty"`
}

// ForLowCard reports whether the pod is reported only because its card is low on free memory. It may also be above its limit, see Above.
func (c CardOveruse) ForLowCard() bool { return c.Short > 0 }

// Above reports whether the pod uses more than it may.
func (c CardOveruse) Above() bool { return c.Used > max(c.Requested, c.Limit) }

// String describes the use in words that follow "it" or "the pod".
func (c CardOveruse) String() string {
	text := fmt.Sprintf("uses %d MiB of GPU memory and requests %d MiB", c.Used, c.Requested)
	if c.Limit > 0 {
		text += fmt.Sprintf(" with a limit of %d MiB", c.Limit)
	}
	return text
}

// Annotation returns the annotation's value.
func (o Overuse) Annotation() string {
	text, _ := json.Marshal(o) // Numbers and times can always be written.
	return string(text)
}

// ParseOveruse parses the value of a pod's annotation. It returns nil for an empty one: the pod has none.
func ParseOveruse(text string) (*Overuse, error) {
	if text == "" {
		return nil, nil
	}
	if len(text) > MaxSize {
		return nil, fmt.Errorf("annotation %s: %d bytes, want %d at most", AnnotationOveruse, len(text), MaxSize)
	}
	var o Overuse
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return nil, fmt.Errorf("annotation %s: %w", AnnotationOveruse, err)
	}
	if n := len(o.Cards); n > gpu.MaxCards {
		return nil, fmt.Errorf("annotation %s: %d cards, want %d at most", AnnotationOveruse, n, gpu.MaxCards)
	}
	for card, use := range o.Cards {
		if card < 0 || card > maxCard || use.Used < 0 || use.Requested < 0 || use.Used <= use.Requested || use.Limit < 0 || use.Short < 0 {
			return nil, fmt.Errorf("annotation %s: card %d: %d of %d MiB", AnnotationOveruse, card, use.Used, use.Requested)
		}
	}
	return &o, nil
}

// Sum returns the sum over the cards. Short is 0 if that of one of them is.
func (o *Overuse) Sum() CardOveruse {
	sum, low := CardOveruse{Used: o.Used, Requested: o.Requested}, true
	for _, card := range o.Cards {
		sum.Limit, sum.Short, low = sum.Limit+max(card.Requested, card.Limit), sum.Short+card.Short, low && card.ForLowCard()
	}
	if sum.Limit <= o.Requested {
		sum.Limit = 0
	}
	if !low {
		sum.Short = 0
	}
	return sum
}

// On returns the report on a card, which is zero if there is none.
func (o *Overuse) On(card int) CardOveruse {
	if o == nil {
		return CardOveruse{}
	}
	return o.Cards[card]
}

// Current reports whether the report still counts. One from the future doesn't: the node's clock is wrong, so its age is not known.
func (o *Overuse) Current(now time.Time) bool {
	return o != nil && now.Sub(o.At).Abs() <= OveruseLife
}
