package scheduling

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

// knownDefect is a defect that worlds show. A violation of its kind in a world with all of its ingredients isn't an error.
type knownDefect struct {
	kind        violationKind
	ingredients []string
	// shows, if not nil, reports whether the violation in this world can be the defect.
	shows  func(w *world) bool
	defect string
}

// knownDefects are tried in order. What is mended is removed here.
var knownDefects = []knownDefect{
	{inPart, []string{"two jobs of one group name"}, nil, "two Jobs with the same group name hold cards, and neither is whole"},
	{inPart, []string{"a LeaderWorkerSet of several replicas"}, nil, "two replicas of one template hold cards, and neither is whole"},
	{inPart, []string{"leaders die"}, nil, "a leader dies between the evictions of a group, and half of it stays"},
	{wasted, []string{"pods that can't be bound"}, nil, "pods are evicted for pods that can't be bound"},
	{wasted, []string{"pods that take CPU"}, nil, "pods are evicted for pods whose CPU others take"},
	{starved, []string{"a LeaderWorkerSet of several replicas"}, ofKind("LeaderWorkerSet"), "a replica of a LeaderWorkerSet that restarts doesn't come back"},
	{starved, []string{"a Deployment of a group that is rolled"}, ofKind("Deployment"), "the rollout of a Deployment stops"},
	{starved, nil, replacement, "the replacement of a member waits behind everything else"},
	{starved, []string{"an autoscaled pool"}, nil, "with fair sharing a pool doesn't scale up from zero, nor for a group"},
	{starved, []string{"reclaim", "a long grace period"}, nil, "pods with a long grace period can't be reclaimed"},
	{starved, []string{"reclaim", "one group of number 1"}, nil, "pods in one group of number 1 can't be reclaimed"},
	{starved, []string{"reclaim", "a tiny pod now and then"}, nil, "a tiny pod restarts a tenant's time below its share"},
	{starved, []string{"a broken job"}, ofGroup(sharing), "one tenant's broken job keeps the groups of others waiting"},
	{starved, []string{"stream of pods"}, ofPod(sharing), "small pods keep a tenant's larger pod from its share"},
	{starved, []string{"stream of small groups"}, ofPod(sharing), "small groups keep a tenant's larger pod from its share"},
	{starved, []string{"stream of pods"}, ofGroup(sharing), "small pods keep a tenant's group from its share"},
	{starved, []string{"stream of small groups"}, ofGroup(sharing), "small groups keep a tenant's larger group from its share"},
	{starved, []string{"stream of small groups"}, ofGroup(nil), "small groups starve a larger group"},
	{starved, []string{"stream of pods"}, ofGroup(nil), "pods that run for longer than a starvation reservation starve a group"},
	{starved, nil, ofPod(nil), "small pods starve a larger pod"},
}

// replacement reports whether the item that starves was whole before.
func replacement(w *world) bool { return w.item.ran }

// ofPod reports whether a pod outside groups starves, in such a world.
func ofPod(also func(*world) bool) func(w *world) bool {
	return func(w *world) bool { return w.item.job == nil && (also == nil || also(w)) }
}

// ofGroup reports whether a group starves, in such a world.
func ofGroup(also func(*world) bool) func(w *world) bool {
	return func(w *world) bool { return w.item.job != nil && (also == nil || also(w)) }
}

// ofKind reports whether a pod of such a controller starves.
func ofKind(kind string) func(w *world) bool {
	return func(w *world) bool {
		switch w.item.pods[0].job.controller.(type) {
		case *leaderWorkerSet:
			return kind == "LeaderWorkerSet"
		case *deployment:
			return kind == "Deployment"
		}
		return false
	}
}

// known returns the known defect that a violation shows; nil if there is none.
func (w *world) known() *knownDefect {
	for i := range knownDefects {
		k := &knownDefects[i]
		lacks := func(name string) bool { return !slices.Contains(w.ingredients, name) }
		if k.kind == w.kind && w.kind != unsafe && !slices.ContainsFunc(k.ingredients, lacks) && (k.shows == nil || k.shows(w)) {
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
			t.Errorf("no world shows that %s: remove it from knownDefects, or run more worlds", k.defect)
		}
	}
}

// describe returns what the world is made of and what happened to its evictions.
func (w *world) describe() string {
	if w.liveness == nil {
		return ""
	}
	return fmt.Sprintf(" (%s; evictions %v)", strings.Join(w.ingredients, ", "), w.liveness.counts)
}
