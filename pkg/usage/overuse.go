package usage

import (
	"maps"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// The defaults of OveruseOptions.
const (
	DefaultTolerance = 10
	DefaultGrace     = time.Minute
)

// renewal is how often a report of over-use is renewed. It is well below protocol.OveruseLife.
const renewal = time.Minute

// OveruseOptions say what counts as over-use.
type OveruseOptions struct {
	// Tolerance is by how many percent of its request a container may exceed it.
	Tolerance float64
	// Grace is how long it may exceed that.
	Grace time.Duration
}

// OverusePods is what is known about pods, besides the measurement.
type OverusePods interface {
	// Annotated returns what the pod's annotation reports; nil if nothing. With it, a restarted plugin continues an over-use that it had
	// reported before.
	Annotated(uid gpu.PodUID) *protocol.Overuse
	// Held returns what the containers of the pod were given of a card, in bytes. A measurement has only containers that run.
	Held(uid gpu.PodUID, card int) uint64
	// Leaving reports whether the pod is terminating, and whether it is expected to end soon.
	Leaving(uid gpu.PodUID, now time.Time) (leaving, soon bool)
	// Promised returns a card's memory, and what is promised of it to pods, also to those that have not started; in bytes.
	Promised(card int) (memory, promised uint64)
	// Ending returns what of that is promised to terminating pods, also to those of which no container runs; in bytes.
	Ending(card int) uint64
}

// Overuse finds the pods that use more memory than they request, from measurement to measurement. Only one goroutine may use it at
// a time.
type Overuse struct {
	options OveruseOptions
	// since is when a container began to exceed its request on a card.
	since map[excess]time.Time
	// reports are the last ones, and promised is what was promised of each card then.
	reports  map[gpu.PodUID]protocol.Overuse
	promised map[int]uint64
}

type excess struct {
	pod       gpu.PodUID
	container string
	card      int
}

// NewOveruse returns an Overuse without a measurement.
func NewOveruse(o OveruseOptions) *Overuse { return &Overuse{options: o} }

// Update adds a measurement and returns the reports by pod. A report keeps its value until it is due for renewal, or until it
// has changed much: each change is written to the API server. For a pod that borrows it has changed when pods come to its card or leave it: the
// extender evicts the next one only by a newer report. A card that could not be read changes nothing.
func (o *Overuse) Update(report protocol.Usage, pods OverusePods) map[gpu.PodUID]protocol.Overuse {
	short := shortages(report, pods)
	since, reports := o.find(report, pods, short)
	o.keepUnread(report, short, since, reports)
	promised := map[int]uint64{}
	for _, card := range report.Cards {
		_, promised[card.Index] = pods.Promised(card.Index)
	}
	for uid, next := range reports {
		last, known := o.reports[uid]
		moved := false
		for card, use := range next.Cards {
			moved = moved || use.ForLowCard() && promised[card] != o.promised[card]
		}
		if known && !moved && next.At.Sub(last.At) < renewal && maps.EqualFunc(last.Cards, next.Cards, similar) {
			reports[uid] = last
		}
	}
	o.since, o.reports, o.promised = since, reports, promised
	return maps.Clone(reports)
}

// find returns since when containers exceed their limits, and the pods for which that is longer than the grace period, or that use more than they
// request of a card that is low on free memory and of which a pod borrows some.
func (o *Overuse) find(report protocol.Usage, pods OverusePods, short map[int]uint64) (since map[excess]time.Time, reports map[gpu.PodUID]protocol.Overuse) {
	now := report.Time
	since, reports = map[excess]time.Time{}, map[gpu.PodUID]protocol.Overuse{}
	lent := map[int]uint64{}
	for _, row := range report.Containers {
		if row.Allowed > row.Requested && o.exceeds(row.Used, row.Requested) {
			lent[row.Card] = short[row.Card]
		}
	}
	for _, row := range report.Containers {
		if row.Container == "" { // What a container requests that the API server doesn't show is not known.
			continue
		}
		key, began, over := excess{gpu.PodUID(row.UID), row.Container, row.Card}, now, false
		if o.exceeds(row.Used, row.Allowance()) {
			began = o.began(key, now, pods)
			since[key], over = began, now.Sub(began) >= o.options.Grace
		}
		if !over && (lent[row.Card] == 0 || !o.exceeds(row.Used, row.Requested)) {
			continue
		}
		if last := o.reports[key.pod]; !over && last.Cards[row.Card].ForLowCard() {
			began = last.Since
		}
		if pod := o.add(reports[key.pod], report, key, began, pods.Held(key.pod, key.card), over, lent[row.Card]); len(pod.Cards) > 0 {
			reports[key.pod] = pod
		}
	}
	return since, reports
}

// exceeds reports whether the use exceeds the amount by more than the tolerance.
func (o *Overuse) exceeds(used, amount uint64) bool {
	return float64(used) > float64(amount)*(1+o.options.Tolerance/100)
}

// began returns since when the container has exceeded its limit.
func (o *Overuse) began(key excess, now time.Time, pods OverusePods) time.Time {
	if began, known := o.since[key]; known {
		return began
	}
	before := pods.Annotated(key.pod)
	if use := before.On(key.card); before.Current(now) && before.Since.Before(now) && use.Used > 0 && !use.ForLowCard() {
		return before.Since
	}
	return now
}

// keepUnread adds what the last measurement has shown of the cards that this one could not read. It may not even list such a card: the
// driver didn't answer when it was listed. Of a card of which it isn't known whether it is low on free memory, it adds the pods that borrow, as long
// as their reports count.
func (o *Overuse) keepUnread(report protocol.Usage, short map[int]uint64, since map[excess]time.Time, reports map[gpu.PodUID]protocol.Overuse) {
	read := map[int]bool{}
	for _, card := range report.Cards {
		read[card.Index] = card.Problem == ""
	}
	for key, began := range o.since {
		if _, above := since[key]; !above && !read[key.card] {
			since[key] = began
		}
	}
	for uid, last := range o.reports {
		for card, use := range last.Cards {
			_, known := short[card]
			if _, above := reports[uid]; !above && (!read[card] || !known && use.ForLowCard() && last.Current(report.Time)) {
				reports[uid] = last
			}
		}
	}
}

// similar reports whether a change of a card's use isn't worth a write.
func similar(before, now protocol.CardOveruse) bool {
	return max(before.Used-now.Used, now.Used-before.Used) <= before.Used/20 && before.Requested == now.Requested && before.Limit == now.Limit &&
		before.ForLowCard() == now.ForLowCard() && before.Above() == now.Above()
}

// add adds a card to a pod's report, with the use of all of the pod's containers there. A pod whose containers together are within their limits
// takes nothing from its neighbours, unless the card is low on free memory. held is what they were given of the card, also those that don't run now.
// over is true if one of the containers has exceeded its limit for longer than the grace period.
func (o *Overuse) add(pod protocol.Overuse, report protocol.Usage, key excess, began time.Time, held uint64, over bool, short uint64) protocol.Overuse {
	var used, requested, lendable uint64
	for _, row := range report.Containers {
		if row.UID == string(key.pod) && row.Card == key.card {
			used, requested, lendable = used+row.Used, requested+row.Requested, lendable+row.Allowance()-row.Requested
		}
	}
	requested = max(requested, held)
	card := protocol.CardOveruse{Used: int64(used >> 20), Requested: int64(requested >> 20)}
	if lendable > 0 {
		card.Limit = int64((requested + lendable) >> 20)
	}
	within := !over || !card.Above()
	counted, again := pod.Cards[key.card]
	switch {
	case card.Used <= card.Requested, within && short == 0, again && within && !counted.ForLowCard():
		return pod
	case within:
		card.Short = int64(short>>20) + 1
	}
	if pod.Cards == nil {
		pod = protocol.Overuse{Since: began, Cards: map[int]protocol.CardOveruse{}}
	}
	if began.Before(pod.Since) {
		pod.Since = began
	}
	pod.At = report.Time
	pod.Cards[key.card] = card
	if !again {
		pod.Used, pod.Requested = pod.Used+card.Used, pod.Requested+card.Requested
	}
	return pod
}
