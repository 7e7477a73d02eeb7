package gang

import (
	"time"

	"github.com/gpushare/gpushare/pkg/ledger"
)

// starvationState holds the starvation reservation, which keeps the first gang from starving: single pods are placed
// wherever there is room and could take each piece of freed memory before there is enough for the gang. Once the first
// gang has waited for StarvationAfter, memory for all of it is reserved on the cards with the most free memory. Pods
// that use these cards stay, and no new ones of equal or lower priority are placed there. When the reservation has
// lasted longer than these pods run, the gang is sure to be placed, if it fits on empty cards at all.
//
// The candidate nodes of filter calls can't be used to choose the cards: full nodes are no candidates, and if all nodes
// are full kube-scheduler doesn't call filter at all. So the reservation considers all nodes that are eligible for the
// members, see Options.EligibleNodes.
//
// The first reservation for a gang lasts for StarvationAfter, each further one twice as long as the one before. After
// each one there is none for as long as it lasted. So other pods are unaffected for at least half of the time, even if
// plans are made and fail again.
type starvationState struct {
	gang         *gang
	begun, until time.Time
	// next is when the next reservation may begin.
	next time.Time
}

const (
	// maxStarvationReservation bounds the duration of a starvation reservation.
	maxStarvationReservation = time.Hour
	// starvationRetry is the interval between attempts to reserve for a gang that doesn't fit.
	starvationRetry = 5 * time.Second
)

// updateStarvation ends the starvation reservation if its gang has a plan or its time is over. It then makes one for
// the first of the ready gangs that has no plan, if that has waited long enough.
func (mgr *Manager) updateStarvation(ready []*gang, now time.Time) {
	current := &mgr.starvation
	if g := current.gang; g != nil && (g.plan != nil || g.readySince.IsZero() || mgr.gangs[g.key] != g || !now.Before(current.until)) {
		mgr.endStarvation(now)
	}
	if mgr.StarvationAfter <= 0 || current.gang != nil || now.Before(current.next) {
		return
	}
	for _, g := range ready {
		if g.plan != nil || now.Sub(g.notReservable) < starvationRetry {
			continue
		}
		if now.Sub(g.readySince) < mgr.StarvationAfter {
			return // The gangs behind it don't reserve before it.
		}
		requests := mgr.starvationRequests(g)
		if len(requests) == 0 || !mgr.Ledger.ReserveForStarving(requests, g.priority(), g.key.String(), nil) {
			g.notReservable = now // The gang would not fit even without other pods.
			continue
		}
		g.reservedFor = min(max(2*g.reservedFor, mgr.StarvationAfter), maxStarvationReservation)
		current.gang, current.begun, current.until = g, now, now.Add(g.reservedFor)
		mgr.Observer.GangStarving()
		return
	}
}

// starvationRequests returns the requests of the members that the gang still needs, with all their eligible nodes.
func (mgr *Manager) starvationRequests(g *gang) []ledger.Request {
	eligible := map[string][]string{}
	chosen, _ := g.selectMembers(g.count(), func(*member) bool { return true })
	requests, _ := g.requests(chosen, func(m *member) []string {
		nodes, known := eligible[m.Template]
		if !known {
			nodes = mgr.EligibleNodes(m.UID)
			eligible[m.Template] = nodes
		}
		return nodes
	})
	return requests
}

func (mgr *Manager) endStarvation(now time.Time) {
	if mgr.starvation.gang == nil {
		return
	}
	mgr.Ledger.EndStarvationReservation()
	mgr.starvation.next = now.Add(now.Sub(mgr.starvation.begun))
	mgr.starvation.gang = nil
}
