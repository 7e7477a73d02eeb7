package reclaim

import "github.com/gpushare/gpushare/pkg/gpu"

// Spot is the region of a pod's node, with the class of the pod, which determines the regions that it can use.
type Spot struct {
	// Region is the number of a set of nodes that the same pods can use. Class is equal for pods that can use the same regions.
	Region, Class int
}

// Tally adds up the memory of victims, by tenant and by spot.
type Tally struct {
	tenants map[string]Standing
	total   map[string]gpu.Memory
	spots   map[tenantSpot]gpu.Memory
}

type tenantSpot struct {
	tenant string
	Spot
}

// NewTally returns a Tally without victims.
func NewTally(tenants map[string]Standing) *Tally {
	return &Tally{tenants, map[string]gpu.Memory{}, map[tenantSpot]gpu.Memory{}}
}

// WithinExcess reports whether the victim's tenant still has its share if this victim is evicted too.
func (t *Tally) WithinExcess(v *Victim) bool {
	return t.total[v.Tenant].Add(v.Memory()) <= t.tenants[v.Tenant].Excess
}

// CanMove reports whether the victim's tenant could have its share, partly in other regions, if this victim is evicted too.
func (t *Tally) CanMove(v *Victim) bool {
	s := t.tenants[v.Tenant]
	if len(v.Spots) == 0 || t.total[v.Tenant].Add(v.Memory()) > s.Excess.Add(s.Moves) {
		return false
	}
	t.count(v, 1)
	defer t.count(v, -1)
	for _, spot := range v.Spots {
		if t.spots[tenantSpot{v.Tenant, spot}] > s.Losses[spot] {
			return false
		}
	}
	return true
}

// Add counts a victim.
func (t *Tally) Add(v *Victim) { t.count(v, 1) }

// count adds the victim, times sign.
func (t *Tally) count(v *Victim, sign gpu.Memory) {
	t.total[v.Tenant] += sign * v.Memory()
	for i, spot := range v.Spots {
		t.spots[tenantSpot{v.Tenant, spot}] += sign * v.Pods[i].Request
	}
}
