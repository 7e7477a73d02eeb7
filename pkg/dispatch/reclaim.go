package dispatch

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reclaim"
)

const (
	// reclaimInterval is the interval at which tenants below their share are looked for.
	reclaimInterval = time.Second
	// maxReclaim limits the pods that get room by one attempt: not more than can be granted at one time.
	maxReclaim = maxOpen
	// holdLife is how long places are held for pods whose victims don't end, freedLife for how long after the victims are gone.
	holdLife, freedLife = 10 * time.Minute, 10 * time.Second
	// evictionLag is how long after an attempt the watch must show that the victims are being deleted.
	evictionLag = time.Minute
	// minReclaimPause is the pause of a tenant's units of one kind after an attempt without success; it doubles each time, up to maxPause.
	minReclaimPause = 10 * time.Second
	// maxDelays limits how often a unit's wait for a reclaim doubles because it wasn't bound after its turn.
	maxDelays = 6
)

// reclaims is the state of reclaiming, guarded by the Manager's lock. At most one attempt is made at a time. A new leader forgets
// what the former one did, and sees it in the pods that are being deleted.
type reclaims struct {
	checked time.Time
	// since is when this process began to lead.
	since time.Time
	// below is since when each tenant has been below its share with a unit that has no room.
	below    map[string]time.Time
	pauses   map[reclaimKind]reclaimPause
	attempts uint64
	// attempt is nil if none is in progress.
	attempt *attempt
	// charged is what the queue counts for the places that are held, by tenant: it isn't the turn of a tenant's later pods for what
	// the held ones will have.
	charged map[string]gpu.Memory
	// moved is when pods of each tenant were last evicted that left it with less than its share: it gets other room at once.
	moved map[string]time.Time
}

// newReclaims returns the state of a new leader. attempts is how many this process has made before: a late result of one of these
// must not be taken for that of a new one.
func newReclaims(attempts uint64) reclaims {
	return reclaims{attempts: attempts, pauses: map[reclaimKind]reclaimPause{}, moved: map[string]time.Time{}}
}

// reclaimKind is a kind of units of a tenant.
type reclaimKind struct {
	tenant string
	kind   kindKey
}

func (u *unit) reclaimKind() reclaimKind { return reclaimKind{u.item.Tenant, u.kind.kindKey} }

type reclaimPause struct {
	until  time.Time
	length time.Duration
}

// attempt is the attempt to make room for units.
type attempt struct {
	number uint64
	// kinds are those of its units, by the first pod of each.
	kinds map[gpu.PodUID]reclaimKind
	// evicts is false if it only holds what pods that are being deleted will free.
	evicts bool
	// allocated is what the tenants had when places were held for them.
	allocated map[string]gpu.Memory
	// moved are the tenants of which pods are to be evicted that must move.
	moved map[string]bool
	// working is true while the caller evicts.
	working bool
	// held are the units for which places are held.
	held []*heldUnit
	// pods are the pods of held.
	pods map[gpu.PodUID]bool
}

// heldUnit is a unit for which places are held until its victims are gone.
type heldUnit struct {
	reclaimKind
	places []ledger.HeldPlace
	// awaited are the victims on its nodes.
	awaited []gpu.PodUID
	// evicted is when the evictions were made, freed when the last of them was gone.
	evicted, freed time.Time
}

// reclaim looks for tenants below their share, and requests what makes room for them.
func (m *Manager) reclaim(now time.Time) {
	if m.reclaims.since.IsZero() {
		m.reclaims.since = now
	}
	if m.ReclaimAfter <= 0 || now.Sub(m.reclaims.checked) < reclaimInterval {
		return
	}
	m.reclaims.checked = now
	tenants, units := m.standings()
	m.steer(units)
	starving := m.starving(tenants, units, now)
	m.endFailedHolds(starving, now)
	if m.reclaims.attempt == nil {
		m.beginAttempt(tenants, units, starving, now)
	}
}

// starvingTenant is a tenant below its share.
type starvingTenant struct {
	Tenant
	// units are those with which it would still have no more than its share. A tenant that has nothing gets its first one in any case.
	units []*unit
}

// starving returns the tenants that are below their share although something of theirs could run, in the order of their turns.
func (m *Manager) starving(tenants []Tenant, units [][]*unit, now time.Time) (out []starvingTenant) {
	below := map[string]time.Time{}
	for i, t := range tenants {
		s := starvingTenant{Tenant: t}
		m.addStarving(&s, units[i], true, now)
		m.addStarving(&s, units[i], false, now)
		if len(s.units) > 0 {
			below[t.Name] = now
			if since, known := m.reclaims.below[t.Name]; known {
				below[t.Name] = since
			}
			out = append(out, s)
		}
	}
	m.reclaims.below = below
	return out
}

// addStarving adds the units that fit into the tenant's share and lack only memory: those for which places are held if held is true,
// else the others. For held ones, what the tenant got since the places were held doesn't count against the share. Otherwise a hold
// would end although pods were evicted for it.
func (m *Manager) addStarving(s *starvingTenant, units []*unit, held bool, now time.Time) {
	allocated := s.Allocated
	if held && m.reclaims.attempt != nil {
		allocated = min(allocated, m.reclaims.attempt.allocated[s.Name])
	}
	for _, u := range s.units {
		allocated = allocated.Add(u.item.Memory)
	}
	for _, u := range units {
		first, left := allocated == 0, s.Share.Sub(allocated)
		if m.makesRoom(u) != held || left == 0 || !m.reclaimable(u, now) || u.item.Memory > left && !first {
			continue
		}
		s.units, allocated = append(s.units, u), allocated.Add(u.item.Memory)
	}
}

// reclaimable reports whether nothing but memory seems to keep the unit from running. One that was not bound after an earlier turn
// counts only much later: others would be evicted for it again and again.
func (m *Manager) reclaimable(u *unit, now time.Time) bool {
	if o := m.obstacle(u); o == NeverFits || o == Paused {
		return false
	}
	return !slices.ContainsFunc(u.pods, func(p *pod) bool {
		return p.failures > 0 && now.Sub(p.notBefore) < m.ReclaimAfter<<min(p.failures, maxDelays)
	})
}

// beginAttempt requests room for the tenants that have been below their share for long enough.
//
// The former leader may have evicted pods that are still being deleted. So a new leader evicts none for ReclaimAfter, but it holds
// what they free.
func (m *Manager) beginAttempt(tenants []Tenant, allUnits [][]*unit, starving []starvingTenant, now time.Time) {
	ripe := slices.DeleteFunc(slices.Clone(starving), func(s starvingTenant) bool {
		return now.Sub(m.reclaims.below[s.Name]) < m.ReclaimAfter && !m.movedRecently(s.Name, now)
	})
	evicts := len(ripe) > 0
	if !evicts && now.Sub(m.reclaims.since) < m.ReclaimAfter && m.anyLeaving() {
		ripe = starving
	}
	units := m.reclaimUnits(ripe, now)
	if len(units) == 0 {
		return
	}
	need := reclaim.Need{Tenants: m.excess(tenants)}
	if evicts {
		candidates := m.candidates(now)
		need.Regions, need.Classes = m.findMoves(need.Tenants, tenants, allUnits, candidates)
		need.Victims = victims(need.Tenants, candidates)
	}
	r := &m.reclaims
	r.attempts++
	need.Attempt = r.attempts
	r.attempt = &attempt{number: r.attempts, working: true, evicts: evicts, kinds: map[gpu.PodUID]reclaimKind{}}
	for _, u := range units {
		out := reclaim.Unit{Tenant: u.item.Tenant}
		for _, p := range u.pods {
			out.Pods = append(out.Pods, reclaim.Pod{Pod: p.Pod.Pod, Nodes: m.nodesFor(p).names})
		}
		need.Units = append(need.Units, out)
		r.attempt.kinds[u.pods[0].UID] = u.reclaimKind()
	}
	m.effects.Reclaim = &need
}

// reclaimUnits returns the units that get room by the next attempt: those of each tenant alternately.
func (m *Manager) reclaimUnits(starving []starvingTenant, now time.Time) (units []*unit) {
	pods := 0
	for i := 0; ; i++ {
		more := false
		for _, s := range starving {
			if i >= len(s.units) {
				continue
			}
			more = true
			u := s.units[i]
			if now.Before(m.reclaims.pauses[u.reclaimKind()].until) || m.obstacle(u) != NoRoom {
				continue
			}
			if pods += len(u.pods); pods > maxReclaim && len(units) > 0 {
				return units
			}
			units = append(units, u)
		}
		if !more {
			return units
		}
	}
}

// movedRecently reports whether the tenant has lost pods that it is to have elsewhere.
func (m *Manager) movedRecently(tenant string, now time.Time) bool {
	return now.Sub(m.reclaims.moved[tenant]) < holdLife
}

func (m *Manager) anyLeaving() bool {
	for _, p := range m.pods {
		if p.Node != "" && p.Leaving && !p.Ended {
			return true
		}
	}
	return false
}

// excess returns what each tenant has and deserves, and how much of it can be evicted. Pods that are granted and not bound yet
// don't count for that.
func (m *Manager) excess(tenants []Tenant) map[string]reclaim.Standing {
	out := map[string]reclaim.Standing{}
	for _, t := range tenants {
		out[t.Name] = reclaim.Standing{Share: t.Share, Allocated: t.Allocated}
	}
	running := map[string]gpu.Memory{}
	for _, p := range m.pods {
		if p.Node != "" && !p.Leaving && p.counted > 0 {
			running[p.countedFor] = running[p.countedFor].Add(p.counted)
		}
	}
	for name, amount := range running {
		s := out[name]
		s.Excess = amount.Sub(s.Share)
		out[name] = s
	}
	return out
}

// candidate is a pod or a group that could be evicted if its tenant had enough.
type candidate struct {
	reclaim.Victim
	// pods are in the order of Victim.Pods.
	pods []*pod
}

// victims returns the candidates whose eviction leaves their tenants their share, there or elsewhere, the newest first.
func victims(standings map[string]reclaim.Standing, candidates []candidate) (victims []reclaim.Victim) {
	none := reclaim.NewTally(standings)
	for i := range candidates {
		if v := &candidates[i].Victim; none.WithinExcess(v) || none.CanMove(v) {
			victims = append(victims, *v)
		}
	}
	slices.SortFunc(victims, func(a, b reclaim.Victim) int {
		return cmp.Or(b.Started.Compare(a.Started), cmp.Compare(a.Pods[0].UID, b.Pods[0].UID))
	})
	return victims
}

// candidates returns the pods and groups that could be evicted if their tenants had enough.
func (m *Manager) candidates(now time.Time) (candidates []candidate) {
	groups, spared := map[gang.Key][]*pod{}, map[gang.Key]bool{}
	add := func(pods []*pod) {
		slices.SortFunc(pods, func(a, b *pod) int { return cmp.Compare(a.UID, b.UID) })
		c := candidate{reclaim.Victim{Tenant: pods[0].countedFor, Started: pods[0].startedAt(now)}, pods}
		for _, p := range pods {
			c.Pods = append(c.Pods, p.Pod.Pod)
			if started := p.startedAt(now); started.Before(c.Started) {
				c.Started = started
			}
		}
		if now.Sub(c.Started) >= m.MinRuntime {
			candidates = append(candidates, c)
		}
	}
	for _, p := range m.pods {
		inGroup := p.Group != (gang.Key{})
		switch {
		case p.Ended:
		case inGroup && (p.charged() || p.Node != "" && p.Priority >= m.PriorityCutoff): // It is still being bound, or one of it needs no turn.
			spared[p.Group] = true
		case p.Node == "" || p.Leaving || p.counted == 0 || p.Priority >= m.PriorityCutoff:
		case inGroup:
			groups[p.Group] = append(groups[p.Group], p)
		default:
			add([]*pod{p})
		}
	}
	for key, pods := range groups {
		if !spared[key] {
			add(pods)
		}
	}
	return candidates
}

// startedAt returns when the pod was bound, as far as this process knows. Its result stays the same if the clock is set.
func (p *pod) startedAt(now time.Time) time.Time {
	if p.started.IsZero() {
		p.started = now
		if !p.Bound.IsZero() {
			p.started = now.Add(-max(now.Sub(p.Bound), 0))
		}
	}
	return p.started
}

// Hold holds the places of a plan for an attempt, before anything is evicted. It reports whether the plan is still right: the units
// still wait and ask for the same, their tenants are still below their share, and the victims may still be evicted: their tenants are
// above their share, and their groups have the same members.
func (m *Manager) Hold(attempt uint64, plan reclaim.Plan, now time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	a := m.reclaims.attempt
	if !m.leading || a == nil || a.number != attempt || a.held != nil {
		return false
	}
	tenants, units := m.standings()
	eligible := unitsOf(m.starving(tenants, units, now))
	moved, ok := m.evictable(plan, tenants, units, now)
	if !ok {
		return false
	}
	held, wrong := m.heldUnits(plan, eligible)
	if wrong != nil {
		first := wrong.Pods[0].UID
		a.kinds = map[gpu.PodUID]reclaimKind{first: a.kinds[first]} // The other units need no pause.
		return false
	}
	for _, kind := range a.kinds {
		if !slices.ContainsFunc(held, func(h *heldUnit) bool { return h.reclaimKind == kind }) {
			m.pauseReclaim(kind, a.evicts, now)
		}
	}
	a.held, a.moved, a.allocated = held, moved, map[string]gpu.Memory{}
	for _, t := range tenants {
		a.allocated[t.Name] = t.Allocated
	}
	m.updateHold()
	return true
}

// heldUnits returns the units for which a plan has places. wrong is one that doesn't wait for that any more; nil if all do.
func (m *Manager) heldUnits(plan reclaim.Plan, eligible map[*unit]bool) (held []*heldUnit, wrong *reclaim.Served) {
	for i := range plan.Served {
		s := &plan.Served[i]
		h := &heldUnit{awaited: s.Awaited}
		for j, place := range s.Places {
			h.places = append(h.places, ledger.HeldPlace{UID: s.Pods[j].UID, Node: place.Node, On: place.On, Unit: i + 1})
		}
		u := m.unitOf(h)
		if u == nil || !eligible[u] || !m.unchanged(s) {
			return nil, s
		}
		h.reclaimKind = u.reclaimKind()
		held = append(held, h)
	}
	return held, nil
}

// evictable reports whether the victims of a plan may still be evicted. It returns the tenants of which pods must
// move.
func (m *Manager) evictable(plan reclaim.Plan, tenants []Tenant, units [][]*unit, now time.Time) (moved map[string]bool, ok bool) {
	if len(plan.Victims) == 0 {
		return nil, true
	}
	moved = map[string]bool{}
	standings, candidates := m.excess(tenants), m.candidates(now)
	m.findMoves(standings, tenants, units, candidates)
	present := map[gpu.PodUID]reclaim.Victim{}
	for _, c := range candidates {
		present[c.Pods[0].UID] = c.Victim
	}
	tally := reclaim.NewTally(standings)
	for _, moves := range []bool{false, true} { // In the order in which the plan was made.
		for _, e := range plan.Victims {
			v := present[e.Pods[0].UID]
			switch {
			case e.Moves != moves:
				continue
			case v.Tenant != e.Tenant || !slices.EqualFunc(v.Pods, e.Pods, samePod):
				return nil, false
			case tally.WithinExcess(&v):
			case moves && tally.CanMove(&v):
				moved[v.Tenant] = true
			default:
				return nil, false
			}
			tally.Add(&v)
		}
	}
	return moved, true
}

// samePod reports whether the pods are the same one. Users can change the label with the number of cards of a running pod, which means
// nothing then.
func samePod(a, b gpu.Pod) bool { return a.UID == b.UID }

// unchanged reports whether the pods ask for what they asked for, and can still use the nodes of their places.
func (m *Manager) unchanged(s *reclaim.Served) bool {
	for i, served := range s.Pods {
		p := m.pods[served.UID]
		if _, eligible := m.nodesFor(p).set[s.Places[i].Node]; !eligible || p.Pod.Pod != served.Pod {
			return false
		}
	}
	return true
}

// unitsOf returns the tenants' units.
func unitsOf(starving []starvingTenant) map[*unit]bool {
	out := map[*unit]bool{}
	for _, s := range starving {
		for _, u := range s.units {
			out[u] = true
		}
	}
	return out
}

// unitOf returns the unit for which the places are held, if it still waits and has the same pods; else nil.
func (m *Manager) unitOf(h *heldUnit) *unit {
	var u *unit
	for _, place := range h.places {
		p := m.pods[place.UID]
		if p == nil || p.unit == nil || u != nil && p.unit != u {
			return nil
		}
		u = p.unit
	}
	if len(u.pods) != len(h.places) {
		return nil
	}
	return u
}

// Reclaimed records that the work on an attempt has ended: the victims were evicted, or nothing was, or less. made is true if at
// least one eviction was made, or none was necessary.
func (m *Manager) Reclaimed(attempt uint64, made bool, now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	a := m.reclaims.attempt
	if a == nil || a.number != attempt {
		return
	}
	a.working = false
	if made {
		maps.DeleteFunc(m.reclaims.moved, func(_ string, at time.Time) bool { return now.Sub(at) >= holdLife })
		for name := range a.moved {
			m.reclaims.moved[name] = now
		}
	}
	for _, h := range a.held {
		h.evicted = now
	}
	if !made || len(a.held) == 0 {
		for _, kind := range a.kinds {
			m.pauseReclaim(kind, a.evicts, now)
		}
		m.endAttempt()
	}
}

// pauseReclaim pauses the units of a kind: for longer each time that nothing was achieved although pods could be evicted.
func (m *Manager) pauseReclaim(kind reclaimKind, evicts bool, now time.Time) {
	maps.DeleteFunc(m.reclaims.pauses, func(other reclaimKind, p reclaimPause) bool {
		return other != kind && now.Sub(p.until) > 2*(maxPause+holdLife) // Most have no pods any more.
	})
	last := m.reclaims.pauses[kind]
	if now.Before(last.until) {
		return // Several units of this kind fail at the same time.
	}
	length := minReclaimPause
	if evicts {
		length = min(max(minReclaimPause, 2*last.length), maxPause)
	}
	m.reclaims.pauses[kind] = reclaimPause{now.Add(length), length}
}

// endAttempt ends the attempt, if there is one, and what is held for it.
func (m *Manager) endAttempt() {
	if a := m.reclaims.attempt; a != nil {
		a.working = false
		m.endHolds(func(*heldUnit) bool { return true })
	}
}

// endHolds ends what the attempt holds for the units for which ends returns true, and the attempt if that was all.
func (m *Manager) endHolds(ends func(*heldUnit) bool) {
	a := m.reclaims.attempt
	before := len(a.held)
	if a.held = slices.DeleteFunc(a.held, ends); len(a.held) < before {
		m.updateHold()
	}
	if len(a.held) == 0 && !a.working {
		m.reclaims.attempt = nil
	}
}

// updateHold makes the ledger hold the places of the attempt's units. What they need besides GPU memory counts as taken too.
func (m *Manager) updateHold() {
	a := m.reclaims.attempt
	var places []ledger.HeldPlace
	former := m.reclaims.charged
	for name, amount := range former {
		m.queue.Release(name, amount)
	}
	m.reclaims.charged = map[string]gpu.Memory{}
	for _, h := range a.held {
		places = append(places, h.places...)
		for _, place := range h.places {
			m.reclaims.charged[h.tenant] = m.reclaims.charged[h.tenant].Add(place.On.Total())
		}
	}
	for name, amount := range m.reclaims.charged {
		m.queue.Charge(name, amount)
	}
	for name := range former {
		m.setTerms(name) // Its namespaces may be gone.
	}
	a.pods = make(map[gpu.PodUID]bool, len(places))
	for _, place := range places {
		a.pods[place.UID] = true
	}
	m.places.hold(places)
	m.Ledger.Hold(places, m.PriorityCutoff-1)
}

// grantHeld grants the units for which there is room now at their held places.
func (m *Manager) grantHeld(now time.Time) {
	a := m.reclaims.attempt
	if a == nil || a.working {
		return
	}
	capacity := m.capacity(false) // The plan has counted what all of them need.
	m.endHolds(func(h *heldUnit) bool { return m.grantUnit(h, capacity, now) })
}

// grantUnit grants a unit at its held places, if there is room.
func (m *Manager) grantUnit(h *heldUnit, capacity ledger.Capacity, now time.Time) (granted bool) {
	u := m.unitOf(h)
	if u == nil {
		return false
	}
	nodeOf := map[gpu.PodUID]string{}
	for _, place := range h.places {
		nodeOf[place.UID] = place.Node
	}
	requests := make([]ledger.Request, len(u.pods))
	for i, p := range u.pods {
		node := nodeOf[p.UID]
		if _, eligible := m.nodesFor(p).set[node]; !eligible {
			return false
		}
		requests[i] = ledger.Request{Pod: p.Pod.Pod, Nodes: []string{node}}
	}
	places, _ := m.Ledger.ReserveAll(requests, nil, m.View, capacity, now)
	if places == nil {
		return false
	}
	m.queue.Charge(u.item.Tenant, u.item.Memory)
	m.grant(u, places, now)
	delete(m.reclaims.pauses, h.reclaimKind)
	return true
}

// makesRoom reports whether pods were evicted for the unit and its places are held.
func (m *Manager) makesRoom(u *unit) bool {
	a := m.reclaims.attempt
	return a != nil && a.pods[u.pods[0].UID]
}

// holdsMemory reports whether the pod is bound and hasn't ended.
func (m *Manager) holdsMemory(uid gpu.PodUID) bool {
	p := m.pods[uid]
	return p != nil && p.Node != "" && !p.Ended
}

// endFailedHolds ends what is held for units that don't wait any more or whose tenants are not below their share, and for those whose
// victims don't end in time or didn't help.
func (m *Manager) endFailedHolds(starving []starvingTenant, now time.Time) {
	a := m.reclaims.attempt
	if a == nil || a.working {
		return
	}
	eligible := unitsOf(starving)
	m.endHolds(func(h *heldUnit) bool {
		if u := m.unitOf(h); u == nil || !eligible[u] {
			return true
		}
		if h.freed.IsZero() && !slices.ContainsFunc(h.awaited, m.holdsMemory) {
			h.freed = now
		}
		stays := now.Sub(h.evicted) >= evictionLag && slices.ContainsFunc(h.awaited, m.stays)
		failed := stays || now.Sub(h.evicted) >= holdLife || !h.freed.IsZero() && now.Sub(h.freed) >= freedLife
		if failed {
			m.pauseReclaim(h.reclaimKind, a.evicts, now)
			m.Observer.ReclaimFailed()
		}
		return failed
	})
}

// stays reports whether the pod is bound and isn't being deleted.
func (m *Manager) stays(uid gpu.PodUID) bool { return m.holdsMemory(uid) && !m.pods[uid].Leaving }

// dropHold ends what is held for a unit of which the pod is part, if there is anything.
func (m *Manager) dropHold(uid gpu.PodUID) {
	if m.reclaims.attempt != nil {
		m.endHolds(func(h *heldUnit) bool {
			return slices.ContainsFunc(h.places, func(p ledger.HeldPlace) bool { return p.UID == uid })
		})
	}
}
