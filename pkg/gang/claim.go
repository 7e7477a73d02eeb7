package gang

import (
	"time"

	"github.com/gpushare/gpushare/pkg/ledger"
)

// claims keep the group from starving that goes first: single pods, which are placed wherever there is room, could take each
// piece of memory that comes free before there is enough of it at once. When the first group has waited for ClaimAfter,
// room for all of it is claimed on the cards that are emptiest: who is there stays, nobody new comes. Who claims for longer
// than everybody there runs is sure to be placed, if it fits at all.
//
// What kube-scheduler offers doesn't say where room can be claimed: nodes that are full at the moment aren't on offer, and where
// all are it asks about nobody. So a claim looks at every node that the members may go to at all, see Options.Reach.
//
// A claim lasts as long as the group had to wait for it, the next one twice as long, and after each one nothing is claimed
// for as long as it did last: so at least half of the time nobody is held up, also where plans come about and fail again.
type claims struct {
	by           *group
	begun, until time.Time
	// next is when another claim may begin.
	next time.Time
}

const (
	// longestClaim bounds a claim.
	longestClaim = time.Hour
	// claimAgain is how soon it is looked again whether room can be claimed for a group, if it couldn't.
	claimAgain = 5 * time.Second
)

// keepClaim ends the claim that has served or lasted, and begins one for the first of the groups that are ready and wait.
func (b *Book) keepClaim(ready []*group, now time.Time) {
	c := &b.claims
	if by := c.by; by != nil && (by.plan != nil || by.waitingSince.IsZero() || b.groups[by.key] != by || !now.Before(c.until)) {
		b.endClaim(now)
	}
	if b.ClaimAfter <= 0 || c.by != nil || now.Before(c.next) {
		return
	}
	for _, g := range ready {
		if g.plan != nil || now.Sub(g.unclaimable) < claimAgain {
			continue
		}
		if now.Sub(g.waitingSince) < b.ClaimAfter {
			return // Whoever comes after it waits for others' claims too.
		}
		wants := b.claimable(g)
		if len(wants) == 0 || !b.Ledger.Claim(wants, g.priority()) {
			g.unclaimable = now // It would not even fit if nobody else were there.
			continue
		}
		g.claimed = min(max(2*g.claimed, b.ClaimAfter), longestClaim)
		c.by, c.begun, c.until = g, now, now.Add(g.claimed)
		b.Observer.GangClaimed()
		return
	}
}

// claimable are the wants of the members that the group still needs, on every node that they may go to.
func (b *Book) claimable(g *group) []ledger.Want {
	reach := map[string][]string{}
	chosen, _ := g.choose(g.census(), func(*member) bool { return true })
	wants, _ := g.wants(chosen, func(m *member) []string {
		nodes, known := reach[m.Template]
		if !known {
			nodes = b.Reach(m.UID)
			reach[m.Template] = nodes
		}
		return nodes
	})
	return wants
}

func (b *Book) endClaim(now time.Time) {
	if b.claims.by == nil {
		return
	}
	b.Ledger.Unclaim()
	b.claims.next = now.Add(now.Sub(b.claims.begun))
	b.claims.by = nil
}
