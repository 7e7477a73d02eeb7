package usage

import (
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
)

// measured is a measurement at a number of seconds.
func measured(second int, rows ...protocol.ContainerUsage) protocol.Usage {
	return protocol.Usage{Time: time.Unix(int64(second), 0), Cards: []protocol.CardUsage{{Index: 0}, {Index: 1}}, Containers: rows}
}

func uses(pod, container string, card int, used, requested uint64) protocol.ContainerUsage {
	return protocol.ContainerUsage{UID: pod, Container: container, Card: card, Used: used * mib, Requested: requested * mib}
}

// failed is a measurement in which card 0 could not be read.
func failed(second int) protocol.Usage {
	return protocol.Usage{Time: time.Unix(int64(second), 0), Cards: []protocol.CardUsage{{Index: 0, Problem: "reading its memory: Unknown Error"}, {Index: 1}}}
}

// missing is a measurement without card 0: the driver could not even tell which card it is.
func missing(second int) protocol.Usage {
	return protocol.Usage{Time: time.Unix(int64(second), 0), Cards: []protocol.CardUsage{{Index: 1}}}
}

// state is what is known beside a measurement, in MiB. All pods are the same.
type state struct {
	annotated *protocol.Overuse
	held      uint64
	// promised is what is promised of each card of 1600 MiB.
	promised uint64
	// ending is what of that is promised to a terminating pod of which no container runs.
	ending uint64
	// leaving is true if the pods are terminating, soon if they are expected to end soon.
	leaving, soon bool
}

func (s state) known() Known {
	held := func(memory uint64) map[int]uint64 { return map[int]uint64{0: memory * mib, 1: memory * mib} }
	pod := KnownPod{Annotated: s.annotated, Held: held(s.held), Leaving: s.leaving, EndsSoon: s.soon}
	card := KnownCard{1600 * mib, s.promised * mib}
	return Known{
		Pods:  map[gpu.PodUID]KnownPod{"a": pod, "b": pod, "ending": {Held: held(s.ending), Leaving: true, EndsSoon: true}},
		Cards: map[int]KnownCard{0: card, 1: card},
	}
}

// borrows is a container with a limit, and full a measurement of a card with so much memory in use.
func borrows(pod, container string, card int, used, requested, allowed uint64) protocol.ContainerUsage {
	row := uses(pod, container, card, used, requested)
	row.Allowed = allowed * mib
	return row
}

func full(second int, used uint64, rows ...protocol.ContainerUsage) protocol.Usage {
	report := measured(second, rows...)
	report.Cards[0].Free = new((1600 - used) * mib)
	return report
}

// TestOveruse: a tolerance of 10% and a grace period of 60 s.
func TestOveruse(t *testing.T) {
	type reports = map[gpu.PodUID]protocol.Overuse
	at := func(second int) time.Time { return time.Unix(int64(second), 0) }
	one := func(since, now int, card int, used, requested int64) reports {
		return reports{"a": {Used: used, Requested: requested, Since: at(since), At: at(now), Cards: map[int]protocol.CardOveruse{card: {Used: used, Requested: requested}}}}
	}
	lent := func(since, now int, used, requested, limit, short int64) reports {
		return reports{"a": {Used: used, Requested: requested, Since: at(since), At: at(now), Cards: map[int]protocol.CardOveruse{
			0: {Used: used, Requested: requested, Limit: limit, Short: short}}}}
	}
	nothing, short := state{}, state{held: 100, promised: 1500}
	incomplete := func(u protocol.Usage) protocol.Usage {
		u.Cards[0].Incomplete = true
		return u
	}
	for name, test := range map[string]struct {
		pod   state
		steps []protocol.Usage
		want  reports
	}{
		"within the grace period":                 {nothing, []protocol.Usage{measured(0, uses("a", "c", 0, 200, 100)), measured(59, uses("a", "c", 0, 200, 100))}, reports{}},
		"after the grace period":                  {nothing, []protocol.Usage{measured(0, uses("a", "c", 0, 150, 100)), measured(60, uses("a", "c", 0, 200, 100))}, one(0, 60, 0, 200, 100)},
		"within the tolerance":                    {nothing, []protocol.Usage{measured(0, uses("a", "c", 0, 110, 100)), measured(90, uses("a", "c", 0, 110, 100))}, reports{}},
		"a pause starts it again":                 {nothing, []protocol.Usage{measured(0, uses("a", "c", 0, 200, 100)), measured(50, uses("a", "c", 0, 100, 100)), measured(60, uses("a", "c", 0, 200, 100))}, reports{}},
		"back within its request":                 {nothing, []protocol.Usage{measured(0, uses("a", "c", 0, 200, 100)), measured(60, uses("a", "c", 0, 200, 100)), measured(70, uses("a", "c", 0, 100, 100))}, reports{}},
		"a failed reading doesn't start it again": {nothing, []protocol.Usage{measured(0, uses("a", "c", 0, 200, 100)), failed(50), measured(60, uses("a", "c", 0, 200, 100))}, one(0, 60, 0, 200, 100)},
		"nor does a measurement without the card": {nothing, []protocol.Usage{measured(0, uses("a", "c", 0, 200, 100)), missing(50), measured(60, uses("a", "c", 0, 200, 100))}, one(0, 60, 0, 200, 100)},
		"a measurement without the card changes no report": {nothing, []protocol.Usage{
			measured(0, uses("a", "c", 0, 200, 100)), measured(60, uses("a", "c", 0, 200, 100)), missing(70)}, one(0, 60, 0, 200, 100)},
		"a failed reading changes no report": {nothing, []protocol.Usage{
			measured(0, uses("a", "c", 0, 200, 100)), measured(60, uses("a", "c", 0, 200, 100)), failed(70)}, one(0, 60, 0, 200, 100)},
		"a failed reading of one of its cards, and it is within its request of the other": {nothing, []protocol.Usage{
			measured(0, uses("a", "c", 0, 200, 100), uses("a", "c", 1, 200, 100)), measured(60, uses("a", "c", 0, 200, 100), uses("a", "c", 1, 200, 100)),
			failed(70)}, one(0, 60, 0, 200, 100)},
		"a failed reading of another card": {nothing, []protocol.Usage{
			measured(0, uses("a", "c", 1, 200, 100)), measured(60, uses("a", "c", 1, 200, 100)), failed(70)}, reports{}},
		"a card that it wasn't given": {nothing, []protocol.Usage{measured(0, uses("a", "c", 1, 1, 0)), measured(60, uses("a", "c", 1, 2, 0))}, one(0, 60, 1, 2, 0)},
		"one of several cards, although the pod uses less of another": {nothing, []protocol.Usage{
			measured(0, uses("a", "c", 0, 10, 100), uses("a", "c", 1, 150, 100)), measured(60, uses("a", "c", 0, 10, 100), uses("a", "c", 1, 150, 100))}, one(0, 60, 1, 150, 100)},
		"another container of the pod makes room": {nothing, []protocol.Usage{
			measured(0, uses("a", "c", 0, 200, 100), uses("a", "d", 0, 0, 100)), measured(60, uses("a", "c", 0, 200, 100), uses("a", "d", 0, 0, 100))}, reports{}},
		"another container of the pod makes room, and doesn't run now": {state{held: 200}, []protocol.Usage{
			measured(0, uses("a", "c", 0, 200, 100)), measured(60, uses("a", "c", 0, 200, 100))}, reports{}},
		"another container was started again, and the API server doesn't show it yet": {state{held: 200}, []protocol.Usage{
			measured(0, uses("a", "c", 0, 120, 100), uses("a", "", 0, 80, 0)), measured(60, uses("a", "c", 0, 120, 100), uses("a", "", 0, 80, 0))}, reports{}},
		"the request of a container that doesn't run counts": {state{held: 200}, []protocol.Usage{
			measured(0, uses("a", "c", 0, 300, 100)), measured(60, uses("a", "c", 0, 300, 100))}, one(0, 60, 0, 300, 200)},
		"a container that the API server doesn't show": {nothing, []protocol.Usage{measured(0, uses("a", "", 0, 200, 0)), measured(60, uses("a", "", 0, 200, 0))}, reports{}},
		"two containers count together": {nothing, []protocol.Usage{
			measured(0, uses("a", "c", 0, 200, 100), uses("a", "d", 0, 300, 100)), measured(60, uses("a", "c", 0, 200, 100), uses("a", "d", 0, 300, 100))}, one(0, 60, 0, 500, 200)},
		"a small change isn't reported": {nothing, []protocol.Usage{
			measured(0, uses("a", "c", 0, 200, 100)), measured(60, uses("a", "c", 0, 200, 100)), measured(70, uses("a", "c", 0, 205, 100))}, one(0, 60, 0, 200, 100)},
		"a large change is": {nothing, []protocol.Usage{
			measured(0, uses("a", "c", 0, 200, 100)), measured(60, uses("a", "c", 0, 200, 100)), measured(70, uses("a", "c", 0, 250, 100))}, one(0, 70, 0, 250, 100)},
		"it is renewed": {nothing, []protocol.Usage{
			measured(0, uses("a", "c", 0, 200, 100)), measured(60, uses("a", "c", 0, 200, 100)), measured(120, uses("a", "c", 0, 200, 100))}, one(0, 120, 0, 200, 100)},
		"after a restart of the plugin it goes on": {
			state{annotated: new(one(5, 950, 0, 200, 100)["a"])},
			[]protocol.Usage{measured(1000, uses("a", "c", 0, 200, 100))}, one(5, 1000, 0, 200, 100)},
		"an old annotation doesn't count": {
			state{annotated: new(one(5, 10, 0, 200, 100)["a"])},
			[]protocol.Usage{measured(1000, uses("a", "c", 0, 200, 100))}, reports{}},
		"within its limit": {nothing, []protocol.Usage{
			full(0, 1600, borrows("a", "c", 0, 200, 100, 200)), full(60, 1600, borrows("a", "c", 0, 200, 100, 200))}, reports{}},
		"above its limit": {nothing, []protocol.Usage{
			full(0, 300, borrows("a", "c", 0, 300, 100, 200)), full(60, 300, borrows("a", "c", 0, 300, 100, 200))}, lent(0, 60, 300, 100, 200, 0)},
		"within its limit, while others use what they request": {state{held: 100, promised: 100}, []protocol.Usage{
			full(0, 1600, borrows("a", "c", 0, 200, 100, 200))}, reports{}},
		"within its limit, while there is room for what others request": {state{held: 100, promised: 150}, []protocol.Usage{
			full(0, 1550, borrows("a", "c", 0, 200, 100, 200))}, reports{}},
		"within its limit, while there is less than that": {state{held: 100, promised: 150}, []protocol.Usage{
			full(0, 1560, borrows("a", "c", 0, 200, 100, 200))}, lent(0, 0, 200, 100, 200, 11)},
		"a sixteenth of the card is enough for the time until the next measurement": {state{held: 100, promised: 1500}, []protocol.Usage{
			full(0, 1500, borrows("a", "c", 0, 200, 100, 200))}, reports{}},
		"less than a sixteenth isn't": {state{held: 100, promised: 1500}, []protocol.Usage{
			full(0, 1501, borrows("a", "c", 0, 200, 100, 200))}, lent(0, 0, 200, 100, 200, 2)},
		"it borrows what the pod's other container doesn't use": {state{held: 200, promised: 1500}, []protocol.Usage{
			full(0, 1600, borrows("a", "c", 0, 200, 100, 200), uses("a", "d", 0, 0, 100))}, reports{}},
		"a card that isn't short any more": {state{held: 100, promised: 1500}, []protocol.Usage{
			full(0, 1600, borrows("a", "c", 0, 200, 100, 200)), full(10, 1400, borrows("a", "c", 0, 200, 100, 200))}, reports{}},
		"a small change of what is borrowed isn't reported": {short, []protocol.Usage{
			full(0, 1600, borrows("a", "c", 0, 200, 100, 200)), full(10, 1590, borrows("a", "c", 0, 195, 100, 200))}, lent(0, 0, 200, 100, 200, 101)},
		"a large change is, with its begin": {short, []protocol.Usage{
			full(0, 1600, borrows("a", "c", 0, 200, 100, 200)), full(10, 1600, borrows("a", "c", 0, 180, 100, 200))}, lent(0, 10, 180, 100, 200, 101)},
		"a small change past its limit is": {short, []protocol.Usage{
			full(0, 1600, borrows("a", "c", 0, 200, 100, 200)), full(10, 1600, borrows("a", "c", 0, 201, 100, 200))}, lent(0, 10, 201, 100, 200, 101)},
		"what terminating pods were promised needs no free memory, also if none of their containers runs": {
			state{held: 100, promised: 1500, ending: 1400}, []protocol.Usage{full(0, 1600, borrows("a", "c", 0, 200, 100, 200))}, reports{}},
		"what a terminating pod uses counts as free": {state{promised: 1500, ending: 100, leaving: true, soon: true}, []protocol.Usage{
			full(0, 1600, borrows("a", "c", 0, 200, 100, 200))}, reports{}},
		"but not if it doesn't end soon": {state{promised: 1500, ending: 100, leaving: true}, []protocol.Usage{
			full(0, 1600, borrows("a", "c", 0, 200, 100, 200))}, lent(0, 0, 200, 100, 200, 101)},
		"what is borrowed is reported again after a minute": {short, []protocol.Usage{
			full(0, 1600, borrows("a", "c", 0, 200, 100, 200)), full(60, 1600, borrows("a", "c", 0, 200, 100, 200))}, lent(0, 60, 200, 100, 200, 101)},
		"above its limit within the grace period, on a card that is low on free memory": {short, []protocol.Usage{
			full(0, 1600, borrows("a", "c", 0, 300, 100, 200))}, lent(0, 0, 300, 100, 200, 101)},
		"the same without a limit, and no pod borrows": {short, []protocol.Usage{full(0, 1600, uses("a", "c", 0, 300, 100))}, reports{}},
		"the same, and another pod borrows": {short, []protocol.Usage{
			full(0, 1600, uses("a", "c", 0, 300, 100), borrows("b", "c", 0, 200, 100, 200))}, reports{
			"a": lent(0, 0, 300, 100, 0, 101)["a"], "b": lent(0, 0, 200, 100, 200, 101)["a"]}},
		"free memory is what the driver says: processes that aren't known use the rest": {short, []protocol.Usage{
			func() protocol.Usage {
				u := full(0, 1600, borrows("a", "c", 0, 200, 100, 200))
				u.Cards[0].Pods = 200 * mib
				return u
			}()}, lent(0, 0, 200, 100, 200, 101)},
		"the driver reports no memory, and processes leave enough": {short, []protocol.Usage{
			measured(0, borrows("a", "c", 0, 200, 100, 200))}, reports{}},
		"the driver reports no memory, and processes leave too little": {short, []protocol.Usage{
			func() protocol.Usage {
				u := measured(0, borrows("a", "c", 0, 200, 100, 200))
				u.Cards[0].Pods, u.Cards[0].Host, u.Cards[0].MPS = 1000*mib, 500*mib, 50*mib
				return u
			}()}, lent(0, 0, 200, 100, 200, 51)},
		"it isn't known of all processes to which pod they belong": {short, []protocol.Usage{
			incomplete(full(0, 1600, borrows("a", "c", 0, 200, 100, 200)))}, reports{}},
		"the same, after a report": {short, []protocol.Usage{
			full(0, 1600, borrows("a", "c", 0, 200, 100, 200)), incomplete(full(60, 1600, borrows("a", "c", 0, 200, 100, 200)))}, lent(0, 0, 200, 100, 200, 101)},
		"the same, until the report doesn't count any more": {short, []protocol.Usage{
			full(0, 1600, borrows("a", "c", 0, 200, 100, 200)), incomplete(full(181, 1600, borrows("a", "c", 0, 200, 100, 200)))}, reports{}},
	} {
		t.Run(name, func(t *testing.T) {
			tracker := NewOveruse(OveruseOptions{Tolerance: 10, Grace: time.Minute})
			var got reports
			for _, step := range test.steps {
				got = tracker.Update(step, test.pod.known())
			}
			check.Equal(t, "the result", test.want, got)
		})
	}
}

// TestRenewed: a report of a pod that borrows is renewed when pods come to its card or leave it, because the extender evicts the next pod only by a
// newer one.
func TestRenewed(t *testing.T) {
	tracker := NewOveruse(OveruseOptions{Tolerance: 10, Grace: time.Minute})
	for i, step := range []struct {
		promised uint64
		want     int
	}{{1500, 0}, {1500, 0}, {1400, 20}, {1400, 20}, {1500, 40}} {
		got := tracker.Update(full(10*i, 1600, borrows("a", "c", 0, 200, 100, 200)), state{held: 100, promised: step.promised}.known())
		if want := time.Unix(int64(step.want), 0); !got["a"].At.Equal(want) {
			t.Errorf("measurement %d: reported at %v, want %v", i, got["a"].At, want)
		}
	}
}

// TestDeletedPod: a pod is forgotten although its card can't be read any more.
func TestDeletedPod(t *testing.T) {
	tracker := NewOveruse(OveruseOptions{Tolerance: 10, Grace: time.Minute})
	for _, second := range []int{0, 60} {
		tracker.Update(measured(second, uses("a", "c", 0, 200, 100)), state{}.known())
	}
	without := state{}.known()
	delete(without.Pods, "a")
	got := tracker.Update(failed(70), without)
	check.Equal(t, "reports and containers above their requests", [2]int{}, [2]int{len(got), len(tracker.since)})
}
