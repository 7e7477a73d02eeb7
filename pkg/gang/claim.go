package gang

import (
	"time"
)

// claims keep the group from starving that goes first: single pods, which are placed wherever there is room, could take each
// piece of memory that comes free before there is enough of it at once. When the first group has waited for ClaimAfter,
// room for all of it is claimed on the cards that are emptiest: who is there stays, nobody new comes. Who claims for longer
// than everybody there runs is sure to be placed, if it fits at all.
//
// A claim lasts as long as the group had to wait for it, the next one twice as long, and after each one nothing is claimed
// for the same time: so at least half of the time nobody is held up.
type claims struct {
	by    *group
	until time.Time
	// next is when another claim may begin.
	next time.Time
}

// longestClaim bounds a claim.
const longestClaim = time.Hour

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
		if g.plan != nil {
			continue
		}
		if now.Sub(g.waitingSince) < b.ClaimAfter {
			return // Whoever comes after it waits for others' claims too.
		}
		chosen, ok := g.choose(g.census())
		if !ok {
			continue
		}
		wants, _ := g.wants(chosen)
		if len(wants) == 0 || !b.Ledger.Claim(wants, g.priority()) {
			continue // It would not even fit if nobody else were there.
		}
		g.claimed = min(max(2*g.claimed, b.ClaimAfter), longestClaim)
		c.by, c.until, c.next = g, now.Add(g.claimed), now.Add(2*g.claimed)
		b.Observer.GangClaimed()
		return
	}
}

func (b *Book) endClaim(now time.Time) {
	if b.claims.by == nil {
		return
	}
	b.Ledger.Unclaim()
	if served := b.claims.by.plan != nil; served {
		b.claims.next = now // It took less than it might have.
	}
	b.claims.by = nil
}
