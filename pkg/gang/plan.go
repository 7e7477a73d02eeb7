package gang

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// plan is a place for each member that a group needs, and the barrier before their binds.
type plan struct {
	seats   map[gpu.PodUID]*seat
	expires time.Time
	// opened is when the barrier opened, zero before.
	opened time.Time
	// last is the member that is bound when all others are, and thereby proves that they were.
	last gpu.PodUID
	// came is when the first member arrived in this round.
	came time.Time
	// most is how many arrived in the round in which most did, and gains says that it was the last one.
	most  int
	gains bool
}

// seat is one member's part of a plan.
type seat struct {
	// node is where its place is, empty for a member that kube-scheduler alone can place.
	node string
	// owned says that the plan made the reservation, and gives it back if it comes to nothing. Once the barrier has opened
	// a reservation is its bind's.
	owned  bool
	ticket *Ticket
	// ended says that its bind came to an end, bound that it succeeded.
	ended, bound bool
	// late says that it hadn't come when the others were sent back, and hasn't since.
	late bool
}

func (p *plan) isOpen() bool { return !p.opened.IsZero() }

// arrived counts the members whose binds are held.
func (p *plan) arrived() (n int) {
	for _, s := range p.seats {
		if s.ticket != nil {
			n++
		}
	}
	return n
}

// asksWhole says whether a member of the plan is placed by kube-scheduler alone.
func (p *plan) asksWhole() bool {
	for _, s := range p.seats {
		if s.node == "" {
			return true
		}
	}
	return false
}

const (
	// noRoomHolds is how long a plan that found no room is taken for the last word, whatever comes free: a group's
	// members all ask within milliseconds.
	noRoomHolds = 200 * time.Millisecond
	// noRoomLasts is how long it is while no memory comes free. Nodes can have become fit for other reasons.
	noRoomLasts = 2 * time.Second
)

// rests says whether what planning last said still holds.
func (g *group) rests(freed uint64, now time.Time) bool {
	ago := now.Sub(g.tried)
	return !g.tried.IsZero() && (ago < noRoomHolds || g.freed == freed && ago < noRoomLasts)
}

// makePlan places all members that the group still needs, or says why not. It needs the lock.
func (b *Book) makePlan(g *group, c census, now time.Time) (Reason, bool) {
	freed := b.freed.Load()
	if g.rests(freed, now) || !b.mayGo(g, freed, now) {
		return NoRoom, false
	}
	g.looked = freed
	chosen, ok := g.choose(c, g.isOffered)
	if !ok {
		return AwaitsOthers, false
	}
	wants, wanting := g.wants(chosen, func(m *member) []string { return g.offers[m.Template] })
	if len(wants) < len(chosen) && !b.takeTurn(g, now) {
		return OlderFirst, false
	}
	younger := b.younger(g)
	yielding := make([][]gpu.PodUID, len(younger))
	for i, o := range younger {
		for uid, s := range o.plan.seats {
			if s.owned {
				yielding[i] = append(yielding[i], uid)
			}
		}
	}
	places, yielded := b.Ledger.ReserveTogether(wants, yielding, b.View, now)
	if places == nil && len(wants) > 0 {
		g.tried, g.freed = now, freed
		return NoRoom, false
	}
	for _, o := range younger[:yielded] {
		b.drop(o, GaveWay, now, false)
	}
	p := &plan{seats: make(map[gpu.PodUID]*seat, len(chosen)), expires: now.Add(b.Patience)}
	for _, m := range chosen {
		p.seats[m.UID] = &seat{}
	}
	for i, m := range wanting {
		p.seats[m.UID].node, p.seats[m.UID].owned = places[i].Node, !places[i].Kept
	}
	g.plan, g.tried = p, time.Time{}
	for _, m := range chosen {
		if m.refused {
			b.wake(cmp.Or(p.seats[m.UID].node, anyOf(g.offers[m.Template])))
			break
		}
	}
	return Reason{}, true
}

const (
	// settled is how long nothing must come free until memory goes to a group though another waits that goes before it, and
	// settledAtLast how long that can take.
	settled       = 300 * time.Millisecond
	settledAtLast = time.Second
)

// flow is how memory comes free: the pods of a group that ends leave one after the other.
type flow struct {
	freed uint64
	// begun is when it began to, zero where it has ceased to; last is when it was last seen to.
	begun, last time.Time
}

// note is told how often memory had come free by now, and says whether it has ceased to. A pause between two calls that both see
// more of it counts for none, since nobody knows when it was: so nobody waits for longer than settledAtLast for one to be seen.
func (f *flow) note(freed uint64, now time.Time) bool {
	if freed != f.freed {
		if f.begun.IsZero() {
			f.begun = now
		}
		f.freed, f.last = freed, now
	}
	if now.Sub(f.last) >= settled {
		f.begun = time.Time{}
		return true
	}
	return now.Sub(f.begun) >= settledAtLast
}

// mayGo says whether all groups that go before g have had their chance. Else a small group would take what a large one is
// about to have room in, and give it back a moment later, with its members on their way: that costs both of them seconds.
func (b *Book) mayGo(g *group, freed uint64, now time.Time) bool {
	ceased := b.flow.note(freed, now)
	for _, o := range b.queue {
		switch {
		case o == g, o.plan != nil, o.waitingSince.IsZero(), len(o.offers) == 0, b.groups[o.key] != o:
			continue
		case !before(o, g):
			return true
		case !ceased, o.looked != freed && !o.rests(freed, now):
			return false // The next Tick asks all of them, in their order.
		}
	}
	return true
}

// isOffered says whether it is known where the member may go.
func (g *group) isOffered(m *member) bool {
	_, offered := g.offers[m.Template]
	return offered
}

// choose returns the members that are to be placed, of those that may be; or false where they are too few.
func (g *group) choose(c census, may func(*member) bool) ([]*member, bool) {
	chosen := g.sorted(func(m *member) bool { return m.waiting() && may(m) })
	need := g.size - c.running - c.done
	if len(chosen) < need {
		return nil, false
	}
	chosen = chosen[:need]
	// Large requests first, since they find a card less easily; those that are alike one after the other.
	slices.SortStableFunc(chosen, func(a, b *member) int {
		return cmp.Or(cmp.Compare(b.Request, a.Request), strings.Compare(a.Template, b.Template))
	})
	return chosen, true
}

// wants are what those of the members ask for that the ledger places.
func (g *group) wants(chosen []*member, nodes func(*member) []string) (wants []ledger.Want, wanting []*member) {
	for _, m := range chosen {
		if m.Request > 0 {
			wants, wanting = append(wants, ledger.Want{Pod: m.Pod, Nodes: nodes(m)}), append(wanting, m)
		}
	}
	return wants, wanting
}

// younger returns the groups whose plans give way to that of g, the first to do so first.
func (b *Book) younger(g *group) []*group {
	var out []*group
	for _, o := range b.groups {
		if o != g && o.plan != nil && !o.plan.isOpen() && before(g, o) {
			out = append(out, o)
		}
	}
	slices.SortFunc(out, func(a, b *group) int { return compare(b, a) })
	return out
}

// takeTurn says whether g may gather now. Nobody here knows whether whole cards are free for all of it, so of the groups
// that ask for them one gathers at a time: two would each take the half that the other needs.
func (b *Book) takeTurn(g *group, now time.Time) bool {
	for _, o := range b.groups {
		if o == g || o.plan == nil || o.plan.isOpen() || !o.plan.asksWhole() {
			continue
		}
		if before(o, g) {
			return false
		}
		b.drop(o, GaveWay, now, false)
	}
	return true
}

// drop gives a plan up whose barrier hasn't opened. A group at fault waits before it tries again. It needs the lock.
func (b *Book) drop(g *group, why Reason, now time.Time, atFault bool) {
	p := g.plan
	if p == nil || p.isOpen() {
		return
	}
	g.plan, g.stale = nil, true
	b.turnAway(p, why)
	for uid, s := range p.seats {
		if s.owned {
			b.Release(uid)
		}
	}
	if atFault {
		b.pause(g, now)
	}
	b.Observer.GangFailed(why.Label)
}

// timeOut sends back those who have been held for too long. Their places stay: they come again together. As long as each time
// more of them have come they are not given up.
func (b *Book) timeOut(p *plan, now time.Time) {
	arrived := p.arrived()
	if p.gains = arrived > p.most; p.gains {
		p.most, p.expires = arrived, now.Add(b.Patience)
	}
	for _, s := range p.seats {
		s.late = s.ticket == nil
	}
	b.Observer.GangFailed(TimedOut.Label)
	b.turnAway(p, TimedOut)
}

// joinsLate says that the member is to come again, right behind those who were sent back since it wasn't there: where
// kube-scheduler needs longer than a bind waits to go once through all who wait, it would be held now and sent back before they
// come, and so on in turns.
func (b *Book) joinsLate(p *plan, s *seat, now time.Time) bool {
	if !s.late {
		return false
	}
	s.late = false
	if p.gains {
		p.expires = now.Add(b.Patience)
	}
	return p.arrived() == 0
}

// turnAway fails the binds that are held.
func (b *Book) turnAway(p *plan, why Reason) {
	for _, s := range p.seats {
		if s.ticket != nil {
			s.ticket.end(why)
			s.ticket = nil
		}
	}
}

const (
	firstPause = time.Second
	lastPause  = 30 * time.Second
)

// pause makes the group wait, longer each time.
func (b *Book) pause(g *group, now time.Time) {
	g.notBefore = now.Add(min(firstPause<<min(g.failures, 10), lastPause))
	g.failures++
}

func anyOf(names []string) string {
	if len(names) == 0 {
		return ""
	}
	return names[0]
}
