package scheduling

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

// knownDefect is a defect that worlds show. A violation of its kind isn't an error in a world with all of its ingredients, if the item is of the
// ingredient.
type knownDefect struct {
	kind violationKind
	// of is the ingredient to which the item belongs; empty for any.
	of   string
	with []string
	// shows, if not nil, reports whether the violation in this world can be the defect.
	shows  func(w *world) bool
	defect string
}

// knownDefects are tried in order. What is mended is removed here.
var knownDefects = []knownDefect{
	{wasted, "pods that can't be bound", nil, nil, "pods are evicted for pods that can't be bound"},
	{wasted, "a broken job", nil, nil, "pods are evicted for a group of which a member is never scheduled"},
	{wasted, "", []string{"pods that take CPU"}, nil, "pods are evicted for pods whose CPU others take"},
	{wasted, "", []string{"reclaim"}, grouped, "pods are evicted for a group that then doesn't get their memory"},
	{wasted, "", []string{"reclaim", "a LeaderWorkerSet of several replicas"}, nil, "pods are evicted for a pod whose memory a group of its tenant then takes"},
	{starved, "", nil, replacement, "without fair sharing, the replacement of a member waits behind everything else"},
}

// replacement reports whether the item that starves was whole before, in a world without fair sharing.
func replacement(w *world) bool { return w.item.ran && !w.fair.on() }

// grouped reports whether the item that starves is a group.
func grouped(w *world) bool { return w.item.job != nil }

// known returns the known defect that a violation shows; nil if there is none.
func (w *world) known() *knownDefect {
	for i := range knownDefects {
		k := &knownDefects[i]
		lacks := func(name string) bool { return !slices.Contains(w.ingredients, name) }
		of := w.kind != unsafe && (k.of == "" || k.of == w.item.part)
		if k.kind == w.kind && of && !slices.ContainsFunc(k.with, lacks) && (k.shows == nil || k.shows(w)) {
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
