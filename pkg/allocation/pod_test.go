package allocation

import (
	"math"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// TestAllowed: what a container that requests 2 GiB may use of each of its cards.
func TestAllowed(t *testing.T) {
	const gib = 1 << 30
	for name, test := range map[string]struct {
		limit uint64
		// cards is the memory of its cards, in GiB.
		cards []gpu.Memory
		unit  gpu.Unit
		want  uint64
	}{
		"no limit":                          {0, []gpu.Memory{16}, gpu.GiB, 2 * gib},
		"no card":                           {8 * gib, nil, gpu.GiB, 2 * gib},
		"a limit":                           {8 * gib, []gpu.Memory{16}, gpu.GiB, 8 * gib},
		"a limit below the request":         {gib, []gpu.Memory{16}, gpu.GiB, 2 * gib},
		"a byte more than the request":      {2*gib + 1, []gpu.Memory{16}, gpu.GiB, 2*gib + limitStep},
		"a step":                            {2*gib + limitStep, []gpu.Memory{16}, gpu.GiB, 2*gib + limitStep},
		"over two cards, of different size": {14 * gib, []gpu.Memory{16, 6}, gpu.GiB, 6 * gib},
		"all of a card that isn't a whole number of steps": {1 << 40, []gpu.Memory{16}, 1000 * gpu.MiB, 16000 << 20},
		"as much as can be annotated":                      {math.MaxInt64, []gpu.Memory{math.MaxInt64 >> 30}, gpu.GiB, math.MaxInt64 >> 30 << 30},
		"a card that has become smaller than the request":  {8 * gib, []gpu.Memory{1}, gpu.GiB, 2 * gib},
	} {
		var cards []gpu.Card
		for i, memory := range test.cards {
			cards = append(cards, gpu.Card{Index: i, Memory: memory})
		}
		request := gpu.Memory(2 * max(len(cards), 1))
		if test.unit != gpu.GiB {
			request = 1
		}
		if got := (Container{Request: request, Limit: test.limit}).Allowed(cards, test.unit); got != test.want {
			t.Errorf("%s: %d, want %d", name, got, test.want)
		}
	}
}
