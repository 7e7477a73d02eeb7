package inventory

import (
	"cmp"
	"slices"
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
// known before the program started have their index kept for them, and stay unhealthy where a Xid had made them so: it is
// told once, and its quiet period may not be over. Everything else that is wrong with a card shows again.
type roster struct {
	unit gpu.Unit
	// quiet is how long a card has to be without trouble before it counts as healthy again.
	quiet time.Duration

	records []record // by index
	// problem is why no card can be used, empty where that is not so.
	problem string
	// silent says that the driver couldn't be asked, so that how the cards are isn't known.
	silent bool
}

// record is a card with its history.
type record struct {
	card gpu.Card
	// trouble is when something was last wrong with the card.
	trouble time.Time
	// failing says that the last listing couldn't read the card, or didn't have it.
	failing bool
	// seen says that the driver has reported the card since the program started.
	seen bool
	// position is the driver's own index of the card.
	position int
}

// expect keeps the indices of cards that are known from before, and what Xids have done to them.
func (r *roster) expect(known []gpu.Card, now time.Time) {
	for _, card := range known {
		if card.UUID != "" && r.find(card.UUID) == nil {
			rec := record{card: gpu.Card{Index: card.Index, UUID: card.UUID, NUMANode: gpu.NoNUMANode}}
			if fromXid(card.Unhealthy) {
				rec.blame(card.Unhealthy, now)
			}
			r.records = append(r.records, rec)
		}
	}
	slices.SortStableFunc(r.records, func(a, b record) int { return cmp.Compare(a.card.Index, b.card.Index) })
	r.records = slices.CompactFunc(r.records, func(a, b record) bool { return a.card.Index == b.card.Index })
}

// list takes what the driver says of its cards.
func (r *roster) list(devices []device, now time.Time) {
	r.silent, r.problem = false, ""
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
		if rec := &r.records[i]; rec.seen && !listed[rec.card.Index] {
			rec.failing = true
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
	if d.bytes != 0 {
		card.Memory = r.unit.Count(d.bytes)
	}
	if d.numaNode != gpu.NoNUMANode {
		card.NUMANode = d.numaNode
	}

	if rec.failing {
		rec.trouble = now // it has been failing until now, as far as is known
	}
	rec.failing = d.err != nil
	switch {
	case rec.failing:
		rec.blame(d.err.Error(), now)
	case now.Sub(rec.trouble) >= r.quiet:
		card.Unhealthy = ""
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
		if e.xid.application() {
			continue
		}
		if e.uuid == "" {
			// Any of them may be the one.
			for i := range r.records {
				if !r.records[i].seen {
					continue
				}
				r.records[i].blame(e.xid.String()+reasonUnnamed, now)
			}
		} else if rec := r.find(e.uuid); rec != nil && rec.seen {
			rec.blame(e.xid.String(), now)
		}
	}
}

// silence notes that the driver can't be asked. The cards are unusable until it answers again, but that is no mark
// against any of them: there is no quiet period to wait for afterwards.
func (r *roster) silence(problem string) {
	r.silent, r.problem = true, problem
}

// failing says whether some card couldn't be read, or wasn't there, at the last listing.
func (r *roster) failing() bool {
	return slices.ContainsFunc(r.records, func(rec record) bool { return rec.failing })
}

// state returns a copy of what is known now.
func (r *roster) state() State {
	s := State{Problem: r.problem}
	for _, rec := range r.records {
		if !rec.seen {
			continue
		}
		card := rec.card
		if rec.position != card.Index {
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
