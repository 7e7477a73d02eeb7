package gang

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// Answer says where a member may go.
type Answer struct {
	// Free says that it is to be treated like a pod without a group.
	Free bool
	// Nodes are those that it may go to, of those that were offered.
	Nodes []string
	// Why is the reason where it may go nowhere.
	Why Reason
}

// Filter answers for a pod that is a member of a group, to which kube-scheduler offers nodes. The list must not be changed
// afterwards.
func (b *Book) Filter(uid gpu.PodUID, offered []string, now time.Time) Answer {
	b.mu.Lock()
	defer b.mu.Unlock()
	m := b.members[uid]
	if m == nil {
		b.remember(uid, now)
		return Answer{Why: Unknown}
	}
	answer := b.filter(m, offered, now)
	m.refused = !answer.Free && len(answer.Nodes) == 0
	return answer
}

// remember notes that kube-scheduler asked about a pod that the watch hasn't told of.
func (b *Book) remember(uid gpu.PodUID, now time.Time) {
	if _, again := b.strangers[uid]; !again && len(b.strangers) >= maxStrangers {
		for other := range b.strangers {
			delete(b.strangers, other) // Whichever: so many don't come while a watch is behind.
			break
		}
	}
	b.strangers[uid] = now
}

func (b *Book) filter(m *member, offered []string, now time.Time) Answer {
	if m.Cardless {
		return Answer{Free: true}
	}
	g := b.groups[m.Group]
	c := g.judge(now)
	if why := b.invalid(g, m); why != nil {
		return Answer{Why: *why}
	}
	exist := c.exist()
	switch {
	case g.whole:
		return Answer{Free: true}
	case g.evicting:
		return Answer{Why: Evicting}
	case g.binding():
		return Answer{Why: Binding}
	case exist < g.size:
		if c.mismatch(g.size) {
			b.tell(g, true, EventMismatch, fmt.Sprintf("The group needs %d members that ask for GPU cards, %d do, and %d ask for none: those don't count",
				g.size, exist+c.hindered, c.cardless))
		}
		return Answer{Why: incomplete(exist, g.size)}
	case now.Before(g.notBefore):
		return Answer{Why: Paused}
	}
	if g.offers == nil {
		g.offers = map[string][]string{}
	}
	g.offers[m.Template] = b.shared(offered)
	if g.plan == nil {
		if why, ok := b.makePlan(g, c, now); !ok {
			return Answer{Why: why}
		}
	}
	return b.seated(g, m, offered, now)
}

// seated answers by the plan. Where the member's place isn't on offer, which can be for reasons that nobody here knows, it
// gets another.
func (b *Book) seated(g *group, m *member, offered []string, now time.Time) Answer {
	s := g.plan.seats[m.UID]
	switch {
	case s == nil:
		return Answer{Why: Surplus}
	case b.joinsLate(g.plan, s, now):
		b.wake(s.node)
		return Answer{Why: TimedOut}
	case s.node == "":
		return Answer{Nodes: offered}
	case slices.Contains(offered, s.node):
		return Answer{Nodes: []string{s.node}}
	}
	if s.owned {
		if node, ok := b.Ledger.Move(ledger.Want{Pod: m.Pod, Nodes: offered}, b.View, now); ok {
			s.node = node
			return Answer{Nodes: []string{node}}
		}
	}
	b.tell(g, true, EventNotBound, Unplaced.Text)
	b.drop(g, Unplaced, now, true)
	return Answer{Why: Unplaced}
}

// invalid says why nobody of the group, or not this member, can be placed whatever comes free.
func (b *Book) invalid(g *group, m *member) *Reason {
	switch {
	case m.Problem != "":
		why := invalid(m.Problem)
		if m.told != m.Problem {
			m.told = m.Problem
			b.effects.Notices = append(b.effects.Notices, Notice{m.Pod, true, EventInvalid, "The pod can't be counted as a member: " + m.Problem})
		}
		return &why
	case g.size == 0:
		b.tell(g, true, EventInvalid, Disagree.Text)
		return &Disagree
	}
	return nil
}

// shared returns an equal list, which is kept once.
func (b *Book) shared(offered []string) []string {
	if !slices.Equal(b.lastOffer, offered) {
		b.lastOffer = offered
	}
	return b.lastOffer
}
