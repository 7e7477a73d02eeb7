package dispatch

import (
	"maps"
	"math"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// maxOpen limits the granted pods that aren't bound yet, apart from the first unit of each tenant. kube-scheduler binds some hundreds
// per second in a small cluster, and some dozens in a large one. Of more pods, some would lose their charges before kube-scheduler
// tries them. sharedOpen is how many of a tenant's pods count.
const maxOpen, sharedOpen = 256, maxOpen / 2

// round is one pass through the queue, in which the units get their turns. It runs with the Manager's lock held.
type round struct {
	m   *Manager
	now time.Time
	// freed are the nodes on which something was freed since the units without room were tried.
	freed []string
	open  *openPods
	// awaiting are the IDs of the units that have awaited reservations, with their tenants. unseen are those whose tenants have not had their turn:
	// their reservations don't count for the units that have their turn before.
	awaiting map[string]string
	unseen   map[string]bool
	tenants  map[string]*tenantRound
	// tenantEffort is what a tenant gets in this round. The more tenants are cut short, the less: together they must not use up the effort of each
	// round, or the tenants behind them would never get a turn.
	tenantEffort int
	// othersFirst is true if the latest round was exhausted: then the tenants that are cut short get no turn in this one.
	othersFirst bool
	// taken is the kept memory that the present unit takes.
	taken []*kept
}

// progress is what a round leaves for the next one.
type progress struct {
	// rounds counts the rounds. freedAt is the latest one before which something was freed: units that were tried since were tried there.
	rounds, freedAt uint64
	// missed are the nodes on which something was freed, if the latest round has not tried all units there.
	missed []string
	// exhausted is true if the latest round has used up its effort. cutShort are the tenants that have used up their own, with the number of
	// the round since which their units get their turns one after the other.
	exhausted bool
	cutShort  map[string]uint64
	// pausedUntil is when the first pause of a unit ends that the latest round passed over; zero if there is none.
	pausedUntil time.Time
}

// incomplete reports whether the latest round has not tried all units.
func (p *progress) incomplete() bool { return p.exhausted || len(p.cutShort) > 0 }

// pauseEnded reports whether the pause of a unit ended since the latest round.
func (p *progress) pauseEnded(now time.Time) bool {
	return !p.pausedUntil.IsZero() && !now.Before(p.pausedUntil)
}

// makeRound grants what fits, in the order of the queue. all is true if all nodes are tried, not only those on which something was freed.
func (m *Manager) makeRound(all bool, freed []string, now time.Time) {
	p := &m.progress
	nodes := slices.Sorted(slices.Values(append(freed, p.missed...))) // Of equally good nodes the ledger takes the first.
	r := &round{
		m: m, now: now, freed: slices.Compact(nodes),
		awaiting: map[string]string{}, unseen: map[string]bool{}, tenants: map[string]*tenantRound{},
		tenantEffort: max(1, min(maxTenantEffort, maxEffort/(len(p.cutShort)+1))), othersFirst: p.exhausted,
	}
	m.changed, p.missed, p.pausedUntil = false, nil, time.Time{}
	m.gatherGroups()
	m.grantHeld(now)
	m.keepEnded(now)
	r.open = m.openPods()
	p.rounds, m.effort = p.rounds+1, 0
	if len(freed) > 0 {
		p.freedAt = p.rounds
	}
	r.grantInOrder()
	if all {
		m.provision(now)
	}
	if p.incomplete() {
		p.missed = r.freed
	}
	if len(p.missed) > maxFreed {
		m.retries.allAt, p.missed = time.Time{}, nil
	}
}

// grantInOrder offers the units in the order of the queue until the effort is used up.
func (r *round) grantInOrder() {
	for _, id := range r.m.Ledger.AwaitedItems() {
		if u := r.m.units[id]; u != nil {
			r.awaiting[id], r.unseen[id] = u.item.Tenant, true
		}
	}
	turns := r.m.queue.Round()
	item, more := turns.Next()
	for ; more && r.m.effort < maxEffort; item, more = turns.Next() {
		u := item.Value.(*unit)
		switch places, leave := r.offer(u); {
		case places != nil:
			turns.Grant()
			r.m.grantUnit(u, places, r.now)
			r.open.add(item.Tenant, len(u.pods))
			for _, k := range r.taken {
				turns.Release(k.tenant, k.Request)
			}
			r.taken = nil
		case leave:
			for id, tenant := range r.awaiting {
				if tenant == item.Tenant {
					delete(r.unseen, id)
				}
			}
			turns.Leave()
		default:
			turns.Pass()
		}
	}
	r.m.progress.exhausted = more
	if more {
		own := r.tenant(item.Tenant)
		own.cut = own.cut || own.effort > 0
	}
	r.recordCuts()
}

// recordCuts sets the tenants that were cut short, which get further turns in the next round. Of a tenant whose units have all had their turn,
// some must be tried again because nodes have changed meanwhile.
func (r *round) recordCuts() {
	p := &r.m.progress
	for name, own := range r.tenants {
		_, before := p.cutShort[name]
		switch {
		case own.again && !own.cut:
			p.cutShort[name] = p.rounds + 1
		case !own.cut:
			delete(p.cutShort, name)
		case !before:
			p.cutShort[name] = p.rounds
		}
	}
	if !p.exhausted { // Otherwise the others were not reached.
		maps.DeleteFunc(p.cutShort, func(name string, _ uint64) bool { return r.tenants[name] == nil })
	}
}

// tenantRound is what a round knows of a tenant.
type tenantRound struct {
	// noRoom is true if a unit so far has no room.
	noRoom bool
	// effort is what its units have taken of the round's effort.
	effort int
	// triedKept are the kinds that have no room where memory is kept.
	triedKept map[*kind]bool
	// since is the round since which the tenant is cut short, later than any if it isn't. cut is true if it has used up its effort in this
	// round, and again if units were not tried because they have had their turn since.
	since      uint64
	cut, again bool
}

// tenant returns what the round knows of the tenant.
func (r *round) tenant(name string) *tenantRound {
	own := r.tenants[name]
	if own == nil {
		own = &tenantRound{since: math.MaxUint64}
		if since, cut := r.m.progress.cutShort[name]; cut {
			own.since = since
		}
		r.tenants[name] = own
	}
	return own
}

// offer gives a unit its turn: it reserves places for the pods, if there is room. leave is true if the tenant's later units don't get their turn in
// this round.
func (r *round) offer(u *unit) (places []ledger.ChosenNode, leave bool) {
	own, number := r.tenant(u.item.Tenant), r.m.progress.rounds
	_, awaits := r.awaiting[u.item.ID]
	if awaits {
		defer delete(r.unseen, u.item.ID)
	}
	r.m.updatePause(u, r.now)
	before := r.m.effort
	defer func() { own.effort += r.m.effort - before }()
	switch {
	case !r.open.mayGrant(u.item.Tenant): // kube-scheduler must bind others first.
		r.m.progress.missed = r.freed
		return nil, true
	case r.othersFirst && own.since <= number: // The tenant was cut short, and the latest round didn't reach all others.
		own.cut = true
		return nil, true
	case u.paused:
		return nil, false
	case own.noRoom && !awaits && u.kind.obstacle != reasons.ObstacleUntried && u.kind.hasNoRoom(number): // There can be thousands of these.
		return r.takeKept(u), false
	case own.effort >= r.tenantEffort/2 && u.triedIn >= own.since: // The rest is for units not tried since the cut.
		own.again = own.again || u.kind.obstacle == reasons.ObstacleUntried || u.triedIn < r.m.progress.freedAt
		return nil, false
	case own.effort >= r.tenantEffort:
		own.cut = true
		return nil, true
	}
	u.triedIn = number
	places = r.try(u, awaits)
	if places == nil {
		places = r.takeKept(u)
	} else {
		r.m.nextCame(u.item.Tenant, false, r.now)
	}
	own.noRoom = own.noRoom || places == nil && u.kind.obstacle == reasons.ObstacleNoRoom
	return places, false
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

// mayGrant reports whether more pods of the tenant may be granted: it has fewer such pods than the others leave. Pods that are never bound, such
// as those whose volume doesn't exist, must not take all turns. So a tenant without such pods always gets its first unit granted.
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
