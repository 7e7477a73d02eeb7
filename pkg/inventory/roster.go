package inventory

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Problems and reasons that don't come from the driver.
const (
	problemNoCards    = "the driver reports no cards"
	reasonNotReported = "the driver doesn't report it any more"
	reasonUnnamed     = " on a card that the driver couldn't name"
)

// roster holds all cards that were listed so far and decides which of them are healthy. Its methods receive each observation
// with its time. The roster calls neither the driver nor a clock. It has no lock: only one goroutine may use it at a time.
//
// The roster identifies a card by its UUID. A card keeps the index at which it was first listed, because NVML renumbers the
// cards when one falls off the bus, while pods hold allocations on the old index. A missing card stays in the roster as
// unhealthy. Cards from an earlier run are listed with the values that they had. Such a card stays unhealthy if a Xid was the
// reason: the driver reports a Xid only once, and its quiet period may not be over. Any other problem of a card shows again
// in the next listing.
//
// A Xid after which a card needs a reset lasts beyond the quiet period. There are two signs of the reset: the driver asked
// for it and no longer does, or it had lost the card, or no longer listed it, and can read it again.
type roster struct {
	unit   gpu.Unit
	memory CardMemory
	// xids selects the Xid errors that make a card unhealthy.
	xids XidChecks
	// quiet is how long a card must be without errors before it is healthy again.
	quiet time.Duration

	entries []entry // sorted by index
	// problem is why no card can be used; empty if there is no such reason.
	problem string
	// silent is true if the driver failed or did not answer last time, so that the current state of the cards is unknown.
	silent bool
	// listed is true if the driver has listed its cards since the program started.
	listed bool
}

// entry is a card with its history.
type entry struct {
	card gpu.Card
	// trouble is the time of the card's last error. The quiet period starts at it.
	trouble time.Time
	// failing is true if the last listing found an error of the card, or did not contain it.
	failing bool
	// unreachable is true if the last listing could not read the card, or didn't contain it. A new session may reach it.
	unreachable bool
	// sticky is true if the card had a Xid that only a reset ends, and no reset was detected since.
	sticky bool
	// lost is true if the driver has lost the card, or did not list it, since it last read the card. asked is true if the
	// driver has asked for a reset since the sticky Xid.
	lost, asked bool
	// seen is true if the driver has listed the card since the program started.
	seen bool
	// position is the driver's own index of the card.
	position int
	// peers are the cards with which it is connected, as the driver reported them last.
	peers peers
}

func newRoster(o Options) *roster {
	return &roster{unit: o.Unit, memory: o.CardMemory, xids: o.Xids, quiet: o.QuietPeriod}
}

// configure changes the settings. Cards whose memory the next listing can't read keep it, counted in the new unit. A card that
// is unhealthy because of a Xid that no longer counts is healthy, as after a restart (expect).
func (r *roster) configure(s Settings) {
	for i := range r.entries {
		rec := &r.entries[i]
		if s.Unit != r.unit {
			rec.card.Memory = s.Unit.Count(r.unit.Bytes(rec.card.Memory))
			rec.card.Reserved = 0 // Until the next listing.
		}
		if x, _, ok := parseReason(rec.card.Unhealthy); ok && !s.Xids.count(x) {
			rec.card.Unhealthy, rec.sticky, rec.asked = "", false, false
		}
	}
	r.unit, r.memory, r.xids, r.quiet = s.Unit, s.CardMemory, s.Xids, s.QuietPeriod
}

// expect adds the cards of an earlier run. A card that a Xid had made unhealthy stays unhealthy, if that Xid still counts;
// other reasons are dropped. A card without a UUID, or with the UUID or the index of an earlier card in the list, is ignored.
func (r *roster) expect(known []gpu.Card, now time.Time) {
	for _, card := range known {
		if card.UUID != "" && r.find(card.UUID) == nil {
			reason := card.Unhealthy
			card.Unhealthy = ""
			rec := entry{card: card}
			if x, sticky, ok := parseReason(reason); ok && r.xids.count(x) {
				rec.blame(reason, now)
				rec.sticky, rec.asked = sticky, strings.HasSuffix(reason, reasonAsked)
			}
			r.entries = append(r.entries, rec)
		}
	}
	slices.SortStableFunc(r.entries, func(a, b entry) int { return cmp.Compare(a.card.Index, b.card.Index) })
	r.entries = slices.CompactFunc(r.entries, func(a, b entry) bool { return a.card.Index == b.card.Index })
}

// list records a listing of the driver's cards.
func (r *roster) list(devices []device, now time.Time) {
	r.listed, r.silent, r.problem = true, false, ""
	if len(devices) == 0 {
		r.problem = problemNoCards
	}

	// Known cards come first: an unknown card must not take the entry of a known card whose index has changed.
	listed := make(map[int]bool, len(devices)) // keyed by the roster's index
	var strangers []device
	for _, d := range devices {
		if rec := r.find(d.uuid); rec != nil {
			listed[rec.card.Index] = true
			rec.update(d, r, now)
		} else {
			strangers = append(strangers, d)
		}
	}
	for _, d := range strangers {
		if rec := r.place(d, listed); rec != nil {
			listed[rec.card.Index] = true
			rec.update(d, r, now)
		}
	}

	for i := range r.entries {
		if rec := &r.entries[i]; !listed[rec.card.Index] {
			rec.failing, rec.unreachable, rec.lost = true, true, true
			rec.blame(reasonNotReported, now)
		}
	}
	r.setGroups()
}

// find returns the entry of the card with this UUID, or nil. An empty UUID matches no entry.
func (r *roster) find(uuid string) *entry {
	for i := range r.entries {
		if uuid != "" && r.entries[i].card.UUID == uuid {
			return &r.entries[i]
		}
	}
	return nil
}

// place returns the entry for a card whose UUID is not in the roster. It adds an entry if needed. listed holds the roster's
// indices of the cards that this listing already contains. place returns nil if it can't determine the card's entry.
func (r *roster) place(d device, listed map[int]bool) *entry {
	index := d.index
	if listed[index] {
		if d.uuid == "" {
			return nil // a card that couldn't be opened, after a renumbering: its entry counts as not listed
		}
		index = r.entries[len(r.entries)-1].card.Index + 1
	}
	i, found := slices.BinarySearchFunc(r.entries, index, func(rec entry, index int) int {
		return cmp.Compare(rec.card.Index, index)
	})
	fresh := entry{card: gpu.Card{Index: index, NUMANode: gpu.NoNUMANode}}
	switch {
	case !found:
		r.entries = slices.Insert(r.entries, i, fresh)
	case d.uuid != "" && r.entries[i].card.UUID != "":
		r.entries[i] = fresh // another card has replaced the one at this index
	}
	return &r.entries[i]
}

// update records those values of the card that the driver could read, and decides whether the card is healthy.
func (rec *entry) update(d device, r *roster, now time.Time) {
	card := &rec.card
	rec.seen, rec.position = true, d.index
	card.UUID = cmp.Or(d.uuid, card.UUID)
	card.Model = cmp.Or(d.model, card.Model)
	if d.numaNode != gpu.NoNUMANode {
		card.NUMANode = d.numaNode
	}
	if d.peers != nil {
		rec.peers = d.peers
	}
	var answers unusable
	rec.unreachable = d.err != nil && !errors.As(d.err, &answers)
	err := rec.updateMemory(d, r)

	if rec.failing {
		rec.trouble = now // the card may have been failing until now
	}
	rec.failing = err != nil
	rec.updateReset(d, now)
	switch {
	case rec.failing:
		rec.blame(err.Error(), now)
	case now.Sub(rec.trouble) >= r.quiet && !rec.sticky:
		card.Unhealthy = ""
	}
}

// updateMemory records the card's memory, if the card answers. It returns why the card can't be used; nil if it can.
func (rec *entry) updateMemory(d device, r *roster) error {
	bytes := r.memory.of(rec.card.UUID, d.bytes)
	if !rec.unreachable {
		rec.card.Memory = r.unit.Count(bytes)
		rec.card.Reserved = rec.card.Memory.Sub(r.unit.Count(min(bytes, d.bytes-min(d.reserved, d.bytes))))
		if d.bytes == 0 {
			rec.card.Reserved = 0
		}
	}
	switch {
	case d.err != nil:
		return d.err
	case bytes == 0:
		return errNoMemory
	case rec.card.Memory == 0:
		return unusable(fmt.Sprintf("it has less memory than one unit (%s)", r.unit))
	}
	return nil
}

// updateReset records whether the card needs a reset or was reset. The quiet period after a reset begins now.
func (rec *entry) updateReset(d device, now time.Time) {
	switch {
	case d.lost:
		rec.lost = true
	case rec.sticky && d.recovery > recoveryNone && !rec.asked:
		rec.asked = true
		rec.card.Unhealthy += reasonAsked
	case !rec.unreachable && rec.sticky && (rec.lost || rec.asked && d.recovery == recoveryNone):
		rec.sticky, rec.trouble = false, now
	}
	if !rec.unreachable {
		rec.lost = false
	}
	if !rec.sticky {
		rec.asked = false
	}
}

// blame makes the card unhealthy. The first reason stays until the card is healthy again: later errors are usually a
// consequence of the first one, and each change of the reason would be written to the API server.
func (rec *entry) blame(reason string, now time.Time) {
	rec.card.Unhealthy = cmp.Or(rec.card.Unhealthy, reason)
	rec.trouble = now
}

// report records Xid errors. It ignores errors of cards that the driver has not listed since the program started.
func (r *roster) report(events []event, now time.Time) {
	for _, e := range events {
		if !r.xids.count(e.xid) {
			continue
		}
		if e.uuid == "" {
			// Any card may have caused the event, so all become unhealthy. None becomes sticky: a reset of all cards would be
			// required otherwise. The probe shows which card is affected.
			for i := range r.entries {
				if !r.entries[i].seen {
					continue
				}
				r.entries[i].blame(e.xid.String()+reasonUnnamed, now)
			}
		} else if rec := r.find(e.uuid); rec != nil && rec.seen {
			if e.xid.needsReset() && !rec.sticky {
				rec.card.Unhealthy = "" // The need for a reset replaces any earlier reason.
				rec.sticky, rec.asked = true, false
			}
			rec.blame(e.xid.reason(), now)
		}
	}
}

// silence records that the driver doesn't answer or can't be used. The cards are unusable until it answers again. This is
// not an error of a card, so no quiet period follows.
func (r *roster) silence(problem string) {
	r.silent, r.problem = true, problem
}

// unreachable returns the indices of the cards that the last listing could not read or did not contain.
func (r *roster) unreachable() []int {
	var cards []int
	for _, rec := range r.entries {
		if rec.unreachable {
			cards = append(cards, rec.card.Index)
		}
	}
	return cards
}

// state returns a copy of the current state. It contains no cards before the first listing.
func (r *roster) state() State {
	s := State{Unit: r.unit, Problem: r.problem}
	if !r.listed {
		return s
	}
	for _, rec := range r.entries {
		card := rec.card
		if rec.seen && rec.position != card.Index {
			if s.Moved == nil {
				s.Moved = map[int]int{}
			}
			s.Moved[card.Index] = rec.position
		}
		if r.silent {
			card.Unhealthy = cmp.Or(card.Unhealthy, r.problem)
		}
		s.Cards = append(s.Cards, card)
	}
	return s
}
