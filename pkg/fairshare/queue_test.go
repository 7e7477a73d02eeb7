package fairshare

import (
	"cmp"
	"fmt"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

var begin = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)

// item returns an item whose ID begins with its tenant's name.
func item(id string, memory gpu.Memory, priority int32, age int) Item {
	name, _, _ := strings.Cut(id, "/")
	return Item{
		Item:   ledger.Item{ID: id, Priority: priority, Entered: begin.Add(time.Duration(age) * time.Second)},
		Tenant: name, Memory: memory,
	}
}

// grant grants what fits into the room, and returns the IDs in their order and the room that is left.
func grant(q *Queue, room gpu.Memory) (granted []string, left gpu.Memory) {
	q.Round(func(next Item) Outcome {
		if next.Memory > room {
			return Passed
		}
		room -= next.Memory
		granted = append(granted, next.ID)
		return Granted
	})
	return granted, room
}

func TestQueue(t *testing.T) {
	for name, test := range map[string]struct {
		terms  map[string]Terms
		has    map[string]gpu.Memory
		items  []Item
		room   gpu.Memory
		want   []string
		queued int
	}{
		"tenants alternate, whatever their priorities": {
			items: []Item{item("bob/1", 1, 9, 0), item("bob/2", 1, 9, 0), item("bob/3", 1, 9, 0), item("alice/1", 1, 0, 5), item("alice/2", 1, 0, 5)},
			room:  4, want: []string{"alice/1", "bob/1", "alice/2", "bob/2"}, queued: 1,
		},
		"a tenant's own pods by priority, then age, then name": {
			items: []Item{item("bob/d", 1, 0, 0), item("bob/b", 1, 1, 2), item("bob/c", 1, 1, 2), item("bob/a", 1, 1, 3), item("bob/e", 1, 2, 9)},
			room:  9, want: []string{"bob/e", "bob/b", "bob/c", "bob/a", "bob/d"},
		},
		"by weight": {
			terms: map[string]Terms{"alice": {Weight: 2}},
			items: []Item{item("alice/1", 1, 0, 0), item("alice/2", 1, 0, 0), item("alice/3", 1, 0, 0), item("bob/1", 1, 0, 0), item("bob/2", 1, 0, 0)},
			room:  5, want: []string{"alice/1", "bob/1", "alice/2", "bob/2", "alice/3"},
		},
		"the guaranteed amount comes first": {
			terms: map[string]Terms{"bob": {Weight: 1, Guaranteed: 2}},
			items: []Item{item("alice/1", 1, 0, 0), item("bob/1", 1, 0, 0), item("bob/2", 1, 0, 0), item("bob/3", 1, 0, 0)},
			room:  4, want: []string{"bob/1", "bob/2", "alice/1", "bob/3"},
		},
		"what tenants have counts": {
			has:   map[string]gpu.Memory{"alice": 3},
			items: []Item{item("alice/1", 1, 0, 0), item("bob/1", 2, 0, 0), item("bob/2", 2, 0, 0), item("bob/3", 2, 0, 0)},
			room:  5, want: []string{"bob/1", "bob/2", "alice/1"}, queued: 1,
		},
		"what doesn't fit is passed over, and blocks nothing": {
			items: []Item{item("alice/1", 9, 0, 0), item("alice/2", 1, 0, 1), item("bob/1", 2, 0, 0)},
			room:  3, want: []string{"alice/2", "bob/1"}, queued: 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			var q Queue
			for name, terms := range test.terms {
				q.SetTerms(name, terms)
			}
			for name, amount := range test.has {
				q.Charge(name, amount)
			}
			for _, item := range test.items {
				q.Add(item)
			}
			got, _ := grant(&q, test.room)
			if diff := gocmp.Diff(test.want, got); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
			queued := 0
			for _, tenant := range q.Tenants() {
				queued += len(tenant.Waiting)
			}
			if queued != test.queued {
				t.Errorf("%d items are left, want %d", queued, test.queued)
			}
		})
	}
}

// With one slot and many tenants, the turn goes round: it must not always be that of the first name.
func TestQueueTurns(t *testing.T) {
	var q Queue
	for _, name := range []string{"a", "b", "c"} {
		for i := range 9 {
			q.Add(item(fmt.Sprintf("%s/%d", name, i), 1, 0, i))
		}
	}
	var turns []string
	for range 6 {
		granted, _ := grant(&q, 1)
		name, _, _ := strings.Cut(granted[0], "/")
		turns = append(turns, name)
		q.Release(name, 1) // The pod ends.
	}
	if diff := gocmp.Diff([]string{"a", "b", "c", "a", "b", "c"}, turns); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

// A tenant that is left gets nothing more in the round, and keeps its items.
func TestQueueLeave(t *testing.T) {
	var q Queue
	for _, id := range []string{"a/1", "a/2", "b/1"} {
		q.Add(item(id, 1, 0, 0))
	}
	var seen []string
	q.Round(func(next Item) Outcome {
		seen = append(seen, next.ID)
		return TenantPassed
	})
	if diff := gocmp.Diff([]string{"a/1", "b/1"}, seen); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	if granted, _ := grant(&q, 9); len(granted) != 3 {
		t.Errorf("the next round grants %v", granted)
	}
}

// model does what a Queue does in the obvious way: before each grant it looks at every tenant and every item.
type model struct {
	terms   map[string]Terms
	has     map[string]gpu.Memory
	granted map[string]int
	items   []Item
	grants  int
}

// claims returns how much the tenant has of what it deserves: first by its guaranteed amount, then by its weight.
func (m *model) claims(name string) (guaranteed bool, ratio *big.Rat) {
	terms, has := m.terms[name], m.has[name]
	if has < terms.Guaranteed {
		return true, big.NewRat(int64(has), int64(terms.Guaranteed))
	}
	return false, big.NewRat(int64(has-terms.Guaranteed), terms.Weight)
}

func (m *model) before(a, b Item) int {
	if a.Tenant == b.Tenant {
		return cmp.Or(cmp.Compare(b.Priority, a.Priority), a.Entered.Compare(b.Entered), cmp.Compare(a.ID, b.ID))
	}
	guaranteed, ratio := m.claims(a.Tenant)
	otherGuaranteed, otherRatio := m.claims(b.Tenant)
	switch {
	case guaranteed && !otherGuaranteed:
		return -1
	case otherGuaranteed && !guaranteed:
		return 1
	}
	return cmp.Or(ratio.Cmp(otherRatio), cmp.Compare(m.granted[a.Tenant], m.granted[b.Tenant]), cmp.Compare(a.Tenant, b.Tenant))
}

func (m *model) grant(room gpu.Memory) (granted []string, left gpu.Memory) {
	for {
		fitting := slices.DeleteFunc(slices.Clone(m.items), func(i Item) bool { return i.Memory > room })
		if len(fitting) == 0 {
			return granted, room
		}
		next := slices.MinFunc(fitting, m.before)
		m.items = slices.DeleteFunc(m.items, func(i Item) bool { return i.ID == next.ID })
		m.grants++
		m.granted[next.Tenant] = m.grants
		m.has[next.Tenant] += next.Memory
		room -= next.Memory
		granted = append(granted, next.ID)
	}
}

// TestQueueModel makes random changes and rounds on a Queue and on the model. It also checks that a round leaves no room that an
// item could use, and that no tenant gets an item while another one that is further below its share has one that fits.
func TestQueueModel(t *testing.T) {
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 2))
		m := &model{terms: map[string]Terms{}, has: map[string]gpu.Memory{}, granted: map[string]int{}}
		var q Queue
		room := gpu.Memory(random.IntN(60))
		var running []string
		names := []string{"a", "b", "c", "d"}
		for _, name := range names {
			m.terms[name] = Terms{1 + random.Int64N(4), gpu.Memory(max(random.IntN(20)-10, 0))}
			q.SetTerms(name, m.terms[name])
		}
		all := map[string]Item{}
		for step := range 60 {
			switch random.IntN(6) {
			case 0, 1, 2:
				added := item(fmt.Sprintf("%s/%d", names[random.IntN(len(names))], step), gpu.Memory(1+random.IntN(8)), int32(random.IntN(3)), random.IntN(5))
				q.Add(added)
				m.items, all[added.ID] = append(m.items, added), added
			case 3:
				if len(m.items) > 0 {
					i := random.IntN(len(m.items))
					q.Remove(m.items[i])
					m.items = slices.Delete(m.items, i, i+1)
				}
			case 4:
				if len(running) > 0 {
					i := random.IntN(len(running))
					ended := all[running[i]]
					running = slices.Delete(running, i, i+1)
					q.Release(ended.Tenant, ended.Memory)
					m.has[ended.Tenant] -= ended.Memory
					room += ended.Memory
				}
			case 5:
				got, left := grant(&q, room)
				want, _ := m.grant(room)
				if diff := gocmp.Diff(want, got); diff != "" {
					t.Fatalf("seed %d, step %d: (-want +got)\n%s", seed, step, diff)
				}
				running, room = append(running, got...), left
			}
		}
		for _, s := range q.Tenants() {
			if s.Allocated != m.has[s.Name] {
				t.Fatalf("seed %d: %s has %d, want %d", seed, s.Name, s.Allocated, m.has[s.Name])
			}
		}
	}
}

// TestQueueShares fills an empty cluster: each tenant that still waits ends within one pod of its share, in whatever order the
// pods were added.
func TestQueueShares(t *testing.T) {
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 3))
		const largest = 4
		var items []Item
		claims := make([]Tenant, 2+random.IntN(6))
		for i := range claims {
			name := string(rune('a' + i))
			claims[i] = Tenant{Terms{1 + random.Int64N(4), gpu.Memory(max(random.IntN(60)-30, 0))}, name, 0}
			for n := range random.IntN(60) {
				added := item(fmt.Sprintf("%s/%d", name, n), gpu.Memory(1+random.IntN(largest)), int32(random.IntN(2)), random.IntN(9))
				items, claims[i].Demand = append(items, added), claims[i].Demand+added.Memory
			}
		}
		total := gpu.Memory(random.IntN(400))
		run := func() (*Queue, []string) {
			q := &Queue{}
			random.Shuffle(len(items), func(i, j int) { items[i], items[j] = items[j], items[i] })
			for _, i := range random.Perm(len(claims)) {
				q.SetTerms(claims[i].Name, claims[i].Terms)
			}
			for _, item := range items {
				q.Add(item)
			}
			granted, _ := grant(q, total)
			return q, granted
		}
		q, granted := run()
		_, again := run()
		if diff := gocmp.Diff(granted, again); diff != "" {
			t.Fatalf("seed %d: in another order (-first +second)\n%s", seed, diff)
		}
		guaranteed := gpu.Memory(0)
		for _, c := range claims {
			guaranteed += min(c.Guaranteed, c.Demand)
		}
		shares := Shares(total, claims)
		for i, c := range claims {
			has := q.tenants[c.Name]
			// In between, a pod that is larger than what is left of a guaranteed amount takes from what is divided by weight.
			slack := gpu.Memory(largest * (1 + len(claims)))
			if guaranteed <= total && (has.Allocated > shares[i]+slack || len(has.Waiting) > 0 && has.Allocated+slack < shares[i]) {
				t.Fatalf("seed %d: %s has %d, its share is %d", seed, c.Name, has.Allocated, shares[i])
			}
		}
	}
}

// Tenants come and go; none stays in memory.
func TestQueueForget(t *testing.T) {
	var q Queue
	q.Add(item("a/1", 2, 0, 0))
	left := func(when string, want int) {
		t.Helper()
		q.Forget("a")
		if got := len(q.Tenants()); got != want {
			t.Errorf("%s, %d tenants are left, want %d", when, got, want)
		}
	}
	left("while it waits", 1)
	grant(&q, 2)
	left("while it has memory", 1)
	q.Release("a", 2)
	left("when it has nothing", 0)
	left("when it is unknown", 0)
}

func BenchmarkRound(b *testing.B) {
	var q Queue
	for i := range 10_000 {
		q.Add(item(fmt.Sprintf("%d/%d", i%50, i), gpu.Memory(1+i%16), int32(i%3), i))
	}
	for b.Loop() {
		q.Round(func(Item) Outcome { return Passed })
	}
}
