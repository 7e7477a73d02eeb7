package nodeconfig

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
	"strconv"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/isolation"
)

// Settings are the values that a plugin works with. They don't change once they are made.
type Settings struct {
	inventory.Settings
	// Excluded are the cards that take no new pods.
	Excluded Cards
	// Isolation is the isolation mode, unless the node's label names another one.
	Isolation isolation.Mode
}

// Defaults returns the settings of a node without a file and flags.
func Defaults() Settings {
	return Settings{Settings: inventory.Settings{Unit: gpu.GiB, QuietPeriod: inventory.DefaultQuietPeriod}, Isolation: isolation.None}
}

// Equal reports whether both have the same values.
func (s Settings) Equal(o Settings) bool { return reflect.DeepEqual(s, o) }

// ApplicableNow returns the settings that can take effect now in place of those in force. pods reports whether pods that ask for GPU
// memory are on the node. waits is why one of the values doesn't take effect yet, and empty if all do.
//
// Only the unit waits: the pods' requests are plain numbers, which a new unit would give another meaning. What the others
// change is how the node is offered to new pods. Running containers keep what they have.
func (s Settings) ApplicableNow(inForce Settings, pods bool) (next Settings, waits string) {
	if s.Unit != inForce.Unit && pods {
		waits = fmt.Sprintf("the new memoryUnit %s takes effect once no pod on the node asks for GPU memory, until then it is %s", s.Unit, inForce.Unit)
		s.Unit = inForce.Unit
	}
	return s, waits
}

// Changes returns the keys whose values differ between two settings, in the order of the format.
func (s Settings) Changes(before Settings) []string {
	var keys []string
	for _, k := range []struct {
		key  string
		same bool
	}{
		{"memoryUnit", s.Unit == before.Unit},
		{"excludedCards", slices.Equal(s.Excluded, before.Excluded)},
		{"cardMemory", reflect.DeepEqual(s.CardMemory, before.CardMemory)},
		{"isolation", s.Isolation == before.Isolation},
		{"healthChecks", s.QuietPeriod == before.QuietPeriod && reflect.DeepEqual(s.Xids, before.Xids)},
	} {
		if !k.same {
			keys = append(keys, k.key)
		}
	}
	return keys
}

// Cards selects cards. Each selector adds those that it matches.
type Cards []CardSelector

// CardSelector matches a card by its UUID, its model or its index on the node.
type CardSelector struct {
	UUID, Model string
	// Index counts if both of the others are empty.
	Index int
}

// Has reports whether a card is selected.
func (c Cards) Has(card gpu.Card) bool {
	return slices.ContainsFunc(c, func(s CardSelector) bool { return s.matches(card) })
}

// Unmatched returns the values of the selectors that match none of the cards, such as a misspelt model.
func (c Cards) Unmatched(cards []gpu.Card) (values []string) {
	for _, s := range c {
		if !slices.ContainsFunc(cards, s.matches) {
			values = append(values, cmp.Or(s.UUID, s.Model, "index "+strconv.Itoa(s.Index)))
		}
	}
	return values
}

func (s CardSelector) matches(card gpu.Card) bool {
	switch {
	case s.UUID != "":
		return s.UUID == card.UUID
	case s.Model != "":
		return s.Model == card.Model
	}
	return s.Index == card.Index
}
