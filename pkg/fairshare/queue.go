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

// QueuedTenant is the state of a tenant of a Queue.
type QueuedTenant struct {
	Terms
	Name      string
	Allocated gpu.Memory
	// Waiting are the tenant's items in their order.
	Waiting []Item
}

// tenant is a tenant of a Queue.
type tenant struct {
	QueuedTenant
	// granted is the value of Queue.grants when an item of this tenant was last granted. Of equal tenants, the one whose last grant is
	// older goes first. If tenants have few large pods, many tenants are equal.
	granted uint64
	// next is the position of the item that Round offers.
	next int
}

// compare orders the tenants: the first one has the least memory in proportion to its terms.
func (t *tenant) compare(o *tenant) int {
	below, otherBelow := t.Allocated < t.Guaranteed, o.Allocated < o.Guaranteed
	order := 0
	switch {
	case below && otherBelow:
		order = compareRatios(uint64(t.Allocated), uint64(t.Guaranteed), uint64(o.Allocated), uint64(o.Guaranteed))
	case below:
		return -1
	case otherBelow:
		return 1
	default:
		order = compareRatios(uint64(t.Allocated-t.Guaranteed), uint64(t.Weight), uint64(o.Allocated-o.Guaranteed), uint64(o.Weight))
	}
	return cmp.Or(order, cmp.Compare(t.granted, o.granted), strings.Compare(t.Name, o.Name))
}

// tenant returns the tenant of the name, and adds it if there is none.
func (q *Queue) tenant(name string) *tenant {
	t := q.tenants[name]
	if t == nil {
		if q.tenants == nil {
			q.tenants = map[string]*tenant{}
		}
		t = &tenant{QueuedTenant: QueuedTenant{Terms: DefaultTerms, Name: name}}
		q.tenants[name] = t
	}
	return t
}

// SetTerms sets the terms of a tenant. Until then it has DefaultTerms.
func (q *Queue) SetTerms(name string, terms Terms) { q.tenant(name).Terms = terms }

// Add adds an item. There must be none with its ID.
func (q *Queue) Add(item Item) {
	t := q.tenant(item.Tenant)
	i, _ := slices.BinarySearchFunc(t.Waiting, item, compareItems)
	t.Waiting = slices.Insert(t.Waiting, i, item)
}

// Remove removes an item. It does nothing if there is no such item.
func (q *Queue) Remove(item Item) {
	t := q.tenant(item.Tenant)
	if i, found := slices.BinarySearchFunc(t.Waiting, item, compareItems); found {
		t.Waiting = slices.Delete(t.Waiting, i, i+1)
	}
}

// Charge adds an amount to what the tenant has.
func (q *Queue) Charge(name string, amount gpu.Memory) {
	t := q.tenant(name)
	t.Allocated = t.Allocated.Add(amount)
}

// Release undoes Charge.
func (q *Queue) Release(name string, amount gpu.Memory) {
	t := q.tenant(name)
	t.Allocated = t.Allocated.Sub(amount)
}

// Reaches reports whether the tenant would have at least as much as the other one in proportion to their terms, with the additional amount of each.
func (q *Queue) Reaches(name string, amount gpu.Memory, other string, otherAmount gpu.Memory) bool {
	with, than := *q.tenant(name), *q.tenant(other)
	with.Allocated, with.granted = with.Allocated.Add(amount), math.MaxUint64 // So that a tie counts.
	than.Allocated = than.Allocated.Add(otherAmount)
	return with.compare(&than) > 0
}

// Forget removes a tenant if it has neither memory nor items.
func (q *Queue) Forget(name string) {
	if t := q.tenants[name]; t != nil && t.Allocated == 0 && len(t.Waiting) == 0 {
		delete(q.tenants, name)
	}
}

// Tenants returns the tenants in their order: it is the turn of the first one that waits for something. The items belong to
// the queue and must not be changed; they are valid until the next change.
func (q *Queue) Tenants() []QueuedTenant {
	out := make([]QueuedTenant, 0, len(q.tenants))
	for _, t := range q.ordered() {
		out = append(out, t.QueuedTenant)
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

// Outcome is what becomes of an item that a round offers.
type Outcome int

const (
	// Passed leaves the item in the queue. The tenant's next item follows.
	Passed Outcome = iota
	// Granted removes the item, and charges the tenant for it.
	Granted
	// TenantPassed leaves the item and all further ones of the tenant in the queue.
	TenantPassed
)

// Round offers the items, each at most once: always the next item of the tenant with the least memory in proportion to its terms. offer must not change
// the queue, except that it may remove an item that it grants.
func (q *Queue) Round(offer func(Item) Outcome) {
	tenants := q.ordered()
	for _, t := range tenants {
		t.next = 0
	}
	for len(tenants) > 0 {
		t := tenants[0]
		if t.next == len(t.Waiting) {
			tenants = tenants[1:]
			continue
		}
		switch item := t.Waiting[t.next]; offer(item) {
		case Passed:
			t.next++
		case TenantPassed:
			t.next = len(t.Waiting)
		case Granted:
			q.Remove(item)
			q.grants++
			t.Allocated, t.granted = t.Allocated.Add(item.Memory), q.grants
			for i := 1; i < len(tenants) && tenants[i].compare(t) < 0; i++ {
				tenants[i-1], tenants[i] = tenants[i], t
			}
		}
	}
}
