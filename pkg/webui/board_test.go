package webui

import (
	"slices"
	"testing"
	"time"
	"unique"

	"k8s.io/klog/v2"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/scheduling"
	"github.com/gpushare/gpushare/test/await"
)

// slowSource is a source whose explanations take time.
type slowSource struct {
	*source
	clock     *clocktesting.FakeClock
	took      time.Duration
	explained int
}

func (s *slowSource) Explain() *scheduling.Explanation {
	s.clock.Step(s.took)
	s.explained++
	return s.source.Explain()
}

// An explanation that took long is read again only after many times that time, so that page and diagnosis take a small part of the time.
// TestStranded: a viewer learns which memory is of no use as soon as that changes, although the ledger's nodes are as before.
func TestStranded(t *testing.T) {
	s := start(t, nil)
	s.ledger.SetNode("n1", spec(16, 8))
	s.ledger.SetNode("n2", spec(16))
	kind := placement.Kind{Frequency: 1, Shape: placement.Shape{Demand: gpu.Demand{Cards: 1, Memory: 1}, Beside: placement.Beside{CPU: 1000}}}
	s.ledger.Expect([]placement.Kind{kind}, 0, placement.Binpack, func(unique.Handle[string]) []string { return []string{"n1", "n2"} })
	if got := s.data().Stranded; len(got) != 0 {
		t.Errorf("nothing is stranded, got %v", got)
	}
	s.ledger.SetBeside("n1", placement.Beside{CPU: 999}, placement.Beside{}, 1)
	want := []strandedView{{"n1", 24 << 10, "24 GiB free, of no use: the node lacks CPU"}}
	await.True(t, "the stranded memory", func() bool { return slices.Equal(s.data().Stranded, want) })
}

func TestExplanationsTakeTheirShare(t *testing.T) {
	s := &slowSource{source: &source{ledger: ledger.New()}, clock: clocktesting.NewFakeClock(time.Unix(1_800_000_000, 0)), took: 100 * time.Millisecond}
	b := NewBoard(Options{Source: s, Clock: s.clock})
	b.enter()
	begin := s.clock.Now()
	b.tick(klog.Background())
	first, next := s.explained, begin.Add(scheduling.ExplainPauseFactor*s.took)
	for s.clock.Step(refreshEvery); s.clock.Now().Before(next); s.clock.Step(refreshEvery) {
		b.tick(klog.Background())
		if s.explained != first {
			t.Fatalf("explained again after %v", s.clock.Since(begin))
		}
	}
	b.tick(klog.Background())
	if s.explained != first+1 {
		t.Errorf("explained %d times, want one more than %d", s.explained, first)
	}
}
