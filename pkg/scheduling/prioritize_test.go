package scheduling

import (
	"slices"
	"testing"
	"testing/synctest"

	"github.com/gpushare/gpushare/test/fake"
)

// The fullest card that fits gets the highest score.
func TestPrioritize(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := startFilter(t, 0)
		f.addNode("empty", 100, 100)
		f.addNode("half", 100, 100)
		f.allocate("half", 0, 50)
		f.addNode("small", 10)
		scores, err := f.Prioritize(fake.Pod("p", 50), []string{"empty", "half", "small", "unknown"})
		// half: its card is left full (8 of 8), the node half full (1 of 2). empty: half of 8, a quarter of 2.
		if want := []int64{4, 9, 0, 0}; err != nil || !slices.Equal(scores, want) {
			t.Errorf("scores %v (%v), want %v", scores, err, want)
		}
	})
}

// With few candidate nodes, filter names every node that fits and the score decides. Then the node with the highest score
// is the tentative placement.
func TestPrioritizeTentative(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := startFilter(t, 32)
		f.addNode("near", 100)
		f.allocate("near", 0, 30)
		f.addNode("far", 100)
		f.allocate("far", 0, 10)
		both := []string{"near", "far"}
		prioritize := func(name string) {
			t.Helper()
			scores, err := f.Prioritize(fake.Pod(name, 60), both)
			if err != nil || scores[0] <= scores[1] {
				t.Fatalf("%s: scores %v (%v), want the first to be higher", name, scores, err)
			}
		}
		f.wantPassed(fake.Pod("first", 60), both, "near", "far")
		prioritize("first")
		f.wantPassed(fake.Pod("second", 60), both, "far") // kube-scheduler doesn't call prioritize for a single node.
		f.wantPassed(fake.Pod("third", 60), both, "near", "far")
		prioritize("third")
	})
}
