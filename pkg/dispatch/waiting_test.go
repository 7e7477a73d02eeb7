package dispatch

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/queue"
)

// reserver makes the awaited reservations of a fixture.
func (f *fixture) reserver() *queue.Reserver {
	return queue.NewReserver(queue.Options{Ledger: f.ledger, MaxIdle: 0.02, MaxAge: time.Hour, Failures: &queue.Failures{}, Reserved: func() {}})
}

// A tenant's pods of a minute don't keep another tenant's larger pod from its share. Without reservations they do.
func TestLargePodGetsShare(t *testing.T) {
	run := func(reserves bool) (waited int) {
		f := newFixture(t, []gpu.Memory{4, 4}, nil)
		reserver := f.reserver()
		ends, next := map[string]time.Time{}, 0
		for ; waited < 1800; waited++ {
			for name, end := range ends {
				if !f.now.Before(end) {
					delete(ends, name)
					f.delete(name)
				}
			}
			for i := next; i < next+4; i++ {
				f.pod(fmt.Sprint("alice/small-", i), 1, age(i))
			}
			if f.tick(time.Second); waited == 60 {
				f.pod("bob/large", 4, age(60))
			}
			for slices.Contains(f.admitted(), fmt.Sprint("alice/small-", next)) {
				name := fmt.Sprint("alice/small-", next)
				f.bind(name)
				ends[name] = f.now.Add(time.Duration(60+7*next%31) * time.Second)
				next++
			}
			if slices.Contains(f.admitted(), "bob/large") {
				return waited - 60
			}
			if reserves {
				reserver.Pass(f.Waiting(), f.now)
			}
		}
		return waited
	}
	if waited := run(true); waited > 120 {
		t.Errorf("the large pod waits for %d s", waited)
	}
	if waited := run(false); waited < 1800 {
		t.Errorf("without reservations it waits for %d s: the test shows nothing", waited)
	}
}

// A reservation counts for tenants whose turn comes after that of its item, and not for those whose turn comes before.
func TestReservationAndTurns(t *testing.T) {
	f := newFixture(t, []gpu.Memory{4}, nil)
	reserver := f.reserver()
	f.pod("alice/runs", 1)
	f.tick(0)
	f.bind("alice/runs")
	f.pod("bob/large", 4, age(-2))
	f.tick(time.Second)
	reserver.Pass(f.Waiting(), f.now)
	f.pod("alice/next", 1, age(2)) // alice has more than bob, which has nothing.
	f.tick(time.Second)
	want(t, "behind the turn of the reservation", nil, f.admitted())
	f.SetNamespace("aaron", Namespace{Tenant: "aaron", Terms: fairshare.DefaultTerms})
	f.pod("aaron/small", 1, age(0)) // Of tenants that have nothing, the first by name comes first: before bob.
	f.tick(queue.Retry)             // Its kind had no room for alice.
	want(t, "before the turn of the reservation", []string{"aaron/small"}, f.admitted())
}

// Of a tenant's items that wait, those of higher priority come first, whatever their age.
func TestWaitingOrder(t *testing.T) {
	f := newFixture(t, []gpu.Memory{4}, nil)
	f.pod("alice/runs", 4)
	f.tick(0)
	f.bind("alice/runs")
	f.pod("bob/early", 3, age(-9))
	f.pod("bob/urgent", 4, age(-1), priority(5))
	f.tick(time.Second)
	turns := map[string]int{}
	for _, next := range f.Waiting() {
		turns[next.Label] = next.Turn
	}
	want(t, "the order", map[string]int{"pod bob/urgent": 1, "pod bob/early": 2}, turns)
}
