package dispatch

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/gpushare/gpushare/pkg/ledger"
)

// maxOpen limits the granted pods that aren't bound yet, apart from the first item of each tenant. kube-scheduler binds some hundreds
// per second in a small cluster, and some dozens in a large one. Of more pods, some would lose their charges before kube-scheduler
// tries them.
const maxOpen = 256

// round is one pass through the queue, in which the items get their turns. It runs with the Manager's lock held.
type round struct {
	m      *Manager
	number uint64
	// freed are the nodes on which something was freed since the items without room were tried.
	freed []string
	// open counts the granted pods of each tenant that aren't bound yet.
	open map[string]int
	// awaiting are the IDs of the items that have awaited reservations, with their tenants. unseen are those whose tenants have not had their turn:
	// their reservations don't count for the items that have their turn before.
	awaiting map[string]string
	unseen   map[string]bool
	tenants  map[string]*tenantRound
	// searches counts the items of tenants that aren't unfinished for which all nodes were tried without success. each is the limit of one unfinished
	// tenant.
	searches, each int
}

// unfinished is how far the rounds are with the items of a tenant that are due.
type unfinished struct {
	// since is the number of the first round that has not tried them all, and latest that of the latest one that tried some; 0 if none did.
	since, latest uint64
}

// sorted sorts the nodes, and drops those that are listed twice: of equally good nodes the ledger takes the first.
func sorted(nodes []string) []string {
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// tenantRound is what a round knows of a tenant.
type tenantRound struct {
	// searches counts the items for which all nodes were tried without success. unfinished is true if others were due. waits is true if other tenants
	// come first.
	searches          int
	unfinished, waits bool
}

// tenant returns what the round knows of the tenant.
func (r *round) tenant(name string) *tenantRound {
	own := r.tenants[name]
	if own == nil {
		own = &tenantRound{}
		r.tenants[name] = own
	}
	return own
}

// makeRound grants what fits, in the order of the queue.
func (m *Manager) makeRound(freed []string) {
	m.gatherGroups()
	m.grantHeld()
	m.keepEnded()
	r := m.newRound(freed)
	r.grantInOrder()
	former := m.unfinished
	m.unfinished = map[string]unfinished{}
	for name, own := range r.tenants {
		if !own.unfinished {
			continue
		}
		progress := former[name]
		progress.since = cmp.Or(progress.since, r.number)
		if own.searches > 0 {
			progress.latest = r.number
		}
		m.unfinished[name] = progress
	}
}

func (m *Manager) newRound(freed []string) *round {
	m.rounds, m.roundAt, m.changed = m.rounds+1, m.now, false
	r := &round{
		m: m, number: m.rounds, freed: sorted(freed),
		open: map[string]int{}, awaiting: map[string]string{}, unseen: map[string]bool{}, tenants: map[string]*tenantRound{},
	}
	names := slices.SortedFunc(maps.Keys(m.unfinished), func(a, b string) int {
		return cmp.Or(cmp.Compare(m.unfinished[a].latest, m.unfinished[b].latest), strings.Compare(a, b))
	})
	first := min(len(names), maxSearches) // Those whose latest search is the oldest.
	for _, name := range names[first:] {
		r.tenant(name).waits = true
	}
	r.each = maxSearches / max(first, 1)
	for _, p := range m.charged {
		r.open[p.countedFor]++
	}
	for _, id := range m.Ledger.AwaitedItems() {
		if it := m.items[id]; it != nil {
			r.awaiting[id], r.unseen[id] = it.Tenant, true
		}
	}
	return r
}

// grantInOrder offers the items in the order of the queue.
func (r *round) grantInOrder() {
	turns := r.m.queue.Round()
	for next, more := turns.Next(); more; next, more = turns.Next() {
		it := next.Value.(*item)
		if !r.mayGrant(it.Tenant) { // kube-scheduler must bind others first.
			for id, tenant := range r.awaiting {
				if tenant == it.Tenant {
					delete(r.unseen, id)
				}
			}
			for _, node := range r.freed { // Later rounds try the tenant's items there.
				r.m.freed.add(node)
			}
			turns.Leave()
			continue
		}
		places := r.offer(it)
		if places == nil {
			turns.Pass()
			continue
		}
		turns.Grant()
		r.m.grantItem(it, places)
		r.open[next.Tenant] += len(it.pods)
	}
}

// offer gives an item its turn: it reserves places for the pods, if there is room.
func (r *round) offer(it *item) (places []ledger.ChosenNode) {
	_, awaits := r.awaiting[it.ID]
	r.m.updatePause(it, awaits)
	if it.pause == 0 {
		places = r.try(it, awaits)
		r.m.nextCame(it.Tenant, places)
	}
	delete(r.unseen, it.ID)
	return places
}

// mayGrant reports whether more pods of the tenant may be granted. Pods that are never bound, such as those whose volume doesn't exist, must not take
// all turns: each tenant that has open pods gets the same part of maxOpen, one part is left for others, and a tenant without open pods gets its first
// item granted in any case.
func (r *round) mayGrant(tenant string) bool {
	own := r.open[tenant]
	return own == 0 || own < maxOpen/(len(r.open)+1)
}
