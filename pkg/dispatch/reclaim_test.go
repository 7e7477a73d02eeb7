package dispatch

import (
	"fmt"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

const after, minRuntime = 5 * time.Minute, 10 * time.Minute

// newReclaimFixture returns a fixture that reclaims, in which bob's pods of 1 fill the nodes, the lowest numbers on the first one. They
// have run for an hour, and the higher the number the younger they are.
func newReclaimFixture(t *testing.T, cards ...gpu.Memory) *fixture {
	f := newFixture(t, cards, func(o *Options) { o.ReclaimAfter, o.MinRuntime = after, minRuntime })
	n := 0
	for i, memory := range cards {
		for range memory {
			f.pod(fmt.Sprint("bob/", n), 1, on(fmt.Sprint("n", i)), func(p *Pod) { p.Bound = begin.Add(time.Duration(n)*time.Second - time.Hour) })
			n++
		}
	}
	f.tick(0)
	return f
}

// run lets time pass in steps of a second.
func (f *fixture) run(d time.Duration) {
	for range d / time.Second {
		f.tick(time.Second)
	}
}

// Bob fills the cluster, and Alice comes: exactly the excess of Bob's pods goes, and nothing more happens then.
func TestReclaim(t *testing.T) {
	f := newReclaimFixture(t, 4, 4)
	for i := range 6 {
		f.pod(fmt.Sprint("alice/", i), 1, age(i))
	}
	f.run(after)
	want(t, "before the time", []string(nil), f.evicted)
	f.run(2 * time.Second)
	want(t, "the excess, the newest first", []string{"bob/7", "bob/6", "bob/5", "bob/4"}, f.evicted)
	f.pod("bob/again", 1) // As their controller creates them.
	f.run(30 * time.Second)
	want(t, "while they end", []string(nil), f.admitted())
	f.finish()
	f.run(time.Second)
	want(t, "alice gets the room", []string{"alice/0", "alice/1", "alice/2", "alice/3"}, f.admitted())
	f.bindAll()
	f.run(time.Hour)
	want(t, "evictions", 4, len(f.evicted))
	want(t, "tenants", map[string]gpu.Memory{"alice": 4, "bob": 4}, f.allocated())
	want(t, "reclaims without success", 0, f.failed)
}
