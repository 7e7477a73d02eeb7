package allocation

import (
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// of returns the cards that have enough free cores, with the memory that is used.
func (l load) of(cards []gpu.Card, demand gpu.Demand) (out []placement.Card) {
	for _, c := range cards {
		if gpu.CardCores.Sub(l[c.Index].Cores) >= demand.Cores {
			out = append(out, placement.NewCard(c, l[c.Index].Memory))
		}
	}
	return out
}

// place returns the fullest cards that fit, ordered by index.
func place(cards []placement.Card, demand gpu.Demand) (gpu.Placement, placement.Reason) {
	var out gpu.Placement
	for range demand.Cards {
		var rest []placement.Card
		for _, c := range cards {
			taken := false
			for _, s := range out {
				taken = taken || s.Card == c.Index
			}
			if !taken {
				rest = append(rest, c)
			}
		}
		one, reason := placement.Place(placement.Expected, rest, demand.Memory)
		if reason != placement.Fits {
			return nil, reason
		}
		out = append(out, demand.On(one[0].Card)...)
	}
	return out, placement.Fits
}

func fit(cards []placement.Card, demand gpu.Demand) placement.Reason {
	_, reason := place(cards, demand)
	return reason
}
