package dispatch

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/gpushare/gpushare/pkg/fairshare"
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
	// ignored are the IDs of the items with awaited reservations whose tenants have not had their turn: these reservations don't count for the items
	// that have their turn before.
	ignored map[string]bool
	// searches are those of each tenant with items that are due. limit is searchLimit, and left for how many items of tenants that aren't unfinished all
	// nodes may still be tried without success.
	searches    map[string]*searches
	limit, left int
}

// searches is how far a round is with the items of a tenant that are due: those for which all nodes are to be tried. It is kept for the next round if
// this one could not try them all: then the tenant is unfinished.
type searches struct {
	// since is the number of the first round that has not tried all of these items; 0 if the latest round has tried all. latest is the number of the
	// latest round that tried one of these items without success; 0 if no round did.
	since, latest uint64
	// left is for how many items the round may still try all nodes without success. others is true if further ones are due.
	left   int
	others bool
}

// isUnfinished reports whether former rounds could not try all items of the tenant that were due.
func (s *searches) isUnfinished() bool { return s.since > 0 }

// sorted sorts the nodes, and drops those that are listed twice: of equally good nodes the ledger takes the first.
func sorted(nodes []string) []string {
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// makeRound grants what fits, in the order of the queue.
func (m *Manager) makeRound(freed []string) {
	m.gatherGroups()
	m.grantHeld()
	m.keepEnded()
	r := m.newRound(freed)
	r.grantInOrder()
	for name, own := range m.unfinished { // The round has changed it.
		if !own.others {
			delete(m.unfinished, name)
		}
		own.since = cmp.Or(own.since, r.number)
	}
}

func (m *Manager) newRound(freed []string) *round {
	m.rounds, m.roundAt, m.changed = m.rounds+1, m.now, false
	r := &round{
		m: m, number: m.rounds, freed: sorted(freed), open: map[string]int{}, ignored: map[string]bool{}, searches: m.unfinished,
		limit: searchLimit(m.Ledger.NumNodes()),
	}
	r.left = 2 * r.limit
	names := slices.SortedFunc(maps.Keys(m.unfinished), func(a, b string) int {
		return cmp.Or(cmp.Compare(m.unfinished[a].latest, m.unfinished[b].latest), strings.Compare(a, b))
	})
	for i, name := range names { // Those whose latest search is the oldest share a number, the others wait.
		own := m.unfinished[name]
		own.left, own.others = 0, false
		if i < r.limit {
			own.left = r.limit / min(len(names), r.limit)
		}
	}
	for _, p := range m.charged {
		r.open[p.countedFor]++
	}
	for _, id := range m.Ledger.AwaitedItems() {
		if m.items[id] != nil {
			r.ignored[id] = true
		}
	}
	return r
}

// grantInOrder offers the items in the order of the queue.
func (r *round) grantInOrder() {
	r.m.queue.Round(func(next fairshare.Item) fairshare.Outcome {
		it := next.Value.(*item)
		if !r.mayGrant(it.Tenant) { // kube-scheduler must bind others first.
			maps.DeleteFunc(r.ignored, func(id string, _ bool) bool { return r.m.items[id].Tenant == it.Tenant })
			for _, node := range r.freed { // Later rounds try the tenant's items there.
				r.m.freed.add(node)
			}
			return fairshare.TenantPassed
		}
		places := r.offer(it)
		if places == nil {
			return fairshare.Passed
		}
		r.m.grantItem(it, places)
		r.open[it.Tenant] += len(it.pods)
		return fairshare.Granted
	})
}

// offer gives an item its turn, unless it pauses: it reserves places for its pods. It returns nil if there is no room. From then on the item's own
// awaited reservation counts for the items after it, and what was kept for its tenant's next pod has served its purpose.
func (r *round) offer(it *item) (places []ledger.ChosenNode) {
	awaits := r.ignored[it.ID]
	r.m.updatePause(it, awaits)
	if it.pause == 0 {
		places = r.try(it, awaits)
		r.m.nextCame(it.Tenant, places)
	}
	delete(r.ignored, it.ID)
	return places
}

// mayGrant reports whether more pods of the tenant may be granted. Pods that are never bound, such as those whose volume doesn't exist, must not take
// all turns: each tenant that has open pods gets the same part of maxOpen, one part is left for others, and a tenant without open pods gets its first
// item granted in any case.
func (r *round) mayGrant(tenant string) bool {
	own := r.open[tenant]
	return own == 0 || own < maxOpen/(len(r.open)+1)
}
