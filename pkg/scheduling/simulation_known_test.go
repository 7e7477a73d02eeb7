package scheduling

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

// knownDefect is a defect that worlds show. A violation of its kind isn't an error in a world with all of its ingredients.
type knownDefect struct {
	kind violationKind
	with []string
	// shows, if not nil, reports whether the violation in this world can be the defect.
	shows  func(w *world) bool
	defect string
}

// knownDefects are tried in order. What is mended is removed here.
var knownDefects = []knownDefect{
	{wasted, []string{"pods that take CPU"}, nil, "pods are evicted for pods whose CPU others take"},
	{starved, []string{"reclaim"}, endYoung, "reclaim evicts nothing for an item while a part of its cards has pods that are too young, and these always end before they are old enough"},
}

// endYoung reports whether the item needs evictions, and the pods that end are never old enough to be evicted.
func endYoung(w *world) bool {
	stays := func(p *apiPod) bool { return p.memory == 0 || p.lasts == 0 }
	return w.liveness.longest < w.fair.minRuntime && !w.fitBeside(&beside{stays, true}, w.item.pods...)
}

// known returns the known defect that a violation shows; nil if there is none.
func (w *world) known() *knownDefect {
	for i := range knownDefects {
		k := &knownDefects[i]
		lacks := func(name string) bool { return !slices.Contains(w.ingredients, name) }
		if k.kind == w.kind && !slices.ContainsFunc(k.with, lacks) && (k.shows == nil || k.shows(w)) {
			return k
		}
	}
	return nil
}

// TestStarvation runs small clusters that have more work than room, drawn from ingredients, and checks that what fits gets its turn: see
// simulation_liveness_test.go. Known defects are listed with the seeds that show them; any other violation fails.
func TestStarvation(t *testing.T) {
	total := simulate(t, 300_000, runCrowd)
	for i := range knownDefects {
		if k := &knownDefects[i]; len(total.known[k]) > 0 {
			t.Logf("known: %s: %s; %d worlds, seeds %v", k.kind, k.defect, len(total.known[k]), total.known[k])
		} else if os.Getenv("GPUSHARE_TEST_LONG") != "" {
			t.Logf("no world showed that %s: if it is mended, remove it from knownDefects", k.defect)
		}
	}
}

// describe returns what the world is made of and what happened to its evictions.
func (w *world) describe() string {
	if w.liveness == nil {
		return ""
	}
	part := ""
	if w.item != nil {
		part = w.item.part
	}
	return fmt.Sprintf(" (of %q in: %s; evictions %v)", part, strings.Join(w.ingredients, ", "), w.liveness.counts)
}
