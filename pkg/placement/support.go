package placement

import (
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Support is what a node can give to pods whatever its cards have free. Each field is the reason why no pod that asks for it can be placed on
// the node; Fits if such pods can.
type Support struct {
	// SeveralCards is for pods with several cards, Cores for pods that ask for cores, SharedMemory for pods that have their own volume for
	// shared memory, and RDMA for pods whose cards must be near an adapter.
	SeveralCards, Cores, SharedMemory, RDMA reasons.Reason
	// Limits is for pods with limits above their requests.
	Limits Limits
}

// Limits are which limits above their requests a node can give to containers.
type Limits struct {
	// Refused is the reason why the node gives none; Fits if it gives some.
	Refused reasons.Reason
	// Unit is the node's unit of memory.
	Unit gpu.Unit
	// Card is the memory of the node's largest card, in bytes.
	Card uint64
}

// Accepts returns Fits if pods with this demand can be placed on the node, else the reason why not.
func (s *Support) Accepts(demand *gpu.Demand) reasons.Reason {
	switch {
	case demand.Cards > 1 && s.SeveralCards != reasons.Fits:
		return s.SeveralCards
	case demand.Cores > 0 && s.Cores != reasons.Fits:
		return s.Cores
	case demand.SharedMemory && s.SharedMemory != reasons.Fits:
		return s.SharedMemory
	case demand.RDMA == gpu.RDMARequired && s.RDMA != reasons.Fits:
		return s.RDMA
	case demand.Limits == gpu.Limits{}:
		return reasons.Fits
	case s.Limits.Refused != reasons.Fits:
		return s.Limits.Refused
	case s.Limits.Unit > gpu.Unit(demand.Limits.MaxUnit)*gpu.MiB:
		return reasons.LimitBelowRequest
	case uint64(demand.Limits.Largest) > s.Limits.Card/uint64(gpu.MiB):
		return reasons.LimitTooLarge
	}
	return reasons.Fits
}
