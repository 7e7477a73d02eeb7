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

// makePlan places all members that the group still needs, or says why not. It needs the lock.
func (b *Book) makePlan(g *group, c census, now time.Time) (Reason, bool) {
	freed := b.freed.Load()
	if ago := now.Sub(g.tried); !g.tried.IsZero() && (ago < noRoomHolds || g.freed == freed && ago < noRoomLasts) {
		return NoRoom, false
	}
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
