package scheduling

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpushare/gpushare/test/fake"
)

// All readers get the same explanation until the next one may be made.
func TestExplainShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, Options{}, fake.Pod("p", 1), fake.Pod("q", 0))
		first := f.Explain()
		if len(first.Pending) != 1 || len(first.Diagnoses) != 1 || len(first.RequestProblems) != 1 || !first.At.Equal(begin) {
			t.Errorf("%+v", first)
		}
		f.clock.Step(minCostly - 1)
		if f.Explain() != first {
			t.Error("another explanation within a second")
		}
		f.clock.Step(1)
		if f.Explain() == first {
			t.Error("no other explanation after a second")
		}
	})
}

func TestExplainPause(t *testing.T) {
	for took, want := range map[time.Duration]time.Duration{0: time.Second, 20 * time.Millisecond: time.Second, time.Second: 50 * time.Second} {
		if got := ExplainPause(took); got != want {
			t.Errorf("%v after an explanation that took %v, want %v", got, took, want)
		}
	}
}
