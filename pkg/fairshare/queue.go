package fairshare

import (
	"cmp"
	"math"
	"slices"
	"strings"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// Item is a pod, or all pods that a group must bind together. It is granted as a whole.
type Item struct {
	// Item has an ID that is unique among the items of all tenants. Its rank orders the items of one tenant only.
	ledger.Item
	Tenant string
	// Memory is the amount that is charged for the item.
	Memory gpu.Memory
	// Value is for the caller. The queue doesn't use it.
	Value any
}

func compareItems(a, b Item) int { return a.Compare(&b.Item) }

// Queue holds the tenants with the memory that they have, and the items that wait. The zero value is empty. It is not safe for concurrent
// use.
type Queue struct {
	tenants map[string]*tenant
	// grants counts the items that were granted.
	grants uint64
}

// tenant is a tenant of a Queue.
type tenant struct {
	Terms
	name      string
	allocated gpu.Memory
	// granted is the value of Queue.grants when an item of this tenant was last granted. Of equal tenants, the one whose last grant is
	// older goes first. If tenants have few large pods, many tenants are equal.
	granted uint64
	// items are in the order in which they are granted.
	items []Item
	// next is the position of the item that a Round considers.
	next int
}

// compare orders the tenants: the first one has the least memory in proportion to its terms.
func (t *tenant) compare(o *tenant) int {
	below, otherBelow := t.allocated < t.Guaranteed, o.allocated < o.Guaranteed
	order := 0
	switch {
	case below && otherBelow:
		order = compareRatios(uint64(t.allocated), uint64(t.Guaranteed), uint64(o.allocated), uint64(o.Guaranteed))
	case below:
		return -1
	case otherBelow:
		return 1
	default:
		order = compareRatios(uint64(t.allocated-t.Guaranteed), uint64(t.Weight), uint64(o.allocated-o.Guaranteed), uint64(o.Weight))
	}
	return cmp.Or(order, cmp.Compare(t.granted, o.granted), strings.Compare(t.name, o.name))
}

// tenant returns the tenant of the name, and adds it if there is none.
func (q *Queue) tenant(name string) *tenant {
	t := q.tenants[name]
	if t == nil {
		if q.tenants == nil {
			q.tenants = map[string]*tenant{}
		}
		t = &tenant{Terms: DefaultTerms, name: name}
		q.tenants[name] = t
	}
	return t
}

// SetTerms sets the terms of a tenant. Until then it has DefaultTerms.
func (q *Queue) SetTerms(name string, terms Terms) { q.tenant(name).Terms = terms }

// Add adds an item. There must be none with its ID.
func (q *Queue) Add(item Item) {
	t := q.tenant(item.Tenant)
	i, _ := slices.BinarySearchFunc(t.items, item, compareItems)
	t.items = slices.Insert(t.items, i, item)
}

// Remove removes an item that was added. It does nothing if that was granted.
func (q *Queue) Remove(item Item) {
	t := q.tenant(item.Tenant)
	if i, found := slices.BinarySearchFunc(t.items, item, compareItems); found {
		t.items = slices.Delete(t.items, i, i+1)
	}
}

// Charge adds an amount to what the tenant has.
func (q *Queue) Charge(name string, amount gpu.Memory) {
	t := q.tenant(name)
	t.allocated = t.allocated.Add(amount)
}

// Release undoes Charge.
func (q *Queue) Release(name string, amount gpu.Memory) {
	t := q.tenant(name)
	t.allocated = t.allocated.Sub(amount)
}

// Reaches reports whether the tenant would have at least as much as the other one in proportion to their terms, with the additional amount of each.
func (q *Queue) Reaches(name string, amount gpu.Memory, other string, otherAmount gpu.Memory) bool {
	with, than := *q.tenant(name), *q.tenant(other)
	with.allocated, with.granted = with.allocated.Add(amount), math.MaxUint64 // So that a tie counts.
	than.allocated = than.allocated.Add(otherAmount)
	return with.compare(&than) > 0
}

// Forget removes a tenant if it has neither memory nor items.
func (q *Queue) Forget(name string) {
	if t := q.tenants[name]; t != nil && t.allocated == 0 && len(t.items) == 0 {
		delete(q.tenants, name)
	}
}

// QueuedTenant is the state of a tenant of a Queue.
type QueuedTenant struct {
	Terms
	Name      string
	Allocated gpu.Memory
	// Waiting are the tenant's items in their order.
	Waiting []Item
}

// Tenants returns the tenants in their order: it is the turn of the first one that waits for something. The items belong to
// the queue and must not be changed; they are valid until the next change.
func (q *Queue) Tenants() []QueuedTenant {
	out := make([]QueuedTenant, 0, len(q.tenants))
	for _, t := range q.ordered() {
		out = append(out, QueuedTenant{t.Terms, t.name, t.allocated, t.items})
	}
	return out
}

func (q *Queue) ordered() []*tenant {
	out := make([]*tenant, 0, len(q.tenants))
	for _, t := range q.tenants {
		out = append(out, t)
	}
	slices.SortFunc(out, (*tenant).compare)
	return out
}

// Round yields the items of a queue, each at most once: always the next item of the tenant with the least memory in proportion to its terms.
// After each Next the caller calls Grant, Pass or Leave. During a round, no other calls may change the queue.
type Round struct {
	queue *Queue
	// tenants are those that have an item left, in their order.
	tenants []*tenant
}

// Round begins a round.
func (q *Queue) Round() *Round {
	r := &Round{q, q.ordered()}
	r.tenants = slices.DeleteFunc(r.tenants, func(t *tenant) bool {
		t.next = 0
		return len(t.items) == 0
	})
	return r
}

// Next returns the next item; false if none is left.
func (r *Round) Next() (Item, bool) {
	if len(r.tenants) == 0 {
		return Item{}, false
	}
	t := r.tenants[0]
	return t.items[t.next], true
}

// Grant charges the tenant for the item, and removes the item.
func (r *Round) Grant() {
	t := r.tenants[0]
	item := t.items[t.next]
	t.items = slices.Delete(t.items, t.next, t.next+1)
	r.queue.grants++
	t.allocated, t.granted = t.allocated.Add(item.Memory), r.queue.grants
	if r.dropIfExhausted() {
		return
	}
	for i := 1; i < len(r.tenants) && r.tenants[i].compare(t) < 0; i++ {
		r.tenants[i-1], r.tenants[i] = r.tenants[i], t
	}
}

// Pass leaves the item in the queue, and continues with the tenant's next item.
func (r *Round) Pass() {
	r.tenants[0].next++
	r.dropIfExhausted()
}

// Leave continues with the next tenant: no further item of this tenant is granted in this round.
func (r *Round) Leave() {
	t := r.tenants[0]
	t.next = len(t.items)
	r.dropIfExhausted()
}

// dropIfExhausted removes the first tenant if it has no item left, and reports whether it did.
func (r *Round) dropIfExhausted() bool {
	t := r.tenants[0]
	if t.next < len(t.items) {
		return false
	}
	r.tenants = r.tenants[1:]
	return true
}
