package gang

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// The reasons of Events.
const (
	EventInvalid  = "GangInvalid"
	EventMismatch = "GangIncomplete"
	EventBound    = "GangBound"
	EventNotBound = "GangNotBound"
	EventEvicted  = "GangEvicted"
	EventPartial  = "GangPartial"
)

// FailurePolicy says what becomes of the members that run, where the group doesn't become whole in time.
type FailurePolicy string

// The failure policies.
const (
	Evict FailurePolicy = "evict"
	Keep  FailurePolicy = "keep"
)

// Options are what a Book works with.
type Options struct {
	// Ledger is where places are reserved.
	Ledger Ledger
	// Release gives a reservation back, unless an earlier bind of the pod is still open.
	Release func(gpu.PodUID)
	View    ledger.View
	// Reach returns the nodes that the pod may go to, whatever is taken there. It is called with the Book's lock held, and
	// seldom.
	Reach func(gpu.PodUID) []string
	// ClaimAfter is how long a group waits before memory that comes free is kept for it; 0 never does so.
	ClaimAfter time.Duration
	// Hold is how long a bind is held at most.
	Hold time.Duration
	// Patience is how long places are kept for members to come, and how long a group that is bound in part may stay so.
	Patience  time.Duration
	OnFailure FailurePolicy
	// Observer is told what happens, for metrics. It is called with the Book's lock held, and must return at once.
	Observer Observer
}

// Ledger is what a Book needs of package ledger.
type Ledger interface {
	ReserveTogether(wants []ledger.Want, yielding [][]gpu.PodUID, view ledger.View, at time.Time) ([]ledger.Place, int)
	Move(want ledger.Want, view ledger.View, at time.Time) (string, bool)
	Stands(uid gpu.PodUID) bool
	Claim(wants []ledger.Want, priority int32) bool
	Unclaim()
}

// Observer is told what happens.
type Observer interface {
	// GangHeld tells how long the first member waited when a barrier opened.
	GangHeld(wait time.Duration)
	// GangBound counts groups of which all members were bound.
	GangBound()
	// GangFailed counts rounds that came to nothing, by the label of their reason.
	GangFailed(reason string)
	// GangClaimed counts the times that memory that comes free is kept for a group.
	GangClaimed()
	// GangEvicted counts members that are evicted since their group isn't whole.
	GangEvicted()
}

// Effects are what is to be done.
type Effects struct {
	// Wake is a node whose change makes kube-scheduler look at refused pods again; Woken says that one is wanted, and any
	// will do if it isn't named.
	Wake  string
	Woken bool
	// Bound are the priorities of groups that became whole: who goes before them can evict their members from now on.
	Bound []int32
	// Notices are Events to write.
	Notices []Notice
	// Evict are pods to evict.
	Evict []gpu.Pod
}

// Notice is an Event on a pod.
type Notice struct {
	Pod          gpu.Pod
	Warning      bool
	Reason, Text string
}

// Book knows every group. One lock guards everything; it is held for in-memory work only.
type Book struct {
	Options
	// freed counts how often memory came free.
	freed atomic.Uint64

	mu      sync.Mutex
	groups  map[Key]*group
	members map[gpu.PodUID]*member
	// strangers are pods that kube-scheduler asked about before the watch told of them, with when it did.
	strangers map[gpu.PodUID]time.Time
	// lastOffer is the list of nodes that was offered last: most are equal, and kept once.
	lastOffer []string
	// queue are the groups that waited for room when time passed last, in their order.
	queue   []*group
	flow    flow
	claims  claims
	effects Effects
}

// New returns an empty Book.
func New(o Options) *Book {
	return &Book{
		Options: o, groups: map[Key]*group{}, members: map[gpu.PodUID]*member{}, strangers: map[gpu.PodUID]time.Time{},
	}
}

// Freed is told that memory came free somewhere. It takes no lock.
func (b *Book) Freed() { b.freed.Add(1) }

// Take returns what is to be done, once.
func (b *Book) Take() Effects {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := b.effects
	b.effects = Effects{}
	return out
}

// Seen is told how a member stands.
func (b *Book) Seen(m Member, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	known := b.members[m.UID]
	if known != nil && known.Group != m.Group {
		b.remove(known, now)
		known = nil
	}
	g := b.groups[m.Group]
	if g == nil {
		g = &group{key: m.Group, members: map[gpu.PodUID]*member{}}
		b.groups[m.Group] = g
	}
	wasWaiting := known != nil && known.waiting()
	if known == nil {
		known = &member{}
		b.members[m.UID], g.members[m.UID] = known, known
		if _, asked := b.strangers[m.UID]; asked {
			delete(b.strangers, m.UID)
			known.refused = true
			b.wake("")
		}
	}
	if known.bound && m.Node == "" {
		m.Node, m.Proof = known.Node, known.Proof // The watch is behind.
	}
	known.Member = m
	size := g.size
	g.recount()
	if g.size != size {
		b.drop(g, Changed, now, false)          // It was for another number.
		g.stale = g.stale || len(g.members) > 1 // The others may be enough now, and nothing happens to them.
	}
	if wasWaiting && !known.waiting() {
		b.lost(g, m.UID, now)
	}
	if !wasWaiting && known.waiting() && !g.whole {
		b.completed(g)
	}
}

// completed wakes the members that were refused before the last one came.
func (b *Book) completed(g *group) {
	if c := g.census(); g.size > 0 && c.exist() == g.size {
		b.wakeRefused(g)
	}
}

// Gone is told that a pod is no more, or isn't a member of anything any more. Most never were.
func (b *Book) Gone(uid gpu.PodUID, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.strangers, uid)
	if m := b.members[uid]; m != nil {
		b.remove(m, now)
	}
}

func (b *Book) remove(m *member, now time.Time) {
	g := b.groups[m.Group]
	delete(g.members, m.UID)
	delete(b.members, m.UID)
	if b.claims.by == g {
		b.endClaim(now) // It was for those who were there.
	}
	size := g.size
	g.recount()
	g.stale = g.stale || g.size != size // Those who are left may agree now, and be enough.
	b.lost(g, m.UID, now)
	b.forgetEmpty(g)
}

// forgetEmpty drops a group that nobody belongs to; while binds are under way it stays.
func (b *Book) forgetEmpty(g *group) {
	if len(g.members) == 0 && !g.binding() {
		b.drop(g, Deleted, time.Time{}, false)
		delete(b.groups, g.key)
	}
}

// lost is called when a member that waited doesn't any more.
func (b *Book) lost(g *group, uid gpu.PodUID, now time.Time) {
	if g.plan != nil && g.plan.seats[uid] != nil {
		b.drop(g, Deleted, now, true)
	}
}

// Group returns the group that the pod is a member of.
func (b *Book) Group(uid gpu.PodUID) (Key, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	m := b.members[uid]
	if m == nil {
		return Key{}, false
	}
	return m.Group, true
}

// Waits says whether the pod counts as a member of a group that isn't whole.
func (b *Book) Waits(uid gpu.PodUID) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	m := b.members[uid]
	return m != nil && !m.Cardless && !b.groups[m.Group].whole
}

// Tick lets time pass. It is to be called by a leader only, several times a second, and not before every pod is known.
func (b *Book) Tick(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for uid, at := range b.strangers {
		if now.Sub(at) > strangerLife {
			delete(b.strangers, uid)
		}
	}
	var ready []*group
	for _, g := range b.groups {
		g.judge(now)
		b.expire(g, now)
		b.giveUp(g, now)
		b.complain(g, now)
		switch {
		case g.whole && g.stale:
			b.wakeRefused(g) // Those that were one too many, or whose bind failed at first.
			g.stale = false
		case g.plan == nil && !g.evicting && !g.waitingSince.IsZero() && !now.Before(g.notBefore):
			ready = append(ready, g)
		}
	}
	slices.SortFunc(ready, compare)
	b.queue = ready
	b.flow.note(b.freed.Load(), now) // Also while nobody waits who would ask.
	for _, g := range ready {
		c := g.census()
		if g.stale {
			if _, offered := g.choose(c, g.isOffered); !offered {
				b.wakeRefused(g) // Where they may go must be heard anew, whether or not it is the group's turn just now.
			}
			g.stale = false
		}
		if len(g.offers) > 0 { // Else kube-scheduler itself finds no node for any of them.
			_, _ = b.makePlan(g, c, now) // If it comes to nothing the next Tick tries again.
		}
	}
	b.keepClaim(ready, now)
}

// strangerLife is how long a pod is remembered that the watch doesn't tell of, maxStrangers how many of them are: who asks
// for pods that don't exist doesn't fill the memory.
const (
	strangerLife = 10 * time.Minute
	maxStrangers = 20_000
)

// expire ends what has lasted too long: the hold of binds, and the keeping of places.
func (b *Book) expire(g *group, now time.Time) {
	p := g.plan
	if p == nil || p.isOpen() {
		return
	}
	if !now.Before(p.expires) {
		b.tell(g, true, EventNotBound, Expired.Text)
		b.drop(g, Expired, now, true)
		return
	}
	for uid, s := range p.seats {
		if s.node != "" && !b.Ledger.Stands(uid) {
			b.drop(g, PlaceLost, now, true)
			return
		}
		if s.ticket != nil && !now.Before(s.ticket.deadline) {
			b.timeOut(p, now)
			return
		}
	}
}

// evictAgain is how long evictions may take before they are asked for once more.
const evictAgain = 5 * time.Second

// giveUp ends a group that was bound in part and didn't become whole in time.
func (b *Book) giveUp(g *group, now time.Time) {
	if g.partialSince.IsZero() || now.Sub(g.partialSince) < b.Patience {
		return
	}
	if b.OnFailure == Keep {
		b.tell(g, true, EventPartial, "The group is bound in part and did not become whole in time: its members stay")
		b.drop(g, Expired, now, false)
		g.whole, g.stale = true, true
		return
	}
	if !g.evicting {
		b.drop(g, Expired, now, true)
	}
	if g.evicting && now.Sub(g.evictedAt) < evictAgain {
		return
	}
	g.evicting, g.evictedAt = true, now
	for _, m := range g.sorted(func(m *member) bool { return m.running() }) {
		b.effects.Evict = append(b.effects.Evict, m.Pod)
	}
}

// complain tells of a group whose members don't get more. Often nobody will ever make them: a StatefulSet by default makes its
// next pod when the last one runs, a Job no more than its parallelism.
func (b *Book) complain(g *group, now time.Time) {
	if g.incompleteSince.IsZero() || now.Sub(g.incompleteSince) < b.Patience {
		return
	}
	c := g.census()
	if c.mismatch(g.size) {
		return // Of that filter tells.
	}
	if c.hindered > 0 {
		b.tell(g, true, EventMismatch, fmt.Sprintf("The group needs %d members and only %d can be placed: they wait for the others. "+
			"Some of those exist, but have scheduling gates or can't be counted as members", g.size, g.incomplete))
		return
	}
	b.tell(g, true, EventMismatch, fmt.Sprintf("The group needs %d members and only %d exist: they wait for the others. "+
		"All must be made at once: by a StatefulSet with podManagementPolicy Parallel, by a Job whose parallelism is not smaller",
		g.size, g.incomplete))
}

// Inherit is told that this process begins to lead: whom another refused, and why, isn't known.
func (b *Book) Inherit() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, g := range b.groups {
		g.stale = true
		for _, m := range g.members {
			m.refused = m.waiting()
		}
	}
}

// Suspend is told that this process doesn't lead, or stops: what isn't under way is off.
func (b *Book) Suspend(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, g := range b.groups {
		b.drop(g, Stopping, now, false)
		g.partialSince, g.evicting, g.offers = time.Time{}, false, nil
	}
	b.queue = nil
	b.endClaim(now)
}

// wake wants kube-scheduler to look at refused pods again.
func (b *Book) wake(node string) {
	b.effects.Woken = true
	if node != "" {
		b.effects.Wake = node
	}
}

// wakeRefused does so if that helps a member.
func (b *Book) wakeRefused(g *group) {
	for _, m := range g.members {
		if m.refused && m.waiting() {
			b.wake(anyOf(g.offers[m.Template]))
			return
		}
	}
}

// tell writes an Event on the group's first member, once in a row.
func (b *Book) tell(g *group, warning bool, reason, text string) {
	if g.told == reason+text {
		return
	}
	pod, ok := g.speaker()
	if !ok {
		return
	}
	g.told = reason + text
	b.effects.Notices = append(b.effects.Notices, Notice{pod, warning, reason, text})
}

// The states of a group, as metrics label them.
const (
	StateIncomplete = "incomplete" // Not all members exist.
	StateWaiting    = "waiting"    // There is no room, or it is not the group's turn.
	StatePlaced     = "placed"     // Places are reserved, and the members are on their way.
	StateBinding    = "binding"
	StatePartial    = "partial" // Some members run, others couldn't be bound.
	StateWhole      = "whole"
)

// States counts the groups by state.
func (b *Book) States() map[string]int {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := map[string]int{StateIncomplete: 0, StateWaiting: 0, StatePlaced: 0, StateBinding: 0, StatePartial: 0, StateWhole: 0}
	for _, g := range b.groups {
		out[g.state()]++
	}
	return out
}

func (g *group) state() string {
	c := g.census()
	switch {
	case g.binding():
		return StateBinding
	case g.whole:
		return StateWhole
	case g.plan != nil:
		return StatePlaced
	case !g.partialSince.IsZero():
		return StatePartial
	case g.size == 0 || c.exist() < g.size:
		return StateIncomplete
	}
	return StateWaiting
}

// Held counts the binds that are held.
func (b *Book) Held() (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, g := range b.groups {
		if g.plan != nil {
			n += g.plan.arrived()
		}
	}
	return n
}
