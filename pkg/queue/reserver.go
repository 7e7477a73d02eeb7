package queue

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// Item is an item that waits for memory.
type Item struct {
	ledger.Item
	// Turn is the item's position in the order of turns: by tenant, and of one tenant by rank; from 1 on, 0 without fair sharing.
	Turn int
	// RoomKey is equal for items with the same requests and rank but for the time of entry: if one of them has no room, none has.
	RoomKey string
	// ByKubeScheduler is true for a single pod that kube-scheduler places as soon as it fits a node. Groups and items of fair sharing are placed by
	// other packages.
	ByKubeScheduler bool
	// Profile is what Failures knows of the item.
	Profile Profile
	// Requests returns the pods with the nodes that they can use, in order; none if the item has changed since it was listed. Requests with the same
	// nodes share one slice.
	Requests func() []ledger.Request
}

// Options configure a Reserver.
type Options struct {
	Ledger *ledger.Ledger
	// MaxIdle is a part of the memory. An item gets a reservation only while the items before it have reserved less than this part of the nodes it can use.
	MaxIdle float64
	// MaxAge is how long pods may have run that have to end on the cards of an awaited reservation. Those that have run for longer are expected to
	// stay.
	MaxAge time.Duration
	// Failures are those of all items.
	Failures *Failures
	// Reserved is called for each choice of cards, for metrics.
	Reserved func()
}

// Reserver makes the awaited reservations. It isn't safe for concurrent use.
//
// The first item that waits for some nodes always gets one. Others do while the items before them have little: see Options.MaxIdle. A choice of
// cards lasts as long as the item had waited when it was made, MaxAge at most. It isn't made again as soon as other cards look better: where some
// card always has just been refilled, a choice of the youngest pods would change for ever, and no card would become free.
//
// Only pods that were placed after the item entered the queue have to end. So a group that lacks one card, with a pod that was there before, keeps no
// others from the free cards. If pods are replaced by others without end, sooner or later all have been placed after the item entered.
//
// A pass makes only so many choices. Those that it leaves are made by later passes, the ones that were left first before the others. So items that never
// fit, and whose choices are made again and again, don't keep those behind them from choosing.
type Reserver struct {
	Options
	choices map[string]*choice
	delayed map[string]delay
}

const (
	// maxItems limits the items that get reservations in one pass.
	maxItems = 64
	// maxWork limits the choices of one pass, in nodes that the pods of an item can use. An item that fits costs much less. Half of it is for delayed
	// choices, the rest for the first items of the queue: these choose again at once if a card of their choice fails.
	maxWork = 20_000
)

// choice is the latest choice of cards for an item.
type choice struct {
	// until is when it is made again.
	until time.Time
	// nodes have the reserved memory; nil if the item didn't fit anywhere.
	nodes map[string]gpu.Memory
	// freeSince is since when the item's cards are free; zero if they aren't.
	freeSince time.Time
	profile   Profile
	// pod is the item's pod if kube-scheduler places it; else empty.
	pod gpu.PodUID
}

// delay is the delay of a choice that is due, and was left for a later pass.
type delay struct {
	since time.Time
	work  int
}

// NewReserver returns a Reserver without reservations.
func NewReserver(o Options) *Reserver {
	return &Reserver{Options: o, choices: map[string]*choice{}, delayed: map[string]delay{}}
}

// Pass updates the awaited reservations of all items that wait now.
func (r *Reserver) Pass(items []Item, now time.Time) {
	waits := map[string]bool{}
	for i := range items {
		waits[items[i].ID] = true
	}
	for _, id := range slices.Sorted(maps.Keys(r.choices)) { // In an order, since each end can requeue pods.
		if !waits[id] {
			r.end(id)
		}
	}
	maps.DeleteFunc(r.delayed, func(id string, _ delay) bool { return !waits[id] })
	p := &pass{
		Options: r.Options, now: now, choices: map[string]*choice{}, before: map[string]gpu.Memory{}, tried: map[string]bool{},
		delayed: r.delayed, next: map[string]bool{}, totals: map[*string]gpu.Memory{},
	}
	items = r.sorted(items, now)
	p.takeDelayed(items)
	for _, item := range items {
		if c := p.reserve(&item, r.choices[item.ID]); c != nil {
			p.keep(item.ID, c)
		} else {
			r.end(item.ID) // Before the items behind choose.
		}
	}
	r.choices = p.choices
}

// end ends the reservation of an item, and records if it is a pod that has an allocation. It does nothing if the item has no choice.
func (r *Reserver) end(id string) {
	c := r.choices[id]
	if c == nil {
		return
	}
	delete(r.choices, id)
	r.Ledger.End(ledger.Queued, id)
	if _, _, allocated := r.Ledger.Lookup(c.pod); allocated {
		r.Failures.Arrived(c.profile)
	}
}

// Stop ends all awaited reservations, when the process stops leading.
func (r *Reserver) Stop() { r.Pass(nil, time.Time{}) }

// sorted returns the items in the order of the queue. Between tenants the order of turns counts. It can change with each pod, so an item whose choice
// lasts comes before those of other tenants.
func (r *Reserver) sorted(items []Item, now time.Time) []Item {
	lasts := func(i *Item) bool {
		c := r.choices[i.ID]
		return c != nil && c.nodes != nil && now.Before(c.until)
	}
	items = slices.Clone(items)
	for i := range items {
		if items[i].Turn > 0 && lasts(&items[i]) {
			items[i].Turn = 0
		}
	}
	slices.SortFunc(items, func(x, y Item) int {
		if x.ByTurn && y.ByTurn && x.Turn != y.Turn {
			return cmp.Compare(x.Turn, y.Turn)
		}
		return x.Compare(&y.Item)
	})
	return items
}

// pass is the state of one pass.
type pass struct {
	Options
	now time.Time
	// choices are those of the items so far.
	choices map[string]*choice
	// before is what the items so far have on each node.
	before map[string]gpu.Memory
	// tried holds the RoomKey of the items so far, but for those that pause or fit.
	tried map[string]bool
	// delayed are the choices that are left for later passes, and next are the items whose choices were, and are made in this one.
	delayed map[string]delay
	next    map[string]bool
	// reserved counts the items so far with a reservation, and work is what the pass has done, and will do for next.
	reserved, work int
	// memory is that of each node; nil until it is needed. totals are sums of it, by the first of the nodes.
	memory map[string]gpu.Memory
	totals map[*string]gpu.Memory
}

// takeDelayed takes the delayed choices that are made in this pass. The items are in the order of the queue.
func (p *pass) takeDelayed(items []Item) {
	var delayed []string
	for i := range items {
		if _, left := p.delayed[items[i].ID]; left {
			delayed = append(delayed, items[i].ID)
		}
	}
	slices.SortStableFunc(delayed, func(x, y string) int { return p.delayed[x].since.Compare(p.delayed[y].since) })
	for _, id := range delayed {
		if p.work >= maxWork/2 {
			return
		}
		p.next[id] = true
		p.work += p.delayed[id].work
		delete(p.delayed, id)
	}
}

// reserve returns the choice for the next item, whose former choice is c: that one or a new one. It returns nil if there was none, or if the item may
// not keep it.
func (p *pass) reserve(item *Item, c *choice) *choice {
	reserved := c != nil && c.nodes != nil
	if p.tried[item.RoomKey] && !reserved || p.reserved >= maxItems || p.pauses(item, reserved) {
		return nil
	}
	requests := item.Requests()
	if len(requests) == 0 { // It has changed since it was listed, and keeps what it has until the next pass.
		return c
	}
	if p.beforeExceeds(requests) {
		p.tried[item.RoomKey] = true
		return nil
	}
	due := p.due(item, requests, c)
	fits := item.ByKubeScheduler && (reserved || due) && p.fits(&requests[0])
	switch {
	case fits && !reserved: // kube-scheduler is about to place it.
		return nil
	case reserved && p.failIfLate(item, c, fits):
		return nil
	case due && !fits:
		c = p.choose(item, requests)
	}
	p.tried[item.RoomKey] = true
	return c
}

func (p *pass) fits(request *ledger.Request) bool {
	_, fits := p.Ledger.FirstFit(request.Pod, request.Nodes)
	return fits
}

// keep keeps the item's choice for the next pass.
func (p *pass) keep(id string, c *choice) {
	p.choices[id] = c
	if c.nodes != nil {
		p.reserved++
	}
	for node, amount := range c.nodes {
		p.before[node] = p.before[node].Add(amount)
	}
}

// failIfLate reports whether the item, which has a reservation, has fitted for too long without being placed. It records the failure.
func (p *pass) failIfLate(item *Item, c *choice, fits bool) bool {
	if !fits && !p.Ledger.AwaitedFree(item.ID) {
		c.freeSince = time.Time{}
		return false
	}
	if c.freeSince.IsZero() {
		c.freeSince = p.now
	}
	if p.now.Sub(c.freeSince) < ArrivalTimeout {
		return false
	}
	p.Failures.Failed(c.profile, c.freeSince, p.now)
	return true
}

// pauses reports whether the item gets no reservation because it, or others of its namespace, have failed.
func (p *pass) pauses(item *Item, reserved bool) bool {
	until, _ := p.Failures.PauseUntil(item.Profile, reserved, p.now)
	return p.now.Before(until)
}

// due reports whether the cards of an item must be chosen now. After much work it leaves the choice for a later pass.
func (p *pass) due(item *Item, requests []ledger.Request, c *choice) bool {
	if c != nil && p.now.Before(c.until) && (c.nodes == nil || p.Ledger.AwaitedUsable(item.Item, requests)) {
		return false
	}
	if p.next[item.ID] || p.work < maxWork {
		delete(p.delayed, item.ID)
		return true
	}
	if _, left := p.delayed[item.ID]; !left {
		p.delayed[item.ID] = delay{p.now, work(requests)}
	}
	return false
}

// work returns the work of a choice.
func work(requests []ledger.Request) (nodes int) {
	for _, names := range distinct(requests) {
		nodes += len(names)
	}
	return nodes
}

// choose chooses the cards of an item.
func (p *pass) choose(item *Item, requests []ledger.Request) *choice {
	if !p.next[item.ID] {
		p.work += work(requests)
	}
	lasts := min(max(p.now.Sub(item.Entered), minPause), p.MaxAge)
	oldest := p.now.Add(-p.MaxAge)
	if entered := item.Entered.Add(time.Second); entered.After(oldest) { // Creation times are cut to whole seconds.
		oldest = entered
	}
	c := &choice{profile: item.Profile}
	if item.ByKubeScheduler {
		c.pod = requests[0].Pod.UID
	}
	if !p.Ledger.ReserveAwaited(item.Item, requests, oldest) {
		c.until = p.now.Add(min(lasts, Retry))
		return c
	}
	p.Reserved()
	c.until, c.nodes = p.now.Add(lasts), p.Ledger.AwaitedMemory(item.ID)
	return c
}

// beforeExceeds reports whether the items before have reserved too much of the nodes that one of the pods can use.
func (p *pass) beforeExceeds(requests []ledger.Request) bool {
	return slices.ContainsFunc(distinct(requests), func(nodes []string) bool {
		reserved := p.reservedOn(nodes)
		return reserved > 0 && float64(reserved) >= p.MaxIdle*float64(p.memoryOf(nodes))
	})
}

// memoryOf returns the memory of the nodes.
func (p *pass) memoryOf(nodes []string) gpu.Memory {
	if p.memory == nil {
		p.memory = p.Ledger.NodeMemory()
	}
	total, known := p.totals[&nodes[0]]
	if !known {
		for _, node := range nodes {
			total = total.Add(p.memory[node])
		}
		p.totals[&nodes[0]] = total
	}
	return total
}

// reservedOn returns what the items before have on the nodes.
func (p *pass) reservedOn(nodes []string) (sum gpu.Memory) {
	for node, amount := range p.before {
		if _, found := slices.BinarySearch(nodes, node); found {
			sum = sum.Add(amount)
		}
	}
	return sum
}

// distinct returns the nodes of the requests. Of those that follow one another and share their nodes, it returns the nodes once.
func distinct(requests []ledger.Request) (out [][]string) {
	for i := range requests {
		nodes := requests[i].Nodes
		if last := len(out) - 1; len(nodes) > 0 && (last < 0 || &nodes[0] != &out[last][0]) {
			out = append(out, nodes)
		}
	}
	return out
}
