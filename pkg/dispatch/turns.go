package dispatch

import (
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
)

const (
	// maxOpen limits the granted pods that aren't bound yet. kube-scheduler binds some hundreds per second in a small cluster, and some dozens in a
	// large one. Of more pods, some would lose their charges before kube-scheduler tries them.
	maxOpen = 256
	// ownOpen is how many such pods a tenant may have beyond that, so that pods of others that are never bound don't stop its turns.
	ownOpen = 4
)

// grantInOrder offers the units in the order of the queue.
func (m *Manager) grantInOrder(capacity ledger.Capacity, now time.Time) {
	m.awaiting, m.unseen, m.unmatched = map[string]string{}, map[string]bool{}, map[string][]unique.Handle[string]{}
	for _, id := range m.Ledger.AwaitedItems() {
		if u := m.units[id]; u != nil {
			m.awaiting[id], m.unseen[id] = u.item.Tenant, true
		}
	}
	m.pausedUntil = time.Time{}
	t := &turns{Manager: m, capacity: capacity, now: now, open: map[string]int{}, tenants: map[string]*tenantTurns{}}
	for _, p := range m.charged {
		t.open[p.countedFor]++
	}
	t.allOpen = len(m.charged)
	r := m.queue.Round()
	for item, more := r.Next(); more; item, more = r.Next() {
		u := item.Value.(*unit)
		switch places, leave := t.offer(u); {
		case places != nil:
			r.Grant()
			t.grant(u, places)
			for _, k := range t.ends {
				r.Release(k.tenant, k.Request)
			}
			t.ends = nil
		case leave:
			for id, tenant := range m.awaiting {
				if tenant == item.Tenant {
					delete(m.unseen, id)
				}
			}
			r.Leave()
		default:
			r.Pass()
		}
	}
	m.awaiting, m.unseen = nil, nil
}

// turns is the state of grantInOrder.
type turns struct {
	*Manager
	capacity ledger.Capacity
	now      time.Time
	// open counts the granted pods of each tenant that aren't bound yet, and allOpen all of them.
	open    map[string]int
	allOpen int
	tenants map[string]*tenantTurns
	// ends is what was kept and is taken by the present unit.
	ends []*kept
}

// tenantTurns is what grantInOrder knows of a tenant.
type tenantTurns struct {
	// noRoom is true if a unit so far has no room.
	noRoom bool
	// effort is what it has used up: half of a round's at most, so that others don't wait for thousands of its pods that all differ.
	effort int
	// triedKept are the kinds that have no room where memory is kept.
	triedKept map[*kind]bool
}

func (t *turns) of(tenant string) *tenantTurns {
	own := t.tenants[tenant]
	if own == nil {
		own = &tenantTurns{}
		t.tenants[tenant] = own
	}
	return own
}

// offer reserves places for the pods of a unit, if there is room. leave is true if the tenant's later units don't get their turn in this
// round.
func (t *turns) offer(u *unit) (places []ledger.Place, leave bool) {
	own := t.of(u.item.Tenant)
	_, awaits := t.awaiting[u.item.ID]
	if awaits {
		defer delete(t.unseen, u.item.ID)
	}
	t.pause(u, t.now)
	switch {
	case t.allOpen >= maxOpen && t.open[u.item.Tenant] >= ownOpen:
		return nil, true
	case u.paused:
		return nil, false
	case own.noRoom && !awaits && u.kind.tried && u.kind.hasNoRoom(t.rounds):
		return t.takeKept(u), false // There can be thousands of these.
	case t.awaitsMatch(u):
		u.kind.tried = false // What is freed meanwhile isn't tried.
		return nil, false
	case !u.kind.tried && (t.effort >= maxEffort || own.effort >= maxEffort/2):
		t.exhausted = true
		return nil, false
	}
	before := t.effort
	places = t.try(u, t.capacity, t.now)
	own.effort += t.effort - before
	if places == nil {
		if places = t.takeKept(u); places != nil {
			return places, false
		}
		t.nextCame(u.item.Tenant, true)
	} else {
		t.nextCame(u.item.Tenant, false)
	}
	own.noRoom = own.noRoom || places == nil && u.kind.obstacle == reasons.ObstacleNoRoom
	return places, false
}

// grant grants a unit.
func (t *turns) grant(u *unit, places []ledger.Place) {
	t.Manager.grant(u, places, t.now)
	t.open[u.item.Tenant] += len(u.pods)
	t.allOpen += len(u.pods)
}
