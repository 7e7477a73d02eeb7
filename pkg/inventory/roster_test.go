package inventory

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// good returns a card that can be read.
func good(index int, uuid string) device {
	return device{index: index, uuid: uuid, model: "V100", bytes: 16276 << 20, numaNode: 0}
}

// smaller returns a good card with less memory.
func smaller(index int, uuid string) device {
	d := good(index, uuid)
	d.bytes = 15000 << 20
	return d
}

// bad returns a card that can't be read. uuid is empty if the UUID can't be read either.
func bad(index int, uuid, reason string) device {
	return device{index: index, uuid: uuid, numaNode: gpu.NoNUMANode, err: errors.New(reason)}
}

// lost returns a card that the driver has lost.
func lost(index int) device {
	d := bad(index, "", "lost")
	d.lost = true
	return d
}

// untilReset returns the reason of a card with a Xid that only a reset ends.
func untilReset(x xid) string { return x.String() + reasonReset }

// card returns the roster's card for a good device. It is unhealthy if reason is not empty.
func card(index int, uuid, reason string) gpu.Card {
	return gpu.Card{Index: index, UUID: uuid, Model: "V100", Memory: 16276, NUMANode: 0, Unhealthy: reason}
}

// TestRoster takes steps on a roster that has listed the good cards a and b.
func TestRoster(t *testing.T) {
	const quiet = 5 * time.Minute
	// A step has one of list, events and silence. want is the state after it.
	type step struct {
		at      time.Duration
		list    []device
		events  []event
		silence string
		want    State
	}
	cards := func(cards ...gpu.Card) State { return State{Unit: gpu.MiB, Cards: cards} }
	ab := func(a, b string) State { return cards(card(0, "a", a), card(1, "b", b)) }
	abc := func(a, b, c string) State { return cards(card(0, "a", a), card(1, "b", b), card(2, "c", c)) }
	both, three := []device{good(0, "a"), good(1, "b")}, []device{good(0, "a"), good(1, "b"), good(2, "c")}
	asked, reset := good(0, "a"), good(0, "a")
	asked.recovery, asked.err, reset.recovery = recoveryReset, recoveryReset.err(), recoveryNone
	const min, gone = time.Minute, reasonNotReported

	for name, steps := range map[string][]step{
		"a critical Xid ends at the first good probe after the quiet period": {
			{at: 1 * min, events: []event{{"b", 74}}, want: ab("", "Xid 74")},
			{at: 2 * min, list: both, want: ab("", "Xid 74")},
			{at: 6*min - 1, list: both, want: ab("", "Xid 74")},
			{at: 6 * min, list: both, want: ab("", "")},
		},
		"each Xid restarts the quiet period, and the first reason stays": {
			{at: 1 * min, events: []event{{"a", 48}}, want: ab("Xid 48", "")},
			{at: 4 * min, events: []event{{"a", 74}}, want: ab("Xid 48", "")},
			{at: 8 * min, list: both, want: ab("Xid 48", "")},
			{at: 9 * min, list: both, want: ab("", "")},
			{at: 9 * min, events: []event{{"a", 74}}, want: ab("Xid 74", "")},
		},
		"application Xids are ignored, and don't extend a quiet period": {
			{events: []event{{"a", 13}, {"a", 31}, {"a", 43}, {"a", 45}, {"a", 68}, {"a", 109}, {"", 31}, {"b", 94}}, want: ab("", "Xid 94")},
			{at: 4 * min, events: []event{{"b", 31}}, want: ab("", "Xid 94")},
			{at: 5 * min, list: both, want: ab("", "")},
		},
		"a Xid on a card that the driver can't name counts for every card": {
			{events: []event{{"", 79}}, want: ab("Xid 79"+reasonUnnamed, "Xid 79"+reasonUnnamed)},
		},
		"a Xid of an unknown card is ignored": {{events: []event{{"z", 79}}, want: ab("", "")}},
		"a Xid that only a reset ends stays": {
			{events: []event{{"a", 48}}, want: ab("Xid 48", "")},
			{events: []event{{"a", 64}}, want: ab(untilReset(64), "")},
			{events: []event{{"a", 95}}, want: ab(untilReset(64), "")},
			{at: 24 * time.Hour, list: both, want: ab(untilReset(64), "")},
		},
		"a card for which the driver no longer asks for a reset was reset, and has its quiet period": {
			{events: []event{{"a", 95}}, want: ab(untilReset(95), "")},
			{list: []device{reset, good(1, "b")}, want: ab(untilReset(95), "")},
			{at: quiet, list: []device{asked, good(1, "b")}, want: ab("Xid 95"+reasonAsked, "")},
			{at: 2 * quiet, list: []device{asked, good(1, "b")}, want: ab("Xid 95"+reasonAsked, "")},
			{at: 3 * quiet, list: []device{reset, good(1, "b")}, want: ab("Xid 95", "")},
			{at: 4 * quiet, list: []device{reset, good(1, "b")}, want: ab("", "")},
		},
		"a card for which the driver asks for a reset, without a Xid": {
			{list: []device{asked, good(1, "b")}, want: ab("the driver asks for a reset of the card", "")},
			{at: quiet, list: []device{asked, good(1, "b")}, want: ab("the driver asks for a reset of the card", "")},
		},
		"a card that can't be read for another reason than its loss wasn't reset": {
			{events: []event{{"a", 95}}, want: ab(untilReset(95), "")},
			{list: []device{bad(0, "a", "no memory"), good(1, "b")}, want: ab(untilReset(95), "")},
			{list: both, want: ab(untilReset(95), "")},
			{at: quiet, list: both, want: ab(untilReset(95), "")},
		},
		"a card that was lost and is back was reset, and has its quiet period": {
			{events: []event{{"a", 79}}, want: ab(untilReset(79), "")},
			{list: []device{lost(0), good(1, "b")}, want: ab("Xid 79"+reasonLost, "")},
			{at: quiet, list: []device{bad(0, "a", "no memory"), good(1, "b")}, want: ab("Xid 79"+reasonLost, "")},
			{at: quiet, list: both, want: ab("Xid 79", "")},
			{at: 2*quiet - 1, list: both, want: ab("Xid 79", "")},
			{at: 2 * quiet, list: both, want: ab("", "")},
		},
		"a card that was missing and is back was reset": {
			{events: []event{{"b", 79}}, want: ab("", untilReset(79))},
			{list: both[:1], want: ab("", "Xid 79"+reasonLost)},
			{at: quiet, list: both, want: ab("", "Xid 79")},
			{at: 2 * quiet, list: both, want: ab("", "")},
		},
		"a card has the memory that the administrator sets, but never more than the driver reports": {
			{list: []device{{index: 0, uuid: "unified", model: "GB10"}, good(1, "b"), {index: 2, uuid: "c"}}, want: cards(
				gpu.Card{Index: 0, UUID: "unified", Model: "GB10", Memory: 1 << 20},
				card(1, "b", ""),
				gpu.Card{Index: 2, UUID: "c", Unhealthy: string(errNoMemory)},
			)},
		},
		"a card with less than one unit can't be used": {
			{list: []device{{index: 0, uuid: "small", bytes: 1<<20 - 1}, good(1, "b")}, want: cards(
				gpu.Card{Index: 0, UUID: "small", Unhealthy: "it has less memory than one unit (MiB)"}, card(1, "b", ""),
			)},
		},
		"a card that can't be read keeps its values, and must be read for a quiet period to be healthy": {
			{at: 1 * min, list: []device{good(0, "a"), bad(1, "b", "no memory")}, want: ab("", "no memory")},
			{at: 3 * min, list: []device{good(0, "a"), bad(1, "", "lost")}, want: ab("", "no memory")},
			{at: 9 * min, list: both, want: ab("", "no memory")},
			{at: 14*min - 1, list: both, want: ab("", "no memory")},
			{at: 14 * min, list: both, want: ab("", "")},
		},
		"a card that was never read is listed without values until it is read": {
			{list: []device{good(0, "a"), good(1, "b"), bad(2, "", "lost")}, want: cards(
				card(0, "a", ""), card(1, "b", ""), gpu.Card{Index: 2, NUMANode: gpu.NoNUMANode, Unhealthy: "lost"},
			)},
			{at: 1 * min, list: three, want: abc("", "", "lost")},
			{at: 6 * min, list: three, want: abc("", "", "")},
		},
		"a Xid replaces another error, which the next listing would show again": {
			{list: []device{bad(0, "a", "no memory"), good(1, "b")}, want: ab("no memory", "")},
			{events: []event{{"a", 48}}, want: ab("Xid 48", "")},
			{list: []device{bad(0, "a", "no memory"), good(1, "b")}, want: ab("Xid 48", "")},
		},
		"the values are read again": {
			{list: []device{{index: 0, uuid: "a", model: "P100", bytes: 16276<<20 + 1<<19, numaNode: 1}, good(1, "b")}, want: cards(
				gpu.Card{Index: 0, UUID: "a", Model: "P100", Memory: 16276, NUMANode: 1}, card(1, "b", ""),
			)},
		},
		"another amount of memory counts after a quiet period": {
			{list: []device{smaller(0, "a"), good(1, "b")}, want: ab(string(errMemoryChanged), "")},
			{at: 1, list: []device{smaller(0, "a"), good(1, "b")}, want: ab(string(errMemoryChanged), "")},
			{at: quiet, list: []device{smaller(0, "a"), good(1, "b")}, want: ab(string(errMemoryChanged), "")},
			{at: quiet + 1, list: []device{smaller(0, "a"), good(1, "b")}, want: cards(
				gpu.Card{Index: 0, UUID: "a", Model: "V100", Memory: 15000}, card(1, "b", ""),
			)},
		},
		"memory that alternates changes nothing": {
			{at: 1 * min, list: []device{smaller(0, "a"), good(1, "b")}, want: ab(string(errMemoryChanged), "")},
			{at: 6 * min, list: both, want: ab(string(errMemoryChanged), "")},
			{at: 11 * min, list: []device{smaller(0, "a"), good(1, "b")}, want: ab(string(errMemoryChanged), "")},
		},
		"a card that suddenly has no memory keeps its own": {
			{at: 1 * min, list: []device{{index: 0, uuid: "a"}, good(1, "b")}, want: ab(string(errNoMemory), "")},
			{at: 2 * min, list: both, want: ab(string(errNoMemory), "")},
			{at: 7 * min, list: both, want: ab("", "")},
		},
		"a missing card stays listed, and the others keep their index though NVML renumbers": {
			{list: three, want: abc("", "", "")},
			{at: 1 * min, list: []device{good(0, "a"), good(1, "c")}, want: abc("", gone, "")},
			{at: 9 * min, list: three, want: abc("", gone, "")},
			{at: 14 * min, list: three, want: abc("", "", "")},
		},
		"a card without a UUID matches no card if indices have moved": {
			{list: three, want: abc("", "", "")},
			{list: []device{good(0, "b"), bad(1, "", "lost"), good(2, "c")}, want: abc(gone, "", "")},
		},
		"a new card replaces the one at its index": {
			{list: []device{good(0, "a"), good(1, "z")}, want: cards(card(0, "a", ""), card(1, "z", ""))},
		},
		"a new card is appended if its index is taken": {
			{list: []device{good(0, "z"), good(1, "a"), good(2, "b")}, want: cards(card(0, "a", ""), card(1, "b", ""), card(2, "z", ""))},
		},
		"no cards is a problem, and the known cards are missing": {
			{list: []device{}, want: State{Unit: gpu.MiB, Problem: problemNoCards, Cards: ab(gone, gone).Cards}},
			{at: quiet, list: both, want: ab(gone, gone)},
			{at: 2 * quiet, list: both, want: ab("", "")},
		},
		"a silent driver makes every card unusable until it answers, no longer": {
			{events: []event{{"b", 74}}, want: ab("", "Xid 74")},
			{silence: "no driver", want: State{Unit: gpu.MiB, Problem: "no driver", Cards: ab("no driver", "Xid 74").Cards}},
			{at: 1 * min, list: both, want: ab("", "Xid 74")},
			{at: 5 * min, list: both, want: ab("", "")},
		},
	} {
		t.Run(name, func(t *testing.T) {
			start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
			r := &roster{unit: gpu.MiB, quiet: quiet, memory: CardMemory{byUUID: map[string]uint64{"unified": 1 << 40, "b": 1 << 40}}}
			r.silence("no driver")
			expect(t, "before the first listing", State{Unit: gpu.MiB, Problem: "no driver"}, r.state())
			r.list(both, start)
			expect(t, "after the first listing", ab("", ""), r.state())
			for i, s := range steps {
				now := start.Add(s.at)
				switch {
				case s.list != nil:
					r.list(s.list, now)
				case s.silence != "":
					r.silence(s.silence)
				default:
					r.report(s.events, now)
				}
				got := r.state()
				got.Moved = nil // tested by TestRosterExpect
				expect(t, fmt.Sprintf("after step %d", i), s.want, got)
			}
		})
	}
}

func TestRosterExpect(t *testing.T) {
	known := []gpu.Card{card(0, "a", ""), card(1, "b", "Xid 74"), card(2, "c", untilReset(95))}
	for name, test := range map[string]struct {
		known   []gpu.Card
		list    []device
		xids    string // the disabled Xids
		want    State
		healthy []int // the healthy cards after the quiet period
	}{
		"a card is missing and the driver renumbers: all keep their indices, the missing one its values": {
			known: known, list: []device{good(0, "b"), good(1, "c")},
			want: State{
				Unit:  gpu.MiB,
				Cards: []gpu.Card{card(0, "a", reasonNotReported), card(1, "b", "Xid 74"), card(2, "c", untilReset(95))},
				Moved: map[int]int{1: 0, 2: 1},
			},
			healthy: []int{1},
		},
		"a card is lost: it keeps its values": {
			known: known, list: []device{lost(0), good(1, "b"), good(2, "c")},
			want:    State{Unit: gpu.MiB, Cards: []gpu.Card{card(0, "a", "lost"), card(1, "b", "Xid 74"), card(2, "c", untilReset(95))}},
			healthy: []int{1},
		},
		"nothing has changed": {
			known: known, list: []device{good(0, "a"), good(1, "b"), good(2, "c")},
			want:    State{Unit: gpu.MiB, Cards: []gpu.Card{card(0, "a", ""), card(1, "b", "Xid 74"), card(2, "c", untilReset(95))}},
			healthy: []int{0, 1},
		},
		"the driver no longer asks for a reset": {
			known:   []gpu.Card{card(0, "a", "Xid 95"+reasonAsked)},
			list:    []device{{index: 0, uuid: "a", model: "V100", bytes: 16276 << 20, recovery: recoveryNone}},
			want:    State{Unit: gpu.MiB, Cards: []gpu.Card{card(0, "a", "Xid 95")}},
			healthy: []int{0},
		},
		"the driver doesn't tell the memory": {
			known: known[:1], list: []device{{index: 0, uuid: "a", numaNode: gpu.NoNUMANode, err: errMIG}},
			want: State{Unit: gpu.MiB, Cards: []gpu.Card{card(0, "a", string(errMIG))}},
		},
		"the Xid no longer counts": {
			known: known, xids: "95,74", list: []device{good(0, "a"), good(1, "b"), good(2, "c")},
			want:    State{Unit: gpu.MiB, Cards: []gpu.Card{card(0, "a", ""), card(1, "b", ""), card(2, "c", "")}},
			healthy: []int{0, 1, 2},
		},
		"other reasons than a Xid are dropped": {
			known:   []gpu.Card{card(0, "a", "initializing the NVIDIA driver library: Driver Not Loaded"), card(1, "b", "Xid 48"+reasonUnnamed)},
			list:    []device{good(0, "a"), good(1, "b")},
			want:    State{Unit: gpu.MiB, Cards: []gpu.Card{card(0, "a", ""), card(1, "b", "Xid 48"+reasonUnnamed)}},
			healthy: []int{0, 1},
		},
		"a new card replaces the known one at its index": {
			known: known, list: []device{good(0, "a"), good(1, "x"), good(2, "c")},
			want:    State{Unit: gpu.MiB, Cards: []gpu.Card{card(0, "a", ""), card(1, "x", ""), card(2, "c", untilReset(95))}},
			healthy: []int{0, 1},
		},
		"a new card never takes the index of a listed card": {
			known: known, list: []device{good(0, "x"), good(1, "a"), good(2, "b"), good(3, "c")},
			want: State{
				Unit:  gpu.MiB,
				Cards: []gpu.Card{card(0, "a", ""), card(1, "b", "Xid 74"), card(2, "c", untilReset(95)), card(3, "x", "")},
				Moved: map[int]int{0: 1, 1: 2, 2: 3, 3: 0},
			},
			healthy: []int{0, 1, 3},
		},
		"the driver has no cards": {
			known: known[:1], list: []device{},
			want: State{Unit: gpu.MiB, Problem: problemNoCards, Cards: []gpu.Card{card(0, "a", reasonNotReported)}},
		},
		"a card without a UUID, or with that or the index of an earlier card, is ignored": {
			known:   []gpu.Card{{Index: 5}, card(1, "a", ""), card(2, "a", ""), card(1, "b", "")},
			list:    []device{good(0, "a"), good(1, "b")},
			want:    State{Unit: gpu.MiB, Cards: []gpu.Card{card(1, "a", ""), card(2, "b", "")}, Moved: map[int]int{1: 0, 2: 1}},
			healthy: []int{1, 2},
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := &roster{unit: gpu.MiB, quiet: time.Minute}
			r.xids.Disabled, _ = ParseXids(test.xids)
			r.expect(test.known, time.Unix(0, 0))
			r.report([]event{{"a", 79}, {"", 79}}, time.Unix(0, 0)) // of cards that the driver has not listed yet
			if got := r.state(); len(got.Cards) > 0 {
				t.Errorf("before the first listing there are %v", got.Cards)
			}
			r.list(test.list, time.Unix(59, 0))
			expect(t, "state", test.want, r.state())
			r.list(test.list, time.Unix(59+60, 0))
			var healthy []int
			for _, card := range r.state().Cards {
				if card.Healthy() {
					healthy = append(healthy, card.Index)
				}
			}
			expect(t, "healthy after the quiet period", test.healthy, healthy)
		})
	}
}

// TestRosterRestart: the next run of the program knows from the reasons of the last one what a card needs.
func TestRosterRestart(t *testing.T) {
	type step struct {
		list   []device
		events []event
	}
	asked, clean := good(0, "a"), good(0, "a")
	asked.recovery, asked.err, clean.recovery = recoveryReset, recoveryReset.err(), recoveryNone
	ok, xid, fatal := step{list: []device{good(0, "a")}}, step{events: []event{{"a", 48}}}, step{events: []event{{"a", 79}}}
	failed, gone := step{list: []device{bad(0, "a", "no memory")}}, step{list: []device{lost(0)}}
	for name, test := range map[string]struct {
		before []step
		// next is what each listing of the next run has. first is the reason after the first listing, after that after a quiet period.
		next         device
		first, after string
	}{
		"an error that a listing would show again": {before: []step{failed, ok}, next: good(0, "a")},
		"a Xid": {before: []step{xid, ok}, next: good(0, "a"), first: "Xid 48"},
		"a Xid of a card that was unhealthy before":            {before: []step{failed, ok, xid}, next: good(0, "a"), first: "Xid 48"},
		"a reset is needed":                                    {before: []step{fatal, ok}, next: good(0, "a"), first: "Xid 79" + reasonReset, after: "Xid 79" + reasonReset},
		"the card was reset":                                   {before: []step{fatal, gone, ok}, next: good(0, "a"), first: "Xid 79"},
		"the card was lost, and was reset meanwhile":           {before: []step{fatal, gone}, next: good(0, "a"), first: "Xid 79"},
		"the driver asked for a reset, which was done":         {before: []step{fatal, {list: []device{asked}}}, next: clean, first: "Xid 79"},
		"the driver asked for a reset, and still asks for one": {before: []step{fatal, {list: []device{asked}}}, next: asked, first: "Xid 79" + reasonAsked, after: "Xid 79" + reasonAsked},
	} {
		t.Run(name, func(t *testing.T) {
			options, now := Options{Settings: Settings{Unit: gpu.MiB, QuietPeriod: time.Minute}}, time.Unix(0, 0)
			r := newRoster(options)
			r.list(ok.list, now)
			for _, s := range test.before {
				if r.report(s.events, now); s.list != nil {
					r.list(s.list, now)
				}
			}
			known := r.state().Cards
			r = newRoster(options)
			r.expect(known, now)
			r.list([]device{test.next}, now)
			expect(t, "after the first listing", test.first, r.state().Cards[0].Unhealthy)
			r.list([]device{test.next}, now.Add(time.Minute))
			expect(t, "after the quiet period", test.after, r.state().Cards[0].Unhealthy)
		})
	}
}

func TestRosterUnreachable(t *testing.T) {
	r := &roster{unit: gpu.MiB, quiet: time.Minute}
	partitioned := good(1, "b")
	partitioned.err = errMIG
	r.expect([]gpu.Card{card(0, "a", ""), card(1, "b", "")}, time.Unix(0, 0))
	for _, s := range []struct {
		what string
		list []device
		want bool
	}{
		{"one is missing from the start", []device{good(1, "b")}, true},
		{"all answer", []device{good(0, "a"), good(1, "b")}, false},
		{"one can't be read", []device{good(0, "a"), bad(1, "b", "lost")}, true},
		{"unhealthy, but it answers", []device{good(0, "a"), good(1, "b")}, false},
		{"unusable, but it answers", []device{good(0, "a"), partitioned}, false},
		{"one is missing", []device{good(0, "a")}, true},
	} {
		r.list(s.list, time.Unix(0, 0))
		expect(t, s.what, s.want, r.unreachable())
	}
	r.state().Cards[0].Model = "changed"
	expect(t, "the roster after a caller changed its copy", "V100", r.state().Cards[0].Model)
}

// TestRosterConfigure: what a change of the settings does to a card that the driver lists (a), one that it can't read (b) and one
// that it doesn't list (c), before and after the next listing.
func TestRosterConfigure(t *testing.T) {
	before := Settings{Unit: gpu.MiB, QuietPeriod: time.Minute}
	noXids := before
	noXids.Xids.Disabled.all = true
	small := before
	small.CardMemory.every = 1 << 30
	coarse := before
	coarse.Unit = gpu.GiB
	hasty := before
	hasty.QuietPeriod = time.Second

	memory := func(unit gpu.Unit, a, b, c gpu.Memory, reason string) State {
		cards := []gpu.Card{card(0, "a", reason), card(1, "b", "lost"), card(2, "c", reasonNotReported)}
		for i, m := range []gpu.Memory{a, b, c} {
			cards[i].Memory = m
		}
		return State{Unit: unit, Cards: cards}
	}
	const all = 16 << 10
	for name, test := range map[string]struct {
		settings    Settings
		xid         xid
		want, after State
	}{
		"the same settings":                     {before, 74, memory(gpu.MiB, all, all, all, "Xid 74"), memory(gpu.MiB, all, all, all, "Xid 74")},
		"another unit counts the memory again":  {coarse, 74, memory(gpu.GiB, 16, 16, 16, "Xid 74"), memory(gpu.GiB, 16, 16, 16, "Xid 74")},
		"less memory, where it is read":         {small, 74, memory(gpu.MiB, all, all, all, "Xid 74"), memory(gpu.MiB, 1<<10, all, all, "Xid 74")},
		"a Xid that no longer counts":           {noXids, 74, memory(gpu.MiB, all, all, all, ""), memory(gpu.MiB, all, all, all, "")},
		"the same, of a card that needs resets": {noXids, 79, memory(gpu.MiB, all, all, all, ""), memory(gpu.MiB, all, all, all, "")},
		"a quiet period that is over by now":    {hasty, 74, memory(gpu.MiB, all, all, all, "Xid 74"), memory(gpu.MiB, all, all, all, "")},
		"the same, of a Xid that needs a reset": {hasty, 79, memory(gpu.MiB, all, all, all, untilReset(79)), memory(gpu.MiB, all, all, all, untilReset(79))},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRoster(Options{Settings: before})
			listed := func(uuid string, index int) device { d := good(index, uuid); d.bytes = 16 << 30; return d }
			r.list([]device{listed("a", 0), listed("b", 1), listed("c", 2)}, time.Unix(0, 0))
			r.report([]event{{"a", test.xid}}, time.Unix(1, 0))
			later := []device{listed("a", 0), bad(1, "b", "lost")}
			r.list(later, time.Unix(2, 0))
			r.configure(test.settings)
			expect(t, "at once", test.want, r.state())
			r.list(later, time.Unix(3, 0))
			expect(t, "after a listing", test.after, r.state())
		})
	}
}

// TestReserved: a card has the part of its memory that the driver keeps, in whole units, rounded up.
func TestReserved(t *testing.T) {
	for name, test := range map[string]struct {
		bytes, reserved, set uint64
		want                 gpu.Memory
	}{
		"nothing":                             {16 << 30, 0, 0, 0},
		"a part of a unit":                    {16 << 30, 1, 0, 1},
		"more than a unit":                    {16 << 30, 3 << 29, 0, 2},
		"less than the remainder":             {16<<30 + 1<<29, 1 << 28, 0, 0},
		"less than an administrator left out": {16 << 30, 1 << 30, 12 << 30, 0},
		"more than an administrator left out": {16 << 30, 3 << 30, 14 << 30, 1},
		"a card without memory of its own":    {0, 5 << 30, 8 << 30, 0},
		"more than there is":                  {1 << 30, 5 << 30, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRoster(Options{Settings: Settings{Unit: gpu.GiB, CardMemory: CardMemory{every: test.set}}})
			r.list([]device{{uuid: "a", bytes: test.bytes, reserved: test.reserved}}, time.Time{})
			if got := r.state().Cards[0].Reserved; got != test.want {
				t.Errorf("got %d, want %d", got, test.want)
			}
			r.list([]device{{uuid: "a", bytes: test.bytes}}, time.Time{})
			if got := r.state().Cards[0].Reserved; got != test.want {
				t.Errorf("after a listing in which the driver didn't say it, got %d, want %d", got, test.want)
			}
		})
	}
}
