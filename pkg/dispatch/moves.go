package dispatch

import (
	"slices"
	"unique"

	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reclaim"
)

// findMoves computes which pods must move to other regions so that each tenant can have its share. For example, the pods of one tenant can
// use only one region, which is full with pods of a tenant that can have its share elsewhere. findMoves sets Losses, Gains and Moves of the
// standings, and the Spots of the candidates. It returns the region of each node, and the regions of each class. If all pods can use the same
// nodes, there is nothing to move, and the results are nil.
func (s *Search) findMoves(standings map[string]reclaim.Standing, candidates []candidate) (of map[string]int, classes [][]int) {
	r := s.regions
	if len(r.Sizes) < 2 {
		return nil, nil
	}
	x := &moves{Search: s, sizes: slices.Clone(r.Sizes), holdings: map[holder]*fairshare.Holding{}, position: map[string]int{}, fits: map[fit]bool{}}
	for i, t := range s.tenants {
		x.position[t.Name], x.limits = i, append(x.limits, t.Share)
	}
	movable := map[*allocatedPod]bool{}
	for i := range candidates {
		c := &candidates[i]
		c.Spots = x.spots(c.pods)
		for j, spot := range c.Spots {
			p := c.pods[j]
			h := x.holding(holder{x.position[p.countedFor], spot.Class})
			h.Demand += p.counted
			h.Has[spot.Region] += p.counted
			movable[p] = true
		}
	}
	x.pinOthers(movable)
	for of, amount := range s.demanded {
		if class := r.classes[of.constraints]; class != allNodes { // Otherwise it isn't known which regions the pods can use.
			h := x.holding(holder{of.tenant, class})
			h.Demand = h.Demand.Add(amount)
		}
	}
	x.assign(standings)
	for i := range candidates {
		if c := &candidates[i]; c.Spots != nil && !x.fitsElsewhere(c, standings[c.Tenant]) {
			c.Spots = nil
		}
	}
	return r.of, r.Classes
}

// moves is the state of findMoves.
type moves struct {
	*Search
	// position is the position of each tenant in tenants. limits are the tenants' shares and sizes the sizes of the regions, both without
	// the memory that can't move.
	position map[string]int
	limits   []gpu.Memory
	sizes    []gpu.Memory
	holdings map[holder]*fairshare.Holding
	// fits are the results of fitsElsewhere for single pods.
	fits map[fit]bool
}

// fit identifies a result of fitsElsewhere.
type fit struct {
	tenant      string
	constraints unique.Handle[string]
	demand      gpu.Demand
}

// holder identifies the pods of a tenant that belong to one class.
type holder struct{ tenant, class int }

func (x *moves) holding(key holder) *fairshare.Holding {
	h := x.holdings[key]
	if h == nil {
		h = &fairshare.Holding{Tenant: key.tenant, Class: key.class, Has: make([]gpu.Memory, len(x.sizes))}
		x.holdings[key] = h
	}
	return h
}

// fitsElsewhere reports whether each pod of the candidate would fit an empty node in a region where its tenant is to get more memory.
// Assign doesn't ensure this: it knows the memory of regions, but not the sizes of cards. A pod needs no check where its tenant loses nothing.
func (x *moves) fitsElsewhere(c *candidate, s reclaim.Standing) bool {
	for i, p := range c.pods {
		if s.Losses[c.Spots[i]] == 0 {
			continue
		}
		key := fit{c.Tenant, p.Constraints, p.Demand()}
		fits, known := x.fits[key]
		if !known {
			fits = x.fitsWhere(p, s.Gains)
			x.fits[key] = fits
		}
		if !fits {
			return false
		}
	}
	return true
}

// fitsWhere reports whether the pod would fit an empty node in a region that it can use, and where its tenant gains memory.
func (x *moves) fitsWhere(p *allocatedPod, gains map[int]gpu.Memory) bool {
	class := x.regions.classes[p.Constraints]
	for name, region := range x.regions.of {
		if gains[region] > 0 && x.regions.usable(class, region) && x.ledger.FitsEmpty([]ledger.Request{{Pod: p.Pod.Pod, Nodes: []string{name}}}, nil) {
			return true
		}
	}
	return false
}

// spots returns the spots of bound pods. It returns nil if one of them is on a node that it couldn't use now, or if it isn't known which
// regions one of them can use.
func (x *moves) spots(pods []*allocatedPod) []reclaim.Spot {
	spots := make([]reclaim.Spot, len(pods))
	for i, p := range pods {
		region, known := x.regions.of[p.Node]
		spots[i] = reclaim.Spot{Region: region, Class: x.regions.classes[p.Constraints]}
		if !known || spots[i].Class == allNodes || !x.regions.usable(spots[i].Class, region) {
			return nil
		}
	}
	return spots
}

// pinOthers subtracts the memory that can't move from sizes and limits: that of pods that must not be evicted, of granted pods with a place,
// and of pods without a tenant. Pods that are being deleted don't count.
func (x *moves) pinOthers(movable map[*allocatedPod]bool) {
	for _, p := range x.allocated {
		node := p.Node
		if node == "" {
			node, _, _ = x.ledger.Lookup(p.UID)
		}
		if node == "" || p.Leaving || movable[p] {
			continue
		}
		if region, known := x.regions.of[node]; known {
			x.sizes[region] = x.sizes[region].Sub(p.Request)
		}
		if p.counted > 0 {
			i := x.position[p.countedFor]
			x.limits[i] = x.limits[i].Sub(p.counted)
		}
	}
}

// assign divides the regions, and sets Losses, Gains and Moves of the standings.
func (x *moves) assign(standings map[string]reclaim.Standing) {
	var holdings []fairshare.Holding
	for i := range x.tenants {
		for class := range x.regions.Classes {
			if h := x.holdings[holder{i, class}]; h != nil {
				holdings = append(holdings, *h)
			}
		}
	}
	pools := fairshare.Pools{Sizes: x.sizes, Classes: x.regions.Classes}
	for i, assigned := range pools.Assign(x.limits, holdings) {
		h, name := holdings[i], x.tenants[holdings[i].Tenant].Name
		s := standings[name]
		if s.Losses == nil {
			s.Losses, s.Gains = map[reclaim.Spot]gpu.Memory{}, map[int]gpu.Memory{}
			standings[name] = s
		}
		for region, amount := range assigned {
			s.Gains[region] += amount.Sub(h.Has[region])
			s.Losses[reclaim.Spot{Region: region, Class: h.Class}] = h.Has[region].Sub(amount)
		}
	}
	for name, s := range standings {
		s.Moves = min(sum(s.Losses), sum(s.Gains))
		standings[name] = s
	}
}

// sum returns the sum of the amounts.
func sum[K comparable](amounts map[K]gpu.Memory) (sum gpu.Memory) {
	for _, amount := range amounts {
		sum = sum.Add(amount)
	}
	return sum
}
