package deviceplugin

import (
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// pacer decides when the Node may be written. Two plugins on one node, with different configurations, undo each other's writes for ever:
// each sees the other's write at once. A new content waits for gap at most; for one that was undone the pauses grow.
type pacer struct {
	// gap is the least time between two writes, and the first pause before one that was undone is repeated. The longest is 30 times as long.
	gap time.Duration
	// at is when a write was tried last. content is what was written last.
	at      time.Time
	content string
	// undone is how many writes have repeated the one before, because something had undone it.
	undone int
	// backoff gives the pause before the next of these, which is pause.
	backoff wait.Backoff
	pause   time.Duration
}

// calm is how long a write must last until those before it no longer count, in gaps: longer than the longest pause of another plugin.
const calm = 120

// manyUndone is how many writes in a row must be undone until something else than a delay of the watch is the likely reason.
const manyUndone = 5

func newPacer(gap time.Duration) *pacer {
	p := &pacer{gap: gap}
	p.reset()
	return p
}

func (p *pacer) reset() {
	p.undone, p.pause, p.backoff = 0, p.gap, newBackoff(p.gap)
}

// Wait returns how long to wait before the content may be written; not positive if it may be written now.
func (p *pacer) Wait(content string, now time.Time) time.Duration {
	pause := p.gap
	if content == p.content {
		pause = p.pause
	}
	return p.at.Add(pause).Sub(now)
}

// Tried records that a write begins.
func (p *pacer) Tried(now time.Time) { p.at = now }

// Written records that it has succeeded.
func (p *pacer) Written(content string) {
	if content == p.content {
		p.undone++
		p.pause = p.backoff.Step()
	}
	p.content = content
}

// Kept records that the Node has what was written.
func (p *pacer) Kept(now time.Time) {
	if now.Sub(p.at) >= calm*p.gap {
		p.reset()
	}
}
