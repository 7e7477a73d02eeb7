package gang

import (
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Ticket is a bind that is held, or that was let go at once.
type Ticket struct {
	// Ended is closed when the wait is over; the rest may be read then.
	Ended    chan struct{}
	why      *Reason
	opened   time.Time
	proof    bool
	group    *group
	deadline time.Time
}

// Refused returns the reason why the member can't be bound, nil if it may be.
func (t *Ticket) Refused() *Reason { return t.why }

// Opened is when the barrier opened: what a bind may take counts from then.
func (t *Ticket) Opened() time.Time { return t.opened }

// Proof says that the pod is to be marked: all other members that its group needs are bound.
func (t *Ticket) Proof() bool { return t.proof }

func (t *Ticket) end(why Reason) {
	t.why = &why
	close(t.Ended)
}

func (t *Ticket) letGo(opened time.Time, proof bool) {
	t.opened, t.proof = opened, proof
	close(t.Ended)
}

// Arrive is told that kube-scheduler binds the pod to the node. It returns a ticket to wait with; or none, and the reason
// why the pod can't be bound.
func (b *Book) Arrive(uid gpu.PodUID, node string, now time.Time) (*Ticket, *Reason) {
	b.mu.Lock()
	defer b.mu.Unlock()
	m := b.members[uid]
	if m == nil {
		return nil, &Unknown
	}
	g := b.groups[m.Group]
	g.judge(now)
	ticket := &Ticket{Ended: make(chan struct{}), group: g, deadline: now.Add(b.Hold)}
	if m.Cardless {
		ticket.letGo(now, false)
		return ticket, nil
	}
	if why := b.invalid(g, m); why != nil {
		return nil, why
	}
	if g.whole {
		ticket.letGo(now, true)
		return ticket, nil
	}
	var s *seat
	if g.plan != nil {
		s = g.plan.seats[uid]
	}
	switch {
	case g.binding():
		return nil, &Binding
	case s == nil, s.node != "" && s.node != node:
		return nil, &Changed
	}
	if s.ticket != nil {
		s.ticket.end(Changed) // kube-scheduler gave that call up.
	}
	if g.plan.arrived() == 0 {
		g.plan.came = now
	}
	s.ticket = ticket
	if g.plan.arrived() == len(g.plan.seats) {
		b.open(g, now)
	}
	return ticket, nil
}

// open lets the binds go that are held: all but one, which goes when the others are bound.
func (b *Book) open(g *group, now time.Time) {
	p := g.plan
	for uid, s := range p.seats {
		if s.node != "" && !b.Ledger.Stands(uid) {
			b.drop(g, PlaceLost, now, true)
			return
		}
	}
	p.opened = now
	b.Observer.GangHeld(now.Sub(p.came))
	for uid := range p.seats {
		p.last = max(p.last, uid)
	}
	for uid, s := range p.seats {
		if uid != p.last {
			s.ticket.letGo(now, false)
			s.ticket, s.owned = nil, false
		}
	}
	b.advance(g, now)
}

// advance goes on with a plan that is being carried out, once the binds under way have ended.
func (b *Book) advance(g *group, now time.Time) {
	p := g.plan
	bound := 0
	for uid, s := range p.seats {
		switch {
		case uid != p.last && !s.ended:
			return
		case s.bound:
			bound++
		}
	}
	last := p.seats[p.last]
	switch {
	case last.ended:
		b.conclude(g, bound, now)
	case last.ticket == nil:
		// It is being bound.
	case bound == len(p.seats)-1:
		last.ticket.letGo(p.opened, true)
		last.ticket, last.owned = nil, false
	default:
		last.ticket.end(NotBound)
		last.ticket = nil
		if last.owned {
			b.Release(p.last)
		}
		b.conclude(g, bound, now)
	}
}

// Leave is told that nobody waits with the ticket any more. It says whether the bind is off: otherwise it has been let go
// meanwhile, or the others are being bound, and it is to be waited for.
func (b *Book) Leave(uid gpu.PodUID, ticket *Ticket) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	select {
	case <-ticket.Ended:
		return ticket.why != nil
	default:
	}
	if ticket.group.binding() {
		return false
	}
	// Who holds a ticket that hasn't ended has a seat.
	ticket.group.plan.seats[uid].ticket = nil
	ticket.end(Changed)
	return true
}

// Bound is told how the bind of a member ended that its ticket had let go.
func (b *Book) Bound(key Key, uid gpu.PodUID, node string, ok, proof bool, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	g := b.groups[key]
	if g == nil {
		return // Everybody is gone.
	}
	if m := g.members[uid]; m != nil && ok && m.Node == "" {
		m.Node, m.Proof, m.bound = node, proof, true
	}
	g.recount()
	if !g.binding() || g.plan.seats[uid] == nil {
		return
	}
	s := g.plan.seats[uid]
	s.ended, s.bound = true, ok
	b.advance(g, now)
}

// conclude ends a plan whose binds have all ended.
func (b *Book) conclude(g *group, bound int, now time.Time) {
	p := g.plan
	g.plan, g.offers, g.stale = nil, nil, true
	if bound == len(p.seats) {
		g.whole, g.broken, g.failures = true, false, 0
		b.effects.Bound = append(b.effects.Bound, g.priority())
		b.Observer.GangBound()
		b.tell(g, false, EventBound, "All members of the group are bound")
		b.forgetEmpty(g)
		return
	}
	g.broken = !g.whole
	b.pause(g, now)
	b.Observer.GangFailed(NotBound.Label)
	b.tell(g, true, EventNotBound, "Not all members of the group could be bound")
	g.judge(now)
	b.forgetEmpty(g)
}
