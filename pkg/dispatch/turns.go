package dispatch

import (
	"maps"
	"math"
	"time"

	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// maxOpen limits the granted pods that aren't bound yet, apart from the first unit of each tenant. kube-scheduler binds some hundreds
// per second in a small cluster, and some dozens in a large one. Of more pods, some would lose their charges before kube-scheduler
// tries them. sharedOpen is how many of a tenant's pods count.
const maxOpen, sharedOpen = 256, maxOpen / 2

// grantInOrder offers the units in the order of the queue until the effort is used up.
func (m *Manager) grantInOrder(capacity ledger.Capacity, now time.Time) {
	m.awaiting, m.unseen = map[string]string{}, map[string]bool{}
	for _, id := range m.Ledger.AwaitedItems() {
		if u := m.units[id]; u != nil {
			m.awaiting[id], m.unseen[id] = u.item.Tenant, true
		}
	}
	m.pausedUntil = time.Time{}
	t := &turns{Manager: m, capacity: capacity, now: now, open: m.openPods(), tenants: map[string]*tenantTurns{}, othersFirst: m.exhausted}
	t.ownEffort = max(1, min(ownEffort, maxEffort/(len(m.cutShort)+1)))
	r := m.queue.Round()
	item, more := r.Next()
	for ; more && m.effort < maxEffort; item, more = r.Next() {
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
	if m.exhausted = more; more {
		own := t.of(item.Tenant)
		own.cut = own.cut || own.effort > 0
	}
	m.awaiting, m.unseen = nil, nil
	t.recordCuts()
}

// recordCuts sets the tenants that were cut short, which get further turns in the next round. Of a tenant whose units have all had their turn,
// some must be tried again because nodes have changed meanwhile.
func (t *turns) recordCuts() {
	for name, own := range t.tenants {
		_, before := t.cutShort[name]
		switch {
		case own.again && !own.cut:
			t.cutShort[name] = t.rounds + 1
		case !own.cut:
			delete(t.cutShort, name)
		case !before:
			t.cutShort[name] = t.rounds
		}
	}
	if !t.exhausted { // Otherwise the others were not reached.
		maps.DeleteFunc(t.cutShort, func(name string, _ uint64) bool { return t.tenants[name] == nil })
	}
}

// turns is the state of grantInOrder.
type turns struct {
	*Manager
	capacity ledger.Capacity
	now      time.Time
	open     *openPods
	tenants  map[string]*tenantTurns
	// ownEffort is what a tenant gets in this round. The more tenants are cut short, the less: together they must not use up the effort of each
	// round, or the tenants behind them would never get a turn.
	ownEffort int
	// othersFirst is true if the latest round was exhausted: then the tenants that are cut short get no turn in this one.
	othersFirst bool
	// ends is what was kept and is taken by the present unit.
	ends []*kept
}

// tenantTurns is what grantInOrder knows of a tenant.
type tenantTurns struct {
	// noRoom is true if a unit so far has no room.
	noRoom bool
	effort int
	// triedKept are the kinds that have no room where memory is kept.
	triedKept map[*kind]bool
	// since is the round since which the tenant is cut short, later than any if it isn't. cut is true if it has used up its effort in this
	// round, and again if units were not tried because they have had their turn since.
	since      uint64
	cut, again bool
}

func (t *turns) of(tenant string) *tenantTurns {
	own := t.tenants[tenant]
	if own == nil {
		own = &tenantTurns{since: math.MaxUint64}
		if since, cut := t.cutShort[tenant]; cut {
			own.since = since
		}
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
	before := t.effort
	defer func() { own.effort += t.effort - before }()
	switch {
	case !t.open.mayGrant(u.item.Tenant):
		t.missed = t.freedNow
		return nil, true
	case t.othersFirst && own.since <= t.rounds:
		own.cut = true
		return nil, true
	case u.paused:
		return nil, false
	case own.noRoom && !awaits && u.kind.obstacle != reasons.ObstacleUntried && u.kind.hasNoRoom(t.rounds):
		return t.takeKept(u), false // There can be thousands of these.
	case own.effort >= t.ownEffort/2 && u.turn >= own.since: // Those that have not had their turn yet come first.
		own.again = own.again || u.kind.obstacle == reasons.ObstacleUntried || u.turn < t.freedAt
		return nil, false
	case own.effort >= t.ownEffort:
		own.cut = true
		return nil, true
	}
	u.turn = t.rounds
	places = t.try(u, t.capacity, t.now)
	if places == nil {
		places = t.takeKept(u)
	} else {
		t.nextCame(u.item.Tenant, false)
	}
	own.noRoom = own.noRoom || places == nil && u.kind.obstacle == reasons.ObstacleNoRoom
	return places, false
}

// grant grants a unit.
func (t *turns) grant(u *unit, places []ledger.Place) {
	t.Manager.grant(u, places, t.now)
	t.open.add(u.item.Tenant, len(u.pods))
}

// openPods counts the granted pods with a place that aren't bound yet.
type openPods struct {
	byTenant map[string]int
	// total counts sharedOpen pods of each tenant at most, so that a large group of one tenant doesn't take the turns of others.
	total int
}

func (o *openPods) add(tenant string, pods int) {
	former := o.byTenant[tenant]
	o.byTenant[tenant] = former + pods
	o.total += min(former+pods, sharedOpen) - min(former, sharedOpen)
}

// mayGrant reports whether more pods of the tenant may be granted: it has fewer such pods than the others leave. Pods that are never bound, such as those
// whose volume doesn't exist, must not take all turns. So a tenant without such pods always gets its first unit granted.
func (o *openPods) mayGrant(tenant string) bool {
	own := o.byTenant[tenant]
	return own == 0 || own < maxOpen-o.total
}

func (m *Manager) openPods() *openPods {
	open := &openPods{byTenant: map[string]int{}}
	for _, p := range m.charged {
		open.add(p.countedFor, 1)
	}
	return open
}
