package usage

import (
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// headroom is which part of a card's memory has to be free, if that much is promised and not used yet: pods can take it between two measurements.
const headroom = 1.0 / 16

// shortages returns by how much cards lack free memory, in bytes, by index: their free memory is less than the headroom, and less than what pods
// don't use yet of what they were promised. It has all cards of which that is known. Memory of terminating pods counts as
// free, unless they don't end soon.
func shortages(report protocol.Usage, pods OverusePods) map[int]uint64 {
	type share struct {
		pod  gpu.PodUID
		card int
	}
	used := map[share]uint64{}
	for _, row := range report.Containers {
		used[share{gpu.PodUID(row.UID), row.Card}] += row.Used
	}
	// within is what pods use of what they were promised, without terminating pods, which need no more. leaving is what those of
	// them use that end soon.
	within, leaving := map[int]uint64{}, map[int]uint64{}
	for s, bytes := range used {
		switch terminating, soon := pods.Leaving(s.pod, report.Time); {
		case soon:
			leaving[s.card] += bytes
		case !terminating:
			within[s.card] += min(bytes, pods.Held(s.pod, s.card))
		}
	}
	short := map[int]uint64{}
	for _, card := range report.Cards {
		if card.Problem != "" || card.Incomplete { // It isn't known what pods don't use yet.
			continue
		}
		memory, promised := pods.Promised(card.Index)
		free := memory - min(card.Pods+card.Host+card.MPS, memory) // The driver can report none: the card shares the machine's memory.
		if card.Free != nil {
			free = *card.Free
		}
		satisfied := within[card.Index] + pods.Ending(card.Index)
		needed := min(promised-min(satisfied, promised), uint64(float64(memory)*headroom))
		short[card.Index] = needed - min(free+leaving[card.Index], needed)
	}
	return short
}
