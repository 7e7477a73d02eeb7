package inventory

import (
	"cmp"
	"fmt"
	"slices"
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
// unhealthy. Cards from an earlier run are listed with the values that they had.
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
	// adapters are the RDMA adapters at the last listing.
	adapters []gpu.Adapter
	// listed is true if the driver has listed its cards since the program started.
	listed bool
}

// entry is a card with its history.
type entry struct {
	// card has the card's values. Its Unhealthy is not used (reason).
	card   gpu.Card
	health health
	// cause is why the card is not healthy.
	cause cause
	// quietSince is when the quiet period began.
	quietSince time.Time
	// last is what the last listing showed of the card.
	last sign
	// position is the driver's own index of the card; -1 until the driver has listed it since the program started.
	position int
	// read is the memory that the last listing had, if the card could be used. bytes and reserved are those that count (updateMemory). They
	// are 0 until they are known.
	read, bytes, reserved uint64
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
		if x := rec.cause.xid; x != 0 && !s.Xids.count(x) {
			rec.health, rec.cause = healthy, cause{}
		}
	}
	r.unit, r.memory, r.xids, r.quiet = s.Unit, s.CardMemory, s.Xids, s.QuietPeriod
}

// expect adds the cards of an earlier run. A card that a Xid had made unhealthy stays unhealthy, if that Xid still counts;
// other reasons are dropped. A card without a UUID, or with the UUID or the index of an earlier card in the list, is ignored.
func (r *roster) expect(known []gpu.Card, now time.Time) {
	for _, card := range known {
		if card.UUID != "" && r.find(card.UUID) == nil {
			rec := entry{card: card, position: -1}
			if cause, health := parseReason(card.Unhealthy); health != healthy && r.xids.count(cause.xid) {
				rec.health, rec.cause, rec.quietSince = health, cause, now
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
			rec.last = signLost
			rec.observe(signLost, cause{text: reasonNotReported}, r.quiet, now)
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
	rec.position = d.index
	card.UUID = cmp.Or(d.uuid, card.UUID)
	card.Model = cmp.Or(d.model, card.Model)
	if d.numaNode != gpu.NoNUMANode {
		card.NUMANode = d.numaNode
	}
	if d.pciAddress != "" { // Else the driver didn't report where the card is.
		card.RDMAPorts = d.rdmaPorts
	}
	if d.peers != nil {
		rec.peers = d.peers
	}
	err := d.err
	if err == nil {
		err = rec.checkMemory(d, r)
	}
	rec.last = signOf(d, err)
	var why cause
	if err != nil {
		why.text = err.Error()
	}
	rec.observe(rec.last, why, r.quiet, now)
	if rec.last.answers() {
		rec.updateMemory(d, r)
	}
}

// checkMemory returns why the card can't be used with the memory that the driver reports; nil if it can.
func (rec *entry) checkMemory(d device, r *roster) error {
	before := rec.read
	rec.read = d.bytes
	bytes := r.memory.of(rec.card.UUID, d.bytes)
	memory := r.unit.Count(bytes)
	switch {
	case bytes == 0:
		return errNoMemory
	case before != 0 && r.unit.Count(r.memory.of(rec.card.UUID, before)) != memory:
		return errMemoryChanged
	case memory == 0:
		return unusable(fmt.Sprintf("it has less memory than one unit (%s)", r.unit))
	}
	return nil
}

// updateMemory records the memory that counts. While the card is not healthy, what the driver reports doesn't change it: pods have that
// memory, and each change is written to the API server and reported to the kubelet. For the same reason the largest amount that the
// driver has reserved counts.
func (rec *entry) updateMemory(d device, r *roster) {
	if rec.health == healthy || rec.bytes == 0 {
		rec.bytes, rec.reserved = d.bytes, max(rec.reserved, d.reserved)
	}
	bytes := r.memory.of(rec.card.UUID, rec.bytes)
	if bytes == 0 {
		return // It is not known, so that of an earlier run stays.
	}
	rec.card.Memory, rec.card.Reserved = r.unit.Count(bytes), 0
	if rec.bytes != 0 {
		rec.card.Reserved = rec.card.Memory.Sub(r.unit.Count(min(bytes, rec.bytes-min(rec.reserved, rec.bytes))))
	}
}

// observe changes the state of the card by a sign. why is what makes the card unhealthy, if the sign does. The first cause stays
// until the card is healthy again: later errors are usually a consequence of the first one, and each change of the reason would be
// written to the API server. But a Xid replaces an error that the next listing shows again, and the need for a reset any other cause.
func (rec *entry) observe(s sign, why cause, period time.Duration, now time.Time) {
	before := rec.health
	rec.health = transitions[before][s]
	switch {
	case before != recovering || s != signGood && s != signClean:
		rec.quietSince = now
	case now.Sub(rec.quietSince) >= period:
		rec.health = healthy
	}
	_, needed := stateReasons[before]
	_, needs := stateReasons[rec.health]
	switch {
	case rec.health == healthy:
		rec.cause = cause{}
	case rec.cause.text == "", rec.cause.xid == 0 && why.xid != 0, needs && !needed:
		rec.cause = why
	}
}

// reason returns why the card can't be used; empty if it can.
func (rec *entry) reason() string { return rec.cause.text + stateReasons[rec.health] }

// report records Xid errors. It ignores errors of cards that the driver has not listed since the program started.
func (r *roster) report(events []event, now time.Time) {
	for _, e := range events {
		if !r.xids.count(e.xid) {
			continue
		}
		if e.uuid == "" {
			// Any card may have caused the event, so all become unhealthy. None needs a reset: a reset of all cards would be
			// required otherwise. The probe shows which card is affected.
			for i := range r.entries {
				if rec := &r.entries[i]; rec.position >= 0 {
					rec.observe(signXid, cause{e.xid.String() + reasonUnnamed, e.xid}, r.quiet, now)
				}
			}
		} else if rec := r.find(e.uuid); rec != nil && rec.position >= 0 {
			sign := signXid
			if e.xid.needsReset() {
				sign = signFatalXid
			}
			rec.observe(sign, cause{e.xid.String(), e.xid}, r.quiet, now)
		}
	}
}

// silence records that the driver doesn't answer or can't be used. The cards are unusable until it answers again. This is
// not an error of a card, so no quiet period follows.
func (r *roster) silence(problem string) {
	r.silent, r.problem = true, problem
}

// unreachable reports whether the last listing could not read a card or did not contain it.
func (r *roster) unreachable() bool {
	return slices.ContainsFunc(r.entries, func(rec entry) bool { return !rec.last.answers() })
}

// state returns a copy of the current state. It contains no cards before the first listing.
func (r *roster) state() State {
	s := State{Unit: r.unit, Problem: r.problem, Adapters: r.adapters}
	if !r.listed {
		return s
	}
	for _, rec := range r.entries {
		card := rec.card
		card.Unhealthy = rec.reason()
		if rec.position >= 0 && rec.position != card.Index {
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
