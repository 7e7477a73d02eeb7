package inventory

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// good returns a card that can be read.
func good(index int, uuid string) device {
	return device{index: index, uuid: uuid, model: "V100", bytes: 16276 << 20, numaNode: 0}
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

// card returns the roster's card for a good device. It is unhealthy if reason is not empty.
func card(index int, uuid, reason string) gpu.Card {
	return gpu.Card{Index: index, UUID: uuid, Model: "V100", Memory: 16276, NUMANode: 0, Unhealthy: reason}
}

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
	cards := func(cards ...gpu.Card) State { return State{Cards: cards} }
	both := []device{good(0, "a"), good(1, "b")}

	for name, steps := range map[string][]step{
		"good cards are healthy at once": {
			{list: both, want: cards(card(0, "a", ""), card(1, "b", ""))},
		},
		"a critical Xid heals at the first good probe after the quiet period": {
			{list: both, want: cards(card(0, "a", ""), card(1, "b", ""))},
			{at: 1 * time.Minute, events: []event{{"b", 74}}, want: cards(card(0, "a", ""), card(1, "b", "Xid 74"))},
			{at: 2 * time.Minute, list: both, want: cards(card(0, "a", ""), card(1, "b", "Xid 74"))},
			{at: 6*time.Minute - 1, list: both, want: cards(card(0, "a", ""), card(1, "b", "Xid 74"))},
			{at: 6 * time.Minute, list: both, want: cards(card(0, "a", ""), card(1, "b", ""))},
		},
		"a Xid that only a reset ends stays": {
			{list: both, want: cards(card(0, "a", ""), card(1, "b", ""))},
			{events: []event{{"a", 48}}, want: cards(card(0, "a", "Xid 48"), card(1, "b", ""))},
			{events: []event{{"a", 64}}, want: cards(card(0, "a", needsReset(64)), card(1, "b", ""))},
			{events: []event{{"a", 95}}, want: cards(card(0, "a", needsReset(64)), card(1, "b", ""))},
			{at: 24 * time.Hour, list: both, want: cards(card(0, "a", needsReset(64)), card(1, "b", ""))},
		},
		"a card that can't be read for another reason than its loss wasn't reset": {
			{list: both, want: cards(card(0, "a", ""), card(1, "b", ""))},
			{events: []event{{"a", 95}}, want: cards(card(0, "a", needsReset(95)), card(1, "b", ""))},
			{list: []device{bad(0, "a", "no memory"), good(1, "b")}, want: cards(card(0, "a", needsReset(95)), card(1, "b", ""))},
			{list: both, want: cards(card(0, "a", needsReset(95)), card(1, "b", ""))},
			{at: quiet, list: both, want: cards(card(0, "a", needsReset(95)), card(1, "b", ""))},
		},
		"a card that was lost and is there again was reset, and has its quiet period": {
			{list: both, want: cards(card(0, "a", ""), card(1, "b", ""))},
			{events: []event{{"a", 79}}, want: cards(card(0, "a", needsReset(79)), card(1, "b", ""))},
			{list: []device{lost(0), good(1, "b")}, want: cards(card(0, "a", needsReset(79)), card(1, "b", ""))},
			{at: quiet, list: []device{bad(0, "a", "no memory"), good(1, "b")}, want: cards(card(0, "a", needsReset(79)), card(1, "b", ""))},
			{at: quiet, list: both, want: cards(card(0, "a", needsReset(79)), card(1, "b", ""))},
			{at: 2*quiet - 1, list: both, want: cards(card(0, "a", needsReset(79)), card(1, "b", ""))},
			{at: 2 * quiet, list: both, want: cards(card(0, "a", ""), card(1, "b", ""))},
		},
		"a card that vanished and is there again was reset": {
			{list: both, want: cards(card(0, "a", ""), card(1, "b", ""))},
			{events: []event{{"b", 79}}, want: cards(card(0, "a", ""), card(1, "b", needsReset(79)))},
			{list: both[:1], want: cards(card(0, "a", ""), card(1, "b", needsReset(79)))},
			{at: quiet, list: both, want: cards(card(0, "a", ""), card(1, "b", needsReset(79)))},
			{at: 2 * quiet, list: both, want: cards(card(0, "a", ""), card(1, "b", ""))},
		},
		"a card has the memory that the administrator sets, but never more than the driver reports": {
			{list: []device{{index: 0, uuid: "unified", model: "GB10"}, good(1, "b"), {index: 2, uuid: "c"}}, want: cards(
				gpu.Card{Index: 0, UUID: "unified", Model: "GB10", Memory: 1 << 20},
				card(1, "b", ""),
				gpu.Card{Index: 2, UUID: "c", Unhealthy: string(errNoMemory)},
			)},
		},
		"a card with less than one unit can't be used": {
			{list: []device{{index: 0, uuid: "small", bytes: 1<<20 - 1}}, want: cards(
				gpu.Card{Index: 0, UUID: "small", Unhealthy: "it has less memory than one unit (MiB)"},
			)},
		},
		"each Xid restarts the quiet period, and the first reason stays": {
			{list: both, want: cards(card(0, "a", ""), card(1, "b", ""))},
			{at: 1 * time.Minute, events: []event{{"a", 48}}, want: cards(card(0, "a", "Xid 48"), card(1, "b", ""))},
			{at: 4 * time.Minute, events: []event{{"a", 74}}, want: cards(card(0, "a", "Xid 48"), card(1, "b", ""))},
			{at: 8 * time.Minute, list: both, want: cards(card(0, "a", "Xid 48"), card(1, "b", ""))},
			{at: 9 * time.Minute, list: both, want: cards(card(0, "a", ""), card(1, "b", ""))},
			{at: 9 * time.Minute, events: []event{{"a", 74}}, want: cards(card(0, "a", "Xid 74"), card(1, "b", ""))},
		},
		"application Xids are passed over, and don't lengthen a quiet period": {
			{list: both, want: cards(card(0, "a", ""), card(1, "b", ""))},
			{
				events: []event{{"a", 13}, {"a", 31}, {"a", 43}, {"a", 45}, {"a", 68}, {"a", 109}, {"", 31}, {"b", 94}},
				want:   cards(card(0, "a", ""), card(1, "b", "Xid 94")),
			},
			{at: 4 * time.Minute, events: []event{{"b", 31}}, want: cards(card(0, "a", ""), card(1, "b", "Xid 94"))},
			{at: 5 * time.Minute, list: both, want: cards(card(0, "a", ""), card(1, "b", ""))},
		},
		"an Xid on a card that can't be named is every card's": {
			{list: both, want: cards(card(0, "a", ""), card(1, "b", ""))},
			{events: []event{{"", 79}}, want: cards(
				card(0, "a", "Xid 79 on a card that the driver couldn't name"),
				card(1, "b", "Xid 79 on a card that the driver couldn't name"),
			)},
		},
		"an Xid of an unknown card is ignored": {
			{list: both, want: cards(card(0, "a", ""), card(1, "b", ""))},
			{events: []event{{"z", 79}}, want: cards(card(0, "a", ""), card(1, "b", ""))},
		},
		"a card that can't be read keeps its values, and has to be read for a quiet period to be healthy": {
			{list: both, want: cards(card(0, "a", ""), card(1, "b", ""))},
			{
				at: 1 * time.Minute, list: []device{good(0, "a"), bad(1, "b", "no memory")},
				want: cards(card(0, "a", ""), card(1, "b", "no memory")),
			},
			{
				at: 3 * time.Minute, list: []device{good(0, "a"), bad(1, "", "lost")},
				want: cards(card(0, "a", ""), card(1, "b", "no memory")),
			},
			{at: 9 * time.Minute, list: both, want: cards(card(0, "a", ""), card(1, "b", "no memory"))},
			{at: 14*time.Minute - 1, list: both, want: cards(card(0, "a", ""), card(1, "b", "no memory"))},
			{at: 14 * time.Minute, list: both, want: cards(card(0, "a", ""), card(1, "b", ""))},
		},
		"a card that was never read has a place without values until it is": {
			{list: []device{bad(0, "", "lost"), good(1, "b")}, want: cards(
				gpu.Card{Index: 0, NUMANode: gpu.NoNUMANode, Unhealthy: "lost"}, card(1, "b", ""),
			)},
			{at: 1 * time.Minute, list: both, want: cards(card(0, "a", "lost"), card(1, "b", ""))},
			{at: 6 * time.Minute, list: both, want: cards(card(0, "a", ""), card(1, "b", ""))},
		},
		"memory is read again, in case it has changed": {
			{list: []device{good(0, "a")}, want: cards(card(0, "a", ""))},
			{list: []device{{index: 0, uuid: "a", bytes: 15000<<20 + 1<<19, numaNode: 1}}, want: cards(
				gpu.Card{Index: 0, UUID: "a", Model: "V100", Memory: 15000, NUMANode: 1},
			)},
		},
		"a card that vanishes stays listed, and the others keep their index though NVML renumbers": {
			{list: []device{good(0, "a"), good(1, "b"), good(2, "c")}, want: cards(
				card(0, "a", ""), card(1, "b", ""), card(2, "c", ""),
			)},
			{at: 1 * time.Minute, list: []device{good(0, "a"), good(1, "c")}, want: cards(
				card(0, "a", ""), card(1, "b", "the driver doesn't report it any more"), card(2, "c", ""),
			)},
			{at: 9 * time.Minute, list: []device{good(0, "a"), good(1, "b"), good(2, "c")}, want: cards(
				card(0, "a", ""), card(1, "b", "the driver doesn't report it any more"), card(2, "c", ""),
			)},
			{at: 14 * time.Minute, list: []device{good(0, "a"), good(1, "b"), good(2, "c")}, want: cards(
				card(0, "a", ""), card(1, "b", ""), card(2, "c", ""),
			)},
		},
		"a card without a UUID matches none where indices have moved": {
			{list: []device{good(0, "a"), good(1, "b"), good(2, "c")}, want: cards(
				card(0, "a", ""), card(1, "b", ""), card(2, "c", ""),
			)},
			{list: []device{good(0, "b"), bad(1, "", "lost"), good(2, "c")}, want: cards(
				card(0, "a", "the driver doesn't report it any more"), card(1, "b", ""), card(2, "c", ""),
			)},
		},
		"a new card takes the place of one that is gone": {
			{list: both, want: cards(card(0, "a", ""), card(1, "b", ""))},
			{list: []device{good(0, "a"), good(1, "z")}, want: cards(card(0, "a", ""), card(1, "z", ""))},
		},
		"a new card goes to the end where its place is taken": {
			{list: both, want: cards(card(0, "a", ""), card(1, "b", ""))},
			{list: []device{good(0, "z"), good(1, "a"), good(2, "b")}, want: cards(
				card(0, "a", ""), card(1, "b", ""), card(2, "z", ""),
			)},
		},
		"no cards is a problem, and the cards that were there are gone": {
			{list: []device{good(0, "a")}, want: cards(card(0, "a", ""))},
			{list: []device{}, want: State{
				Problem: "the driver reports no cards",
				Cards:   []gpu.Card{card(0, "a", "the driver doesn't report it any more")},
			}},
			{at: quiet, list: []device{good(0, "a")}, want: cards(card(0, "a", "the driver doesn't report it any more"))},
			{at: 2 * quiet, list: []device{good(0, "a")}, want: cards(card(0, "a", ""))},
		},
		"a silent driver makes every card unusable until it answers, no longer": {
			{silence: "no driver", want: State{Problem: "no driver"}},
			{list: both, want: cards(card(0, "a", ""), card(1, "b", ""))},
			{events: []event{{"b", 74}}, want: cards(card(0, "a", ""), card(1, "b", "Xid 74"))},
			{silence: "no driver", want: State{
				Problem: "no driver",
				Cards:   []gpu.Card{card(0, "a", "no driver"), card(1, "b", "Xid 74")},
			}},
			{at: 1 * time.Minute, list: both, want: cards(card(0, "a", ""), card(1, "b", "Xid 74"))},
			{at: 5 * time.Minute, list: both, want: cards(card(0, "a", ""), card(1, "b", ""))},
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := &roster{unit: gpu.MiB, quiet: quiet, memory: CardMemory{byUUID: map[string]uint64{"unified": 1 << 40, "b": 1 << 40}}}
			start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
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
				if diff := cmp.Diff(s.want, got); diff != "" {
					t.Fatalf("after step %d (-want +got):\n%s", i, diff)
				}
			}
		})
	}
}

func TestRosterExpect(t *testing.T) {
	known := []gpu.Card{card(0, "a", ""), card(1, "b", "Xid 74"), card(2, "c", needsReset(95))}
	for name, test := range map[string]struct {
		known   []gpu.Card
		list    []device
		xids    string // the disabled Xids
		want    State
		healthy []int // the healthy cards after the quiet period
	}{
		"a card is away and the driver renumbers: all keep their indices, and the missing one what it had": {
			known: known, list: []device{good(0, "b"), good(1, "c")},
			want: State{
				Cards: []gpu.Card{card(0, "a", reasonNotReported), card(1, "b", "Xid 74"), card(2, "c", needsReset(95))},
				Moved: map[int]int{1: 0, 2: 1},
			},
			healthy: []int{1},
		},
		"a card is there but lost: it keeps what it had": {
			known: known, list: []device{lost(0), good(1, "b"), good(2, "c")},
			want:    State{Cards: []gpu.Card{card(0, "a", "lost"), card(1, "b", "Xid 74"), card(2, "c", needsReset(95))}},
			healthy: []int{1},
		},
		"nothing has changed": {
			known: known, list: []device{good(0, "a"), good(1, "b"), good(2, "c")},
			want:    State{Cards: []gpu.Card{card(0, "a", ""), card(1, "b", "Xid 74"), card(2, "c", needsReset(95))}},
			healthy: []int{0, 1},
		},
		"the driver asked for a reset, and doesn't any more": {
			known:   []gpu.Card{card(0, "a", needsReset(95)+reasonAsked)},
			list:    []device{{index: 0, uuid: "a", model: "V100", bytes: 16276 << 20, recovery: recoveryNone}},
			want:    State{Cards: []gpu.Card{card(0, "a", needsReset(95)+reasonAsked)}},
			healthy: []int{0},
		},
		"a Xid doesn't count any more": {
			known: known, xids: "95,74", list: []device{good(0, "a"), good(1, "b"), good(2, "c")},
			want:    State{Cards: []gpu.Card{card(0, "a", ""), card(1, "b", ""), card(2, "c", "")}},
			healthy: []int{0, 1, 2},
		},
		"what was wrong but for a Xid has to show again": {
			known:   []gpu.Card{card(0, "a", "initialize the NVIDIA driver library: Driver Not Loaded"), card(1, "b", "Xid 48"+reasonUnnamed)},
			list:    []device{good(0, "a"), good(1, "b")},
			want:    State{Cards: []gpu.Card{card(0, "a", ""), card(1, "b", "Xid 48"+reasonUnnamed)}},
			healthy: []int{0, 1},
		},
		"a new card where a known one was takes its index": {
			known: known, list: []device{good(0, "a"), good(1, "x"), good(2, "c")},
			want:    State{Cards: []gpu.Card{card(0, "a", ""), card(1, "x", ""), card(2, "c", needsReset(95))}},
			healthy: []int{0, 1},
		},
		"a new card never takes that of one that is there": {
			known: known, list: []device{good(0, "x"), good(1, "a"), good(2, "b"), good(3, "c")},
			want: State{
				Cards: []gpu.Card{card(0, "a", ""), card(1, "b", "Xid 74"), card(2, "c", needsReset(95)), card(3, "x", "")},
				Moved: map[int]int{0: 1, 1: 2, 2: 3, 3: 0},
			},
			healthy: []int{0, 1, 3},
		},
		"cards without a UUID, or listed twice, are ignored": {
			known:   []gpu.Card{{Index: 5}, card(1, "a", ""), card(2, "a", ""), card(1, "b", "")},
			list:    []device{good(0, "a"), good(1, "b")},
			want:    State{Cards: []gpu.Card{card(1, "a", ""), card(2, "b", "")}, Moved: map[int]int{1: 0, 2: 1}},
			healthy: []int{1, 2},
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := &roster{unit: gpu.MiB, quiet: time.Minute}
			r.xids, _ = ParseXidChecks(test.xids, "")
			r.expect(test.known, time.Unix(0, 0))
			r.report([]event{{"a", 79}, {"", 79}}, time.Unix(0, 0)) // of cards that the driver has not listed yet
			if got := r.state(); len(got.Cards) > 0 {
				t.Errorf("before the driver has said anything there are %v", got.Cards)
			}
			r.list(test.list, time.Unix(59, 0))
			if diff := cmp.Diff(test.want, r.state()); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
			r.list(test.list, time.Unix(59+60, 0))
			var healthy []int
			for _, card := range r.state().Cards {
				if card.Healthy() {
					healthy = append(healthy, card.Index)
				}
			}
			if diff := cmp.Diff(test.healthy, healthy); diff != "" {
				t.Errorf("healthy after the quiet period (-want +got)\n%s", diff)
			}
		})
	}
}

func TestRosterUnreachable(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	r := &roster{unit: gpu.MiB, quiet: time.Minute}
	partitioned := good(1, "b")
	partitioned.err = errMIG
	for i, s := range []struct {
		list []device
		want []int
	}{
		{[]device{good(0, "a"), good(1, "b")}, nil},
		{[]device{good(0, "a"), bad(1, "b", "lost")}, []int{1}},
		{[]device{good(0, "a"), good(1, "b")}, nil}, // still unhealthy, but it answers
		{[]device{good(0, "a"), partitioned}, nil},
		{[]device{good(0, "a")}, []int{1}},
	} {
		r.list(s.list, now)
		if diff := cmp.Diff(s.want, r.unreachable()); diff != "" {
			t.Errorf("listing %d (-want +got):\n%s", i, diff)
		}
	}
}

func TestStateIsACopy(t *testing.T) {
	r := &roster{unit: gpu.MiB}
	r.list([]device{good(0, "a")}, time.Time{})
	r.state().Cards[0].Unhealthy = "changed"
	if diff := cmp.Diff(State{Cards: []gpu.Card{card(0, "a", "")}}, r.state()); diff != "" {
		t.Errorf("a caller changed the roster (-want +got):\n%s", diff)
	}
}
