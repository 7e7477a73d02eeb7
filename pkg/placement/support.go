package placement

import (
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Support is what a node can give to pods whatever its cards have free. Each field is the reason why no pod that asks for it can be placed on
// the node; Fits if such pods can.
type Support struct {
	// SeveralCards is for pods with several cards, Cores for pods that ask for cores, and SharedMemory for pods that have their own volume for
	// shared memory.
	SeveralCards, Cores, SharedMemory reasons.Reason
}

// Accepts returns Fits if pods with this demand can be placed on the node, else the reason why not.
func (s *Support) Accepts(demand *gpu.Demand) reasons.Reason {
	switch {
	case demand.Cards > 1 && s.SeveralCards != reasons.Fits:
		return s.SeveralCards
	case demand.Cores > 0 && s.Cores != reasons.Fits:
		return s.Cores
	case demand.SharedMemory:
		return s.SharedMemory
	}
	return reasons.Fits
}

// MoreThan reports whether the node accepts pods that it didn't accept before.
func (s *Support) MoreThan(before Support) bool {
	more := func(now, before reasons.Reason) bool { return now == reasons.Fits && before != reasons.Fits }
	return more(s.SeveralCards, before.SeveralCards) || more(s.Cores, before.Cores) || more(s.SharedMemory, before.SharedMemory)
}
