package dispatch

import (
	"slices"
	"unique"
)

// contested are regions for which pods wait. Pods that can use more regions leave them to these pods, as long as there is room elsewhere: otherwise
// pods would be evicted there although others could run in other regions.
type contested struct {
	*regions
	// least is, for each region, how many regions a waiting pod can use that can use this one: the lowest number of any such pod.
	least []int
}

// contested returns the regions for which the pods wait that count for their tenants' demand.
func (s *standings) contested() *contested {
	c := &contested{s.regions, slices.Repeat([]int{maxRegions}, len(s.regions.Sizes))}
	for of := range s.demanded {
		usable := c.Classes[c.classes[of.constraints]]
		for _, region := range usable {
			c.least[region] = min(c.least[region], len(usable))
		}
	}
	return c
}

// last returns which nodes pods with the constraints leave to others, as Request.Last; nil if there are none.
func (c *contested) last(constraints unique.Handle[string]) func(node string) bool {
	if c == nil {
		return nil
	}
	usable := c.Classes[c.classes[constraints]]
	leave := func(region int) bool { return c.least[region] < len(usable) }
	if !slices.ContainsFunc(usable, leave) {
		return nil
	}
	return func(node string) bool {
		region, known := c.of[node]
		return known && leave(region)
	}
}
