package dispatch

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// unit is what is granted at once: a pod, or the members of a group that must be bound together.
type unit struct {
	item fairshare.Item
	kind *kind
	// pods are ordered: the largest first, since they have the least choice.
	pods []*pod
	// notBefore is the time before which it must not be granted.
	notBefore time.Time
	// paused is true if the latest round passed it over because of notBefore.
	paused bool
	// overtaken is when a later unit of the tenant was first granted although this one, the first, had no room; zero if none was.
	overtaken time.Time
	// waits counts the times that later units have waited for this one and it got no room.
	waits int
}

// Obstacle is why a unit isn't granted.
type Obstacle int

// The obstacles.
const (
	// Untried means that nothing is known yet.
	Untried Obstacle = iota
	// NoRoom means that it fits nowhere now.
	NoRoom
	// NeverFits means that it wouldn't fit even if all cards were free. It is no demand.
	NeverFits
	// Paused means that an earlier charge ended without a bind. It is no demand.
	Paused
	// Behind means that it waits for a pod of its own tenant that was overtaken for too long.
	Behind
	// MakingRoom means that it has no room yet, and pods of other tenants are evicted for it.
	MakingRoom
	// Incomplete means that too few members of its group exist.
	Incomplete
)

// String returns the obstacle in words, as a part of a sentence about the pod; empty if nothing is known.
func (o Obstacle) String() string {
	switch o {
	case NoRoom:
		return "no card has room for it now"
	case MakingRoom:
		return "pods of other tenants are evicted for it"
	case NeverFits:
		return "no node that it can use is large enough for it"
	case Paused:
		return "it was not scheduled after its last turn, and gets the next one after a pause"
	case Behind:
		return "a pod before it in its tenant's queue has no room and may no longer be overtaken"
	}
	return ""
}

// infeasible reports whether a unit with this obstacle is no demand.
func (o Obstacle) infeasible() bool { return o == NeverFits || o == Paused }

// enlist adds a pod that waits to its unit.
func (m *Manager) enlist(p *pod) {
	if p.Group == (gang.Key{}) {
		m.addUnit(p.unitID(), []*pod{p})
		return
	}
	if m.members[p.Group] == nil {
		m.members[p.Group] = map[gpu.PodUID]*pod{}
	}
	m.members[p.Group][p.UID] = p
}

// unitID returns the ID of the unit that consists of this pod. It orders pods that were created in the same second by name.
func (p *pod) unitID() string { return "pod " + p.String() + " " + string(p.UID) }

// groupID returns the ID of the unit of a group. A native group and another one can have the same name.
func groupID(key gang.Key) string {
	if key.Native {
		return "native group " + key.String()
	}
	return "group " + key.String()
}

// withdraw removes a pod from its unit. The other pods of the unit wait until the next round makes a new one.
func (m *Manager) withdraw(p *pod) {
	m.leaveGroup(p)
	if p.unit != nil {
		m.removeUnit(p.unit)
	}
}

// leaveGroup removes a pod from those that wait in groups.
func (m *Manager) leaveGroup(p *pod) {
	if waiting := m.members[p.Group]; waiting != nil {
		if delete(waiting, p.UID); len(waiting) == 0 {
			delete(m.members, p.Group)
		}
	}
}

func (m *Manager) addUnit(id string, pods []*pod) {
	former := m.units[id]
	if former != nil {
		m.removeUnit(former)
	}
	first := pods[0]
	u := &unit{pods: pods, item: fairshare.Item{ID: id, Tenant: m.namespaces[first.Namespace].Tenant, Priority: first.Priority, Created: first.Created}}
	if former != nil {
		u.overtaken, u.waits = former.overtaken, former.waits
	}
	slices.SortFunc(pods, func(a, b *pod) int {
		return cmp.Or(cmp.Compare(b.Request, a.Request), strings.Compare(text(a.Likeness), text(b.Likeness)), cmp.Compare(a.UID, b.UID))
	})
	for _, p := range pods {
		if p.unit != nil { // A member of a group that started meanwhile is placed alone, for example.
			m.removeUnit(p.unit)
		}
		p.unit = u
		u.item.Memory = u.item.Memory.Add(p.Request)
		u.item.Priority = min(u.item.Priority, p.Priority) // As in package gang.
		if p.Created.Before(u.item.Created) {
			u.item.Created = p.Created
		}
		if p.notBefore.After(u.notBefore) {
			u.notBefore = p.notBefore
		}
	}
	u.kind, u.item.Value = m.kinds.kindOf(pods), u
	u.kind.units++
	if m.units[id] = u; !u.notBefore.IsZero() {
		m.pausing[id] = u
	}
	m.queue.Add(u.item)
}

func (m *Manager) removeUnit(u *unit) {
	for _, p := range u.pods {
		if p.unit == u {
			p.unit = nil
		}
	}
	if m.units[u.item.ID] == u {
		if u.kind.units--; u.kind.units == 0 && !m.leading {
			m.kinds.drop(u.kind) // Otherwise Tick does it.
		}
		delete(m.units, u.item.ID)
		delete(m.pausing, u.item.ID)
		m.queue.Remove(u.item.ID)
	}
}

// gatherGroups makes units of the members that wait: one of those that their group must bind together, and one of each that is
// placed alone. Members of a group of which too few exist are in none.
func (m *Manager) gatherGroups() {
	for _, key := range slices.SortedFunc(maps.Keys(m.members), gang.Key.Compare) {
		waiting := m.members[key]
		together, alone := m.Groups.Startable(key)
		var pods []*pod
		for _, uid := range together {
			if p := waiting[uid]; p != nil {
				pods = append(pods, p)
			}
		}
		in := map[*unit]bool{}
		gather := func(id string, pods []*pod) {
			if u := m.units[id]; u == nil || !u.has(pods) {
				m.addUnit(id, pods)
			}
			in[m.units[id]] = true
		}
		if len(pods) > 0 {
			gather(groupID(key), pods)
		}
		for _, uid := range alone {
			if p := waiting[uid]; p != nil {
				gather(p.unitID(), []*pod{p})
			}
		}
		for _, p := range waiting {
			if p.unit != nil && !in[p.unit] {
				m.removeUnit(p.unit)
			}
		}
	}
}

// has reports whether the unit consists of these pods.
func (u *unit) has(pods []*pod) bool {
	return len(u.pods) == len(pods) && !slices.ContainsFunc(pods, func(p *pod) bool { return p.unit != u })
}

// Tick ends charges that have lasted too long, and grants what fits. Only the leader may call it, several times a second, once
// the cache is synced.
func (m *Manager) Tick(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.now = now
	m.expire(now)
	m.forgetOutdated(now)
	freed := m.takeFreed()
	all, some := m.retry(now)
	if m.changed || m.incomplete || m.pauseEnded(now) || len(m.units)+len(m.members) > 0 && (all || some || len(freed) > 0) {
		m.round(all, freed, now)
	}
	m.reclaim(now)
	m.openGates(now)
}

// forgetOutdated drops what was computed from nodes that have changed since, and results that are too old. A round that was cut short
// goes on with what it had: otherwise its last units would never get their turn.
func (m *Manager) forgetOutdated(now time.Time) {
	m.feasible.expire(now)
	if !m.incomplete && m.nodesChanged.Swap(false) {
		clear(m.eligible)
		m.regions = nil
		clear(m.feasible.results)
		m.retryAll = time.Time{}
	}
}

// takeFreed returns the nodes on which resources were freed since the latest Tick. If there are many, all nodes are tried.
func (m *Manager) takeFreed() []string {
	freed, tooMany := m.freed.take()
	if tooMany {
		m.retryAll = time.Time{}
	}
	return slices.Sorted(maps.Keys(freed)) // Of equally good nodes the ledger takes the first.
}

// retry makes kinds that had no room be tried on all nodes again. Every retryInterval all of them become due, a part of them in each
// round; after a change that can help any of them they are tried at once. all is true if they have become due now, some if there are
// any for this round. A round that was cut short goes on first.
func (m *Manager) retry(now time.Time) (all, some bool) {
	if m.incomplete {
		return false, false
	}
	atOnce := m.retryAll.IsZero()
	if all = !now.Before(m.retryAll); all {
		m.due = m.kinds.tried()
		slices.SortFunc(m.due, func(a, b *kind) int { return a.compare(b.kindKey) })
		m.retries = max(leastRetries, len(m.due)/retryRounds)
		m.retryAll = now.Add(retryInterval)
		if len(m.eligible) > maxConstraints {
			clear(m.eligible) // Most are those of pods that are gone.
		}
	}
	n := min(len(m.due), m.retries)
	if atOnce {
		n = len(m.due)
	}
	for _, kind := range m.due[:n] {
		kind.obstacle = Untried
	}
	m.due = m.due[n:]
	return all, n > 0
}

// expire ends the charges of pods that were not bound in time.
func (m *Manager) expire(now time.Time) {
	for _, p := range m.charged {
		if now.Before(p.expires) {
			continue
		}
		m.GiveUpPlace(p.UID)
		if _, _, held := m.Ledger.Lookup(p.UID); held { // A bind is in flight, or the plan of a group has the place.
			p.expires = now.Add(extension)
			continue
		}
		p.notBefore = now.Add(min(minPause<<min(p.failures, 10), maxPause))
		p.failures++
		m.endCharge(p)
		m.Observer.ChargeExpired()
		m.refresh(p)
	}
}

// endCharge ends the pod's charge and releases its place, unless a bind has it. It does nothing for a pod without a charge.
func (m *Manager) endCharge(p *pod) {
	if !p.charged() {
		return
	}
	p.charge, p.expires = uncharged, time.Time{}
	delete(m.charged, p.UID)
	m.admissions.update(p)
	if p.Node == "" {
		m.GiveUpPlace(p.UID)
	} else {
		m.places.remove(p.UID) // The bound allocation has replaced it.
	}
}

// openPods counts the granted pods with a place that aren't bound yet.
type openPods struct {
	byTenant map[string]int
	// total counts sharedOpen of a tenant at most: a large group exceeds that, and must not take the turns of others.
	total int
}

func (o *openPods) add(tenant string, pods int) {
	former := o.byTenant[tenant]
	o.byTenant[tenant] = former + pods
	o.total += min(former+pods, sharedOpen) - min(former, sharedOpen)
}

// mayGrant reports whether more pods of the tenant may be granted.
func (o *openPods) mayGrant(tenant string) bool {
	return o.total < maxOpen-sharedOpen || o.byTenant[tenant] < ownOpen
}

func (m *Manager) openPods() *openPods {
	open := &openPods{byTenant: map[string]int{}}
	for _, p := range m.charged {
		if p.charge == placed {
			open.add(p.countedFor, 1)
		}
	}
	return open
}

// round grants what fits, in the order of the queue. all is true if all nodes are tried, not only those on which something was freed.
func (m *Manager) round(all bool, freed []string, now time.Time) {
	m.changed = false
	m.setFreed(freed)
	m.gatherGroups()
	m.grantHeld(now)
	m.pause(now)
	capacity := m.capacity(true)
	m.rounds, m.effort = m.rounds+1, 0
	m.placeProvisioned(all, capacity, now)
	m.grantInOrder(capacity, now)
	m.provision(now)
	if m.incomplete {
		for _, node := range freed {
			m.freed.add(node) // For the units that were not tried.
		}
	}
}

// setFreed sets the nodes on which resources were freed since the former round.
func (m *Manager) setFreed(names []string) {
	m.freedAny = len(names) > 0
	for _, nodes := range m.eligible {
		nodes.setFreed(names)
	}
}

// capacity returns a new count of what nodes have free besides GPU memory; nil if nothing else counts.
func (m *Manager) capacity(withHeld bool) ledger.Capacity {
	if m.Capacity == nil {
		return nil
	}
	return m.Capacity(withHeld)
}

// grantInOrder offers the units in the order of the queue until too many pods are open or the effort is used up.
func (m *Manager) grantInOrder(capacity ledger.Capacity, now time.Time) {
	clear(m.holding)
	t := &turns{Manager: m, capacity: capacity, now: now, open: m.openPods(), tenants: map[string]*tenantTurns{}}
	r := m.queue.Round()
	item, more := r.Next()
	for ; more && t.open.total < maxOpen && m.effort < maxEffort; item, more = r.Next() {
		u := item.Value.(*unit)
		switch places, leave := t.offer(u); {
		case places != nil:
			r.Grant()
			t.grant(u, places)
		case leave:
			r.Leave()
		default:
			r.Pass()
		}
	}
	m.incomplete = t.cut || more && m.effort >= maxEffort
}

// turns is the state of grantInOrder.
type turns struct {
	*Manager
	capacity ledger.Capacity
	now      time.Time
	open     *openPods
	tenants  map[string]*tenantTurns
	// latest is the tenant of the latest unit: there can be thousands of units of one tenant, one after the other.
	latest *tenantTurns
	// cut is true if a tenant has used up its effort.
	cut bool
}

// tenantTurns is what grantInOrder knows of a tenant.
type tenantTurns struct {
	name string
	// head is the first unit that has no room; nil if there is none so far.
	head   *unit
	effort int
}

func (t *turns) of(tenant string) *tenantTurns {
	if t.latest == nil || t.latest.name != tenant {
		if t.latest = t.tenants[tenant]; t.latest == nil {
			t.latest = &tenantTurns{name: tenant}
			t.tenants[tenant] = t.latest
		}
	}
	return t.latest
}

// offer reserves places for the pods of a unit, if there is room. leave is true if the tenant's later units don't get their turn in this
// round.
func (t *turns) offer(u *unit) (places []ledger.Reservation, leave bool) {
	own := t.of(u.item.Tenant)
	switch {
	case !t.open.mayGrant(u.item.Tenant):
		return nil, true
	case u.paused || own.head != nil && u.kind.obstacle != Untried && u.kind.hasNoRoom(t.rounds):
		return nil, false // There can be thousands of these.
	case own.effort >= ownEffort:
		t.cut = true
		return nil, true
	}
	before := t.effort
	places = t.try(u, t.capacity, t.now)
	own.effort += t.effort - before
	if places == nil && own.head == nil && u.kind.obstacle == NoRoom {
		own.head = u
		if t.holdsOthers(u, t.now) {
			t.holding[u.item.Tenant] = u
			return nil, true
		}
	}
	return places, false
}

// grant grants a unit, and notes that it has overtaken the tenant's first one without room.
func (t *turns) grant(u *unit, places []ledger.Reservation) {
	t.Manager.grant(u, places, t.now)
	t.open.add(u.item.Tenant, len(u.pods))
	if head := t.of(u.item.Tenant).head; head != nil && head.overtaken.IsZero() {
		head.overtaken = t.now
	}
}

// pause marks the units that pause.
func (m *Manager) pause(now time.Time) {
	for _, u := range m.pausing {
		u.paused = now.Before(u.notBefore)
	}
}

// pauseEnded reports whether the pause of a unit ended since the latest round.
func (m *Manager) pauseEnded(now time.Time) bool {
	for _, u := range m.pausing {
		if u.paused && !now.Before(u.notBefore) {
			return true
		}
	}
	return false
}

// placeProvisioned reserves places for pods that were granted without one, before others take the nodes that were added for them. From
// then on their charges end like others.
func (m *Manager) placeProvisioned(all bool, capacity ledger.Capacity, now time.Time) {
	for _, u := range m.provisioned() {
		var places []ledger.Reservation
		if requests := m.requests(u, !all); requests != nil {
			places, _ = m.Ledger.ReserveAll(requests, nil, m.viewAt(now), capacity, now)
		}
		if places == nil {
			continue
		}
		for i, p := range u.pods {
			m.place(p, places[i], now)
		}
		m.effects.Requeue = true
	}
}

// provisioned returns the pods that were granted without a place, the oldest first, and members of a group together.
func (m *Manager) provisioned() (units []*unit) {
	pods := slices.DeleteFunc(slices.Collect(maps.Values(m.charged)), func(p *pod) bool { return p.charge != unplaced })
	slices.SortFunc(pods, func(a, b *pod) int { return cmp.Or(a.Created.Compare(b.Created), cmp.Compare(a.UID, b.UID)) })
	groups := map[gang.Key]*unit{}
	for _, p := range pods {
		u := groups[p.Group]
		if u == nil || p.Group == (gang.Key{}) {
			u = &unit{}
			units, groups[p.Group] = append(units, u), u
		}
		u.pods = append(u.pods, p)
	}
	return units
}

// place records the place of a granted pod.
func (m *Manager) place(p *pod, where ledger.Reservation, now time.Time) {
	p.charge, p.expires = placed, now.Add(chargeLife)
	if !where.Existing {
		m.places.add(p.UID, where.Node)
	}
}

// try reserves places for the pods of a unit. It returns nil if they don't fit now.
func (m *Manager) try(u *unit, capacity ledger.Capacity, now time.Time) (places []ledger.Reservation) {
	if !u.kind.hasNoRoom(m.rounds) {
		places = m.reserve(u, capacity, now)
	}
	if places != nil {
		return places
	}
	u.kind.fail(m.rounds)
	if u.kind.obstacle == Untried {
		if u.kind.obstacle = NoRoom; !m.everFits(u) {
			u.kind.obstacle = NeverFits
		}
	}
	return nil
}

// reserve reserves places for the pods of a unit on all nodes, or on those on which something was freed if the unit had no room before.
// It returns nil if they don't fit now.
func (m *Manager) reserve(u *unit, capacity ledger.Capacity, now time.Time) (places []ledger.Reservation) {
	hadNoRoom := u.kind.obstacle != Untried
	if hadNoRoom && !m.freedAny {
		return nil
	}
	if !hadNoRoom {
		m.effort++
	}
	if requests := m.requests(u, hadNoRoom); requests != nil {
		if preferred := m.preferred(u, requests); preferred != nil {
			places, _ = m.Ledger.ReserveAll(preferred, nil, m.viewAt(now), capacity, now)
		}
		if places == nil {
			places, _ = m.Ledger.ReserveAll(requests, nil, m.viewAt(now), capacity, now)
		}
	}
	return places
}

// viewAt returns the view for granted pods. They avoid memory that a pod is about to get from filter, which would be rejected at its bind.
func (m *Manager) viewAt(now time.Time) ledger.View {
	view := m.View
	view.TentativeAt = now
	return view
}

// obstacle returns why the unit was not granted in the latest round.
func (m *Manager) obstacle(u *unit) Obstacle {
	switch {
	case u.paused:
		return Paused
	case u.kind.obstacle == NeverFits:
		return NeverFits
	case m.holding[u.item.Tenant] != nil && m.holding[u.item.Tenant] != u:
		return Behind
	}
	return u.kind.obstacle
}

// requests returns what the ledger must place. If the unit had no room before, only nodes on which something was freed can have
// room now; it returns nil if there is none. Of several pods, some may fit where nothing was freed.
func (m *Manager) requests(u *unit, hadNoRoom bool) []ledger.Request {
	requests, freed := make([]ledger.Request, len(u.pods)), false
	for i, p := range u.pods {
		nodes := m.nodesFor(p)
		requests[i] = ledger.Request{Pod: p.Pod.Pod, Nodes: nodes.names}
		if freed = freed || len(nodes.freed) > 0; hadNoRoom && len(u.pods) == 1 {
			requests[i].Nodes = nodes.freed
		}
	}
	if hadNoRoom && !freed {
		return nil
	}
	return requests
}

// nodesFor returns the eligible nodes of the pod.
func (m *Manager) nodesFor(p *pod) *eligibleNodes { return m.eligibleFor(p.Constraints) }

// eligibleFor returns the eligible nodes of pods with the constraints.
func (m *Manager) eligibleFor(constraints unique.Handle[string]) *eligibleNodes {
	nodes, known := m.eligible[constraints]
	if !known {
		m.effort += constraintsEffort
		nodes = newEligibleNodes(m.EligibleNodes(constraints))
		m.eligible[constraints] = nodes
	}
	return nodes
}

// holdsOthers reports whether the tenant's later units wait for this one, which has no room. Each time that this hasn't helped they
// overtake it for longer: perhaps there will never be room, for its CPU for example.
func (m *Manager) holdsOthers(u *unit, now time.Time) bool {
	patience := patience << min(u.waits, maxDoublings)
	if u.overtaken.IsZero() || now.Sub(u.overtaken) < patience {
		return false
	}
	if now.Sub(u.overtaken) >= patience+maxWait {
		u.overtaken = time.Time{} // It begins again with the next unit that overtakes it.
		u.waits++
		return false
	}
	return true
}

// grant charges the pods of a unit, whose places are in their order. Without places they get them later, see placeProvisioned.
func (m *Manager) grant(u *unit, places []ledger.Reservation, now time.Time) {
	m.removeUnit(u)
	for i, p := range u.pods {
		if p.charge, p.expires = unplaced, now.Add(provisionLife); places != nil {
			m.place(p, places[i], now)
		}
		m.leaveGroup(p)
		p.counted, p.countedFor = p.Request, u.item.Tenant // The queue has charged the tenant.
		m.charged[p.UID] = p
		m.admissions.update(p)
		if p.Gated && p.gate != gateOpened {
			m.gated[p.UID] = p
		} else {
			m.effects.Requeue = true
		}
		m.Observer.PodGranted(max(now.Sub(p.Created), 0)) // The API server's clock can be ahead.
	}
}

// provision grants pods that fit nowhere now and would fit an empty node.
func (m *Manager) provision(now time.Time) {
	free := m.Provisioning
	for _, p := range m.charged {
		if p.charge == unplaced {
			free--
		}
	}
	r := m.queue.Round()
	for item, ok := r.Next(); ok && free > 0; item, ok = r.Next() {
		if u := item.Value.(*unit); m.obstacle(u) == NoRoom && !m.makesRoom(u) && len(u.pods) <= free {
			r.Grant()
			m.grant(u, nil, now)
			free -= len(u.pods)
		} else {
			r.Pass()
		}
	}
}

// gateRetry is the pause between two attempts to open a gate.
const gateRetry = time.Second

// MaxOpening limits the writes in flight that open gates.
const MaxOpening = 64

// openGates requests the writes that open the gates of granted pods, and of pods that need no turn.
func (m *Manager) openGates(now time.Time) {
	var due []*pod
	inFlight := 0
	for _, p := range m.gated {
		switch {
		case p.gate == gateOpening:
			inFlight++
		case !now.Before(p.gateRetry):
			due = append(due, p)
		}
	}
	// Granted pods hold memory, so they go first.
	slices.SortFunc(due, func(a, b *pod) int {
		return cmp.Or(a.expiry(now).Compare(b.expiry(now)), cmp.Compare(a.UID, b.UID))
	})
	for _, p := range due[:min(len(due), max(MaxOpening-inFlight, 0))] {
		p.gate = gateOpening
		m.effects.Open = append(m.effects.Open, p.Pod.Pod)
	}
}

// expiry returns when the pod's charge ends; a late time if there is none.
func (p *pod) expiry(now time.Time) time.Time {
	if p.expires.IsZero() {
		return now.Add(time.Hour)
	}
	return p.expires
}

// GateOpened records whether the gate of a pod was opened. If not, it is tried again as long as the pod is to have none.
func (m *Manager) GateOpened(uid gpu.PodUID, opened bool, now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.pods[uid]
	if p == nil {
		return
	}
	if opened {
		p.gate = gateOpened
		delete(m.gated, uid)
	} else {
		p.gate, p.gateRetry = gateClosed, now.Add(gateRetry)
	}
}
