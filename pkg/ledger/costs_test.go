package ledger_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// TestRankKeptCosts changes nodes of many sorts at random. Rank returns the same with the costs that are kept as with new ones, and the
// reasons of ForEachFit.
func TestRankKeptCosts(t *testing.T) {
	odd := spec(16, 16)
	odd.Support = placement.Support{Cores: reasons.OldForCores, SeveralCards: reasons.OldForCards, SharedMemory: reasons.NoOwnSharedMemory}
	specs := []ledger.NodeSpec{
		spec(16, 16), spec(16, 32, 8), spec(8), unhealthy(0, spec(16, 16, 12)), unhealthy(0, spec(32)), limited(spec(48), 1), wholeCards(spec(16)), spec(), odd,
	}
	fitting := 0
	for seed := range uint64(60) {
		s := newCostScene(t, seed)
		for range 80 {
			s.changeAny(specs[s.random.IntN(len(specs))])
			for range 3 {
				p := s.asking()
				view := ledger.View{Card: placement.Binpack, Node: placement.LeastWaste}
				if s.random.IntN(2) == 0 {
					view.TentativeAt = at
				}
				got, results, _ := s.Rank(view, p, s.names)
				s.ForgetCosts()
				want, wantResults, _ := s.Rank(view, p, s.names)
				expect(t, fmt.Sprint("seed ", seed, ", ", p), want, got)
				expect(t, fmt.Sprint("seed ", seed, ", reasons for ", p), wantResults, results)
				for i, reason := range s.check(p, s.names...) {
					if reason == reasons.Fits {
						fitting++
					}
					if view.TentativeAt.IsZero() && reason != results[i] {
						t.Errorf("seed %d, %v: ForEachFit %v, Rank %v for %s", seed, p, reason, results[i], s.names[i])
					}
				}
				if t.Failed() {
					return
				}
			}
		}
	}
	if fitting < 10_000 {
		t.Errorf("only %d nodes had room", fitting)
	}
}

// asking returns a pod without an allocation, mostly of one of the outlook's kinds.
func (s *costScene) asking() gpu.Pod {
	p := pod("asking", gpu.Memory(1+s.random.IntN(16)), int32(s.random.IntN(3)))
	delete(s.shapes, p.UID)
	if len(s.kinds) > 0 && s.random.IntN(4) > 0 {
		kind := s.kinds[s.random.IntN(len(s.kinds))].Shape
		p.Request, p.Cards, s.shapes[p.UID] = kind.Memory*gpu.Memory(kind.Cards), kind.Cards, kind
	}
	switch s.random.IntN(12) {
	case 0:
		p.SharedMemory = true
	case 1:
		p.Cores = 50
	case 2:
		p.RDMA = gpu.RDMAPreferred
	}
	return p
}

// changeAny is change, and changes besides what change doesn't.
func (s *costScene) changeAny(spec ledger.NodeSpec) {
	name, p, other := s.names[s.random.IntN(len(s.names))], s.newPod(), s.pods[s.random.IntN(len(s.pods))]
	switch s.random.IntN(20) {
	case 0, 1, 2:
		s.SetNode(name, spec)
	case 3:
		s.DeleteNode(name)
	case 4, 5:
		s.AddTentative(p, []string{name, s.names[0]}, at.Add(-ledger.TentativeLifetime*time.Duration(s.random.IntN(2))))
	case 6:
		_, _ = s.Reserve(name, p, placement.Binpack, at)
		s.SetSource(ledger.Planned, other.UID)
	case 7:
		s.ResetSource(ledger.Planned, other.UID)
		s.Release(other.UID)
	case 8:
		s.ReserveAwaited(testItem, []ledger.Request{{Pod: p, Nodes: s.names}}, longAgo)
	case 9:
		s.AddReservation(string(p.UID), ledger.Reservation{Source: ledger.Reclaimed, Priority: 1, Places: []ledger.Place{{Pod: p, Node: name, On: gpu.On(0, p.Request)}}})
	case 10:
		p.Cores, p.Containers = gpu.Cores(s.random.IntN(100)), 2
		s.SetBound(name, p, nil, at)
	case 11, 12, 13, 14:
		s.End(ledger.Queued, testItem.ID)
		for _, of := range s.pods {
			s.End(ledger.Reclaimed, string(of.UID))
			s.End(ledger.Nominated, string(of.UID))
		}
	default:
		s.change()
	}
}
