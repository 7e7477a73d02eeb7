package usage

import (
	"github.com/gpushare/gpushare/pkg/protocol"
)

// headroom is which part of a card's memory has to be free, if that much is promised and not used yet: pods can take it between two measurements.
const headroom = 1.0 / 16

// shortages returns by how much cards lack free memory, in bytes, by index: their free memory is less than the headroom, and less than what pods
// don't use yet of what they were promised. It has all cards of which that is known. Memory of terminating pods counts as
// free, unless they don't end soon.
func shortages(report protocol.Usage, uses map[podCard]use, known Known) map[int]uint64 {
	// satisfied is what pods use of what they were promised, and what was promised to terminating pods, which need no more. leaving is what those
	// of them use that end soon.
	satisfied, leaving := map[int]uint64{}, map[int]uint64{}
	for s, use := range uses {
		switch pod := known.Pods[s.pod]; {
		case pod.EndsSoon:
			leaving[s.card] += use.used
		case !pod.Leaving:
			satisfied[s.card] += min(use.used, pod.Held[s.card])
		}
	}
	for _, pod := range known.Pods {
		if pod.Leaving { // Also if none of its containers runs.
			for card, held := range pod.Held {
				satisfied[card] += held
			}
		}
	}
	short := map[int]uint64{}
	for _, card := range report.Cards {
		if card.Problem != "" || card.Incomplete { // It isn't known what pods don't use yet.
			continue
		}
		memory, promised := known.Cards[card.Index].Memory, known.Cards[card.Index].Promised
		free := memory - min(card.Pods+card.Host+card.MPS, memory) // The driver can report none: the card shares the machine's memory.
		if card.Free != nil {
			free = *card.Free
		}
		needed := min(promised-min(satisfied[card.Index], promised), uint64(float64(memory)*headroom))
		short[card.Index] = needed - min(free+leaving[card.Index], needed)
	}
	return short
}
