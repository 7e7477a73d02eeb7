package dispatch

import (
	"maps"
	"math"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// maxOpen limits the granted pods that aren't bound yet, apart from the first item of each tenant. kube-scheduler binds some hundreds
// per second in a small cluster, and some dozens in a large one. Of more pods, some would lose their charges before kube-scheduler
// tries them.
const maxOpen = 256

// round is one pass through the queue, in which the items get their turns. It runs with the Manager's lock held.
type round struct {
	m *Manager
	// freed are the nodes on which something was freed since the items without room were tried.
	freed []string
	// open counts the granted pods of each tenant that aren't bound yet.
	open map[string]int
	// awaiting are the IDs of the items that have awaited reservations, with their tenants. unseen are those whose tenants have not had their turn:
	// their reservations don't count for the items that have their turn before.
	awaiting map[string]string
	unseen   map[string]bool
	tenants  map[string]*tenantRound
	// tenantEffort is what a tenant gets in this round. The more tenants are cut short, the less: together they must not use up the effort of each
	// round, or the tenants behind them would never get a turn.
	tenantEffort int
	// othersFirst is true if the latest round was exhausted: then the tenants that are cut short get no turn in this one.
	othersFirst bool
	// taken is the kept memory that the present item takes.
	taken []*kept
}

// progress is what a round leaves for the next one.
type progress struct {
	// rounds counts the rounds, and at is when the latest one was. changedAt is the latest one before which something was freed or all kinds became due.
	rounds, changedAt uint64
	at                time.Time
	// missed are the nodes on which something was freed, if the latest round has not tried all items there.
	missed []string
	// exhausted is true if the latest round has used up its effort. cutShort are the tenants that have used up their own, with the number of
	// the round since which their items get their turns one after the other.
	exhausted bool
	cutShort  map[string]uint64
}

// incomplete reports whether the latest round has not tried all items.
func (p *progress) incomplete() bool { return p.exhausted || len(p.cutShort) > 0 }

// makeRound grants what fits, in the order of the queue.
func (m *Manager) makeRound(freed []string) {
	m.gatherGroups()
	m.grantHeld()
	m.keepEnded()
	r := m.newRound(freed)
	r.grantInOrder()
	r.recordProgress()
}

func (m *Manager) newRound(freed []string) *round {
	p := &m.progress
	nodes := slices.Sorted(slices.Values(append(freed, p.missed...))) // Of equally good nodes the ledger takes the first.
	r := &round{
		m: m, freed: slices.Compact(nodes),
		open: map[string]int{}, awaiting: map[string]string{}, unseen: map[string]bool{}, tenants: map[string]*tenantRound{},
		tenantEffort: max(1, min(maxTenantEffort, maxEffort/(len(p.cutShort)+1))), othersFirst: p.exhausted,
	}
	for _, p := range m.charged {
		r.open[p.countedFor]++
	}
	for _, id := range m.Ledger.AwaitedItems() {
		if it := m.items[id]; it != nil {
			r.awaiting[id], r.unseen[id] = it.Tenant, true
		}
	}
	p.rounds, p.at = p.rounds+1, m.now
	if len(freed) > 0 {
		p.changedAt = p.rounds
	}
	m.changed, m.effort, p.missed = false, 0, nil
	return r
}

// grantInOrder offers the items in the order of the queue until the effort is used up.
func (r *round) grantInOrder() {
	turns := r.m.queue.Round()
	next, more := turns.Next()
	for ; more && r.m.effort < maxEffort; next, more = turns.Next() {
		it := next.Value.(*item)
		switch places, leave := r.offer(it); {
		case places != nil:
			turns.Grant()
			r.m.grantItem(it, places)
			r.open[next.Tenant] += len(it.pods)
			for _, k := range r.taken {
				turns.Release(k.tenant, k.Request)
			}
			r.taken = nil
		case leave:
			for id, tenant := range r.awaiting {
				if tenant == next.Tenant {
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
		own := r.tenant(next.Tenant)
		own.cut = own.cut || own.effort > 0
	}
}

// recordProgress records what the next round must try. If something changed after a tenant was cut short, the items that had had their turn before get
// another one.
func (r *round) recordProgress() {
	p := &r.m.progress
	for name, own := range r.tenants {
		since, before := p.cutShort[name]
		switch {
		case own.cut && before:
		case own.cut:
			p.cutShort[name] = p.rounds
		case before && since < p.changedAt:
			p.cutShort[name] = p.rounds + 1
		default:
			delete(p.cutShort, name)
		}
	}
	if !p.exhausted { // Otherwise the others were not reached.
		maps.DeleteFunc(p.cutShort, func(name string, _ uint64) bool { return r.tenants[name] == nil })
	}
	if p.incomplete() {
		p.missed = r.freed
	}
	if len(p.missed) > maxFreed {
		p.missed = nil
		r.m.retryAll()
	}
}

// tenantRound is what a round knows of a tenant.
type tenantRound struct {
	// noRoom is true if an item so far has no room.
	noRoom bool
	// effort is what its items have taken of the round's effort.
	effort int
	// triedKept are the kinds that have no room where memory is kept.
	triedKept map[*kind]bool
	// since is the round since which the tenant is cut short, later than any if it isn't. cut is true if it has used up its effort in this round.
	since uint64
	cut   bool
}

// tenant returns what the round knows of the tenant.
func (r *round) tenant(name string) *tenantRound {
	own := r.tenants[name]
	if own == nil {
		own = &tenantRound{since: math.MaxUint64, triedKept: map[*kind]bool{}}
		if since, cut := r.m.progress.cutShort[name]; cut {
			own.since = since
		}
		r.tenants[name] = own
	}
	return own
}

// offer gives an item its turn: it reserves places for the pods, if there is room. leave is true if the tenant's later items don't get their turn in
// this round.
func (r *round) offer(it *item) (places []ledger.ChosenNode, leave bool) {
	own, number := r.tenant(it.Tenant), r.m.progress.rounds
	_, awaits := r.awaiting[it.ID]
	defer delete(r.unseen, it.ID)
	r.m.updatePause(it, awaits)
	before := r.m.effort
	defer func() { own.effort += r.m.effort - before }()
	switch {
	case !r.mayGrant(it.Tenant): // kube-scheduler must bind others first.
		r.m.progress.missed = r.freed
		return nil, true
	case r.othersFirst && own.since <= number: // The tenant was cut short, and the latest round didn't reach all others.
		own.cut = true
		return nil, true
	case it.pause != 0, it.triedIn >= own.since:
		return nil, false
	case own.noRoom && !awaits && !it.kind.isDue(r.m.now) && it.kind.hasNoRoom(number): // There can be thousands of these.
		return r.takeKept(it), false
	case own.effort >= r.tenantEffort:
		own.cut = true
		return nil, true
	}
	it.triedIn = number
	places = r.try(it, awaits)
	if places == nil {
		places = r.takeKept(it)
	} else {
		r.m.nextCame(it.Tenant, false)
	}
	own.noRoom = own.noRoom || places == nil && it.kind.obstacle == reasons.ObstacleNoRoom
	return places, false
}

// mayGrant reports whether more pods of the tenant may be granted. Pods that are never bound, such as those whose volume doesn't exist, must not take
// all turns: each tenant that has open pods gets the same part of maxOpen, one part is left for others, and a tenant without open pods gets its first
// item granted in any case.
func (r *round) mayGrant(tenant string) bool {
	own := r.open[tenant]
	return own == 0 || own < maxOpen/(len(r.open)+1)
}
