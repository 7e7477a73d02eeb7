package nodeconfig

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
)

// TestAfter: which values of a changed file take effect while pods run.
func TestAfter(t *testing.T) {
	parse := func(text string) Settings {
		s, err := Decode([]byte(header + text))
		check.Must(t, err)
		return s
	}
	for name, test := range map[string]struct {
		before, after string
		pods          bool
		// want is what is in force then, and changes are the keys that took effect.
		want    string
		changes string
		waits   string
	}{
		"the isolation mode, pods":    {"", "isolation: driver", true, "isolation: driver", "isolation", ""},
		"nothing changes":             {"memoryUnit: MiB", "memoryUnit: MiB", true, "memoryUnit: MiB", "", ""},
		"the unit, no pods":           {"memoryUnit: GiB", "memoryUnit: MiB", false, "memoryUnit: MiB", "memoryUnit", ""},
		"the unit, a pod":             {"memoryUnit: GiB", "memoryUnit: MiB", true, "memoryUnit: GiB", "", "the new memoryUnit MiB takes effect once no pod on the node asks for GPU memory, until then it is GiB"},
		"the unit is no longer given": {"memoryUnit: MiB", "", true, "memoryUnit: MiB", "", "the new memoryUnit GiB takes effect once no pod on the node asks for GPU memory, until then it is MiB"},
		"a card, pods":                {"", "excludedCards: [{index: 1}]", true, "excludedCards: [{index: 1}]", "excludedCards", ""},
		"a card comes back, pods":     {"excludedCards: [{index: 1}]", "", true, "", "excludedCards", ""},
		"card memory, pods":           {"cardMemory: {all: 96Gi}", "cardMemory: {all: 48Gi}", true, "cardMemory: {all: 48Gi}", "cardMemory", ""},
		"Xids, pods":                  {"", "healthChecks: {disabledXids: [48]}", true, "healthChecks: {disabledXids: [48]}", "healthChecks", ""},
		"the quiet period, pods":      {"", "healthChecks: {quietPeriod: 1m}", true, "healthChecks: {quietPeriod: 1m}", "healthChecks", ""},
		"all but the unit, a pod": {
			"memoryUnit: GiB", "memoryUnit: MiB\nexcludedCards: [{model: T4}]\nhealthChecks: {quietPeriod: 1m}", true,
			"memoryUnit: GiB\nexcludedCards: [{model: T4}]\nhealthChecks: {quietPeriod: 1m}", "excludedCards, healthChecks",
			"the new memoryUnit MiB takes effect once no pod on the node asks for GPU memory, until then it is GiB",
		},
	} {
		t.Run(name, func(t *testing.T) {
			before := parse(test.before)
			got, waits := parse(test.after).ApplicableNow(before, test.pods)
			if diff := cmp.Diff(parse(test.want), got, exported); diff != "" || waits != test.waits {
				t.Errorf("waits: %s\nin force (-want +got)\n%s", waits, diff)
			}
			if changes := strings.Join(got.Changes(before), ", "); changes != test.changes {
				t.Errorf("changed: %q, want %q", changes, test.changes)
			}
		})
	}
}

func TestCardsHas(t *testing.T) {
	first := gpu.Card{Index: 0, UUID: "GPU-a", Model: "NVIDIA T1000"}
	unnamed := gpu.Card{Index: 1}
	for name, test := range map[string]struct {
		cards          Cards
		first, unnamed bool
		unmatched      []string
	}{
		"none":             {nil, false, false, nil},
		"index 0":          {Cards{{Index: 0}}, true, false, nil},
		"index 1":          {Cards{{Index: 1}}, false, true, nil},
		"another index":    {Cards{{Index: 2}}, false, false, []string{"index 2"}},
		"by UUID":          {Cards{{UUID: "GPU-a"}}, true, false, nil},
		"another UUID":     {Cards{{UUID: "GPU-b"}}, false, false, []string{"GPU-b"}},
		"by model":         {Cards{{Model: "NVIDIA T1000"}}, true, false, nil},
		"a model's prefix": {Cards{{Model: "NVIDIA"}}, false, false, []string{"NVIDIA"}},
		"any of several":   {Cards{{UUID: "GPU-b"}, {Index: 1}, {UUID: "GPU-a"}}, true, true, []string{"GPU-b"}},
	} {
		check.Equal(t, name, test.unmatched, test.cards.Unmatched([]gpu.Card{first, unnamed}))
		if got := [2]bool{test.cards.Has(first), test.cards.Has(unnamed)}; got != [2]bool{test.first, test.unnamed} {
			t.Errorf("%s: got %v", name, got)
		}
	}
}
