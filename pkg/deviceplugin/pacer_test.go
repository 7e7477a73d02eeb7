package deviceplugin

import (
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
)

func TestPacer(t *testing.T) {
	now := time.Unix(0, 0)
	p := newPacer(time.Second)
	p.backoff.Jitter = 0
	pauses := func(contents ...string) (out []time.Duration) {
		for _, content := range contents {
			pause := max(0, p.Wait(content, now))
			out = append(out, pause)
			now = now.Add(pause)
			p.Tried(now)
			p.Written(content)
		}
		return out
	}
	check := func(what string, got []time.Duration, want ...time.Duration) {
		t.Helper()
		check.Equal(t, what, want, got)
	}
	const s = time.Second
	check("new contents", pauses("a", "b", "c"), 0, s, s)
	check("a content that is undone again and again", pauses("c", "c", "c", "c", "c", "c", "c"), s, s, 2*s, 4*s, 8*s, 16*s, 30*s)
	check("a new one meanwhile", pauses("d"), s)
	if p.undone < manyUndone {
		t.Errorf("%d writes were undone", p.undone)
	}
	p.Kept(now.Add(calm*s - 1))
	check("the other writer needs its time too", pauses("d"), 30*s)
	p.Kept(now.Add(calm * s))
	check("after a calm period", pauses("d"), s)
}

// TestTwoPlugins: two plugins with different cards on one node, as when two releases have the node.
func TestTwoPlugins(t *testing.T) {
	b := newFixture(t)
	k := startKubelet(t, b.dir)
	b.start(newCards(16))
	k.awaitDevices(16, 16)
	b.start([]gpu.Card{{Index: 0, UUID: "GPU-0", Memory: 15}})
	b.awaitEvent("GPUNodeContested another program changes the inventory or the amounts of this node again and again")
}
