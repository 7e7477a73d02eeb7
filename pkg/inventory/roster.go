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

// Problems and reasons that aren't the driver's own words.
const (
	problemNoCards    = "the driver reports no cards"
	reasonNotReported = "the driver doesn't report it any more"
	reasonUnnamed     = " on a card that the driver couldn't name"
)

// roster holds the cards seen so far and decides which of them are healthy. It is told what happened, and when; it asks
// nobody, and needs no lock: one goroutine has it at a time.
//
// A card is known by its UUID and keeps the index under which it was first seen: NVML counts anew when a card falls off
// the bus, while pods hold memory of the card with the old index. Cards that vanish stay, unhealthy. Those that were
// known before the program started are listed with what they had, and stay unhealthy where a Xid had made them so: it is
// told once, and its quiet period may not be over. Everything else that is wrong with a card shows again.
//
// A Xid after which a card needs a reset outlasts the quiet period. That the card was reset shows in two ways: the driver
// asked for it and doesn't any more, or it had lost the card, or listed it no more, and has it again.
type roster struct {
	unit gpu.Unit
	// memory is what the administrator says of cards' memory.
	memory CardMemory
	// xids are those that count.
	xids XidChecks
	// quiet is how long a card has to be without trouble before it counts as healthy again.
	quiet time.Duration

	records []record // by index
	// problem is why no card can be used, empty where that is not so.
	problem string
	// silent says that the driver couldn't be asked, so that how the cards are isn't known.
	silent bool
	// listed says that the driver has listed its cards since the program started.
	listed bool
}

// record is a card with its history.
type record struct {
	card gpu.Card
	// trouble is when something was last wrong with the card.
	trouble time.Time
	// failing says that the last listing found something wrong with the card, or didn't have it.
	failing bool
	// unreachable says that the last listing couldn't read the card, or didn't have it: a new session with the driver might.
	unreachable bool
	// sticky says that the card was reported with a Xid that only a reset ends, and none has shown since.
	sticky bool
	// lost says that the driver had lost the card since it was last well; asked, that it asked for a reset since a sticky
	// Xid.
	lost, asked bool
	// seen says that the driver has reported the card since the program started.
	seen bool
	// position is the driver's own index of the card.
	position int
}

func newRoster(o Options) *roster {
	return &roster{unit: o.Unit, memory: o.CardMemory, xids: o.Xids, quiet: o.QuietPeriod}
}

// expect adds cards that are known from before, with what Xids have done to them.
func (r *roster) expect(known []gpu.Card, now time.Time) {
	for _, card := range known {
		if card.UUID != "" && r.find(card.UUID) == nil {
			reason := card.Unhealthy
			card.Unhealthy = ""
			rec := record{card: card}
			if x, sticky, ok := parseReason(reason); ok && r.xids.count(x) {
				rec.blame(reason, now)
				rec.sticky, rec.asked = sticky, strings.HasSuffix(reason, reasonAsked)
			}
			r.records = append(r.records, rec)
		}
	}
	slices.SortStableFunc(r.records, func(a, b record) int { return cmp.Compare(a.card.Index, b.card.Index) })
	r.records = slices.CompactFunc(r.records, func(a, b record) bool { return a.card.Index == b.card.Index })
}

// list takes what the driver says of its cards.
func (r *roster) list(devices []device, now time.Time) {
	r.listed, r.silent, r.problem = true, false, ""
	if len(devices) == 0 {
		r.problem = problemNoCards
	}

	// Known cards first: a stranger must not take the place of one that has merely moved.
	listed := make(map[int]bool, len(devices)) // by the roster's index
	var strangers []device
	for _, d := range devices {
		if rec := r.find(d.uuid); rec != nil {
			listed[rec.card.Index] = true
			rec.take(d, r, now)
		} else {
			strangers = append(strangers, d)
		}
	}
	for _, d := range strangers {
		if rec := r.place(d, listed); rec != nil {
			listed[rec.card.Index] = true
			rec.take(d, r, now)
		}
	}

	for i := range r.records {
		if rec := &r.records[i]; !listed[rec.card.Index] {
			rec.failing, rec.unreachable, rec.lost = true, true, true
			rec.blame(reasonNotReported, now)
		}
	}
}

// find returns the record of the card with this UUID, or nil.
func (r *roster) find(uuid string) *record {
	for i := range r.records {
		if uuid != "" && r.records[i].card.UUID == uuid {
			return &r.records[i]
		}
	}
	return nil
}

// place returns the record for a card that isn't known by UUID. listed are the indices of cards that are there for
// sure. It returns nil where there is no telling whose record it would be.
func (r *roster) place(d device, listed map[int]bool) *record {
	index := d.index
	if listed[index] {
		if d.uuid == "" {
			return nil // some card that couldn't be opened, and the numbers have moved: it will be missed by its UUID
		}
		index = r.records[len(r.records)-1].card.Index + 1
	}
	i, found := slices.BinarySearchFunc(r.records, index, func(rec record, index int) int {
		return cmp.Compare(rec.card.Index, index)
	})
	fresh := record{card: gpu.Card{Index: index, NUMANode: gpu.NoNUMANode}}
	switch {
	case !found:
		r.records = slices.Insert(r.records, i, fresh)
	case d.uuid != "" && r.records[i].card.UUID != "":
		r.records[i] = fresh // another card sits where this one was
	}
	return &r.records[i]
}

// take notes what the driver says of the card, and whether that heals it. What couldn't be read keeps its last value.
func (rec *record) take(d device, r *roster, now time.Time) {
	card := &rec.card
	rec.seen, rec.position = true, d.index
	card.UUID = cmp.Or(d.uuid, card.UUID)
	card.Model = cmp.Or(d.model, card.Model)
	if d.numaNode != gpu.NoNUMANode {
		card.NUMANode = d.numaNode
	}
	var answers unusable
	rec.unreachable = d.err != nil && !errors.As(d.err, &answers)
	err := rec.takeMemory(d, r)

	if rec.failing {
		rec.trouble = now // it has been failing until now, as far as is known
	}
	rec.failing = err != nil
	rec.takeReset(d, now)
	switch {
	case rec.failing:
		rec.blame(err.Error(), now)
	case now.Sub(rec.trouble) >= r.quiet && !rec.sticky:
		card.Unhealthy = ""
	}
}

// takeMemory notes the memory of a card that answers, and returns why the card can't be used.
func (rec *record) takeMemory(d device, r *roster) error {
	bytes := r.memory.of(rec.card.UUID, d.bytes)
	if !rec.unreachable {
		rec.card.Memory = r.unit.Count(bytes)
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

// takeReset notes whether a reset is needed, or was made. The quiet period after it begins now.
func (rec *record) takeReset(d device, now time.Time) {
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

// blame makes the card unhealthy. The first reason stays until the card is healthy again: what follows is mostly its
// consequence, and a reason that keeps changing would be written to the API server each time.
func (rec *record) blame(reason string, now time.Time) {
	rec.card.Unhealthy = cmp.Or(rec.card.Unhealthy, reason)
	rec.trouble = now
}

// report takes Xid errors.
func (r *roster) report(events []event, now time.Time) {
	for _, e := range events {
		if !r.xids.count(e.xid) {
			continue
		}
		if e.uuid == "" {
			// Any of them may be the one. Which it is, the probe tells: a reset isn't asked of all.
			for i := range r.records {
				if !r.records[i].seen {
					continue
				}
				r.records[i].blame(e.xid.String()+reasonUnnamed, now)
			}
		} else if rec := r.find(e.uuid); rec != nil && rec.seen {
			if e.xid.needsReset() && !rec.sticky {
				rec.card.Unhealthy = "" // What the card needs is said, whatever was wrong before.
				rec.sticky, rec.asked = true, false
			}
			rec.blame(e.xid.reason(), now)
		}
	}
}

// silence notes that the driver can't be asked. The cards are unusable until it answers again, but that is no mark
// against any of them: there is no quiet period to wait for afterwards.
func (r *roster) silence(problem string) {
	r.silent, r.problem = true, problem
}

// unreachable returns the indices of the cards that the last listing couldn't read, or didn't have.
func (r *roster) unreachable() []int {
	var cards []int
	for _, rec := range r.records {
		if rec.unreachable {
			cards = append(cards, rec.card.Index)
		}
	}
	return cards
}

// state returns a copy of what is known now.
func (r *roster) state() State {
	s := State{Problem: r.problem}
	if !r.listed {
		return s
	}
	for _, rec := range r.records {
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
