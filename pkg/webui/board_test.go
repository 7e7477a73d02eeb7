package webui

import (
	"testing"
	"time"

	"k8s.io/klog/v2"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/scheduling"
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
func TestExplanationsTakeTheirShare(t *testing.T) {
	s := &slowSource{source: &source{ledger: ledger.New()}, clock: clocktesting.NewFakeClock(time.Unix(1_800_000_000, 0)), took: 100 * time.Millisecond}
	b := NewBoard(Options{Source: s, Clock: s.clock})
	b.enter()
	begin := s.clock.Now()
	b.tick(klog.Background())
	first, next := s.explained, begin.Add(scheduling.ExplainShare*s.took)
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
