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

// Known is what is known about a node's pods and cards, besides a measurement. Amounts are bytes.
type Known struct {
	Pods  map[gpu.PodUID]KnownPod
	Cards map[int]KnownCard
}

// KnownPod is a pod that requests GPU memory.
type KnownPod struct {
	// Annotated is what its annotation reports; nil if nothing. With it, a restarted plugin continues an over-use that it had reported before.
	Annotated *protocol.Overuse
	// Held is what its containers were given of each card, also those that don't run; empty for a pod that has ended.
	Held map[int]uint64
	// Leaving is true if the pod is terminating, EndsSoon if it is also expected to end soon.
	Leaving, EndsSoon bool
}

// KnownCard is a card's memory, and what is promised of it to pods, also to those that have not started.
type KnownCard struct{ Memory, Promised uint64 }

// Overuse finds the pods that use more memory than they request, from measurement to measurement. Only one goroutine may use it at
// a time.
type Overuse struct {
	options OveruseOptions
	// since is when a container began to exceed its request on a card.
	since map[containerCard]time.Time
	// reports are the last ones, and cards what was known then.
	reports map[gpu.PodUID]protocol.Overuse
	cards   map[int]KnownCard
}

// podCard is a pod's share of a card.
type podCard struct {
	pod  gpu.PodUID
	card int
}

type containerCard struct {
	podCard
	container string
}

// use is how the containers of a pod use a card. Amounts are sums.
type use struct {
	used, requested, allowance uint64
	// began is when the first container began to exceed its limit; zero if none does.
	began time.Time
	// exceeds is true if a container uses more than it requests, and borrows if one with a limit above its request does.
	exceeds, borrows bool
}

// NewOveruse returns an Overuse without a measurement.
func NewOveruse(o OveruseOptions) *Overuse { return &Overuse{options: o} }

// Update adds a measurement and returns the reports by pod. A report keeps its value until it is due for renewal, or until it
// has changed much: each change is written to the API server. For a pod that borrows it has changed when pods come to its card or leave it: the
// extender evicts the next one only by a newer report. A card that could not be read changes nothing. Pods that aren't
// known are forgotten.
func (o *Overuse) Update(report protocol.Usage, known Known) map[gpu.PodUID]protocol.Overuse {
	uses, since := o.uses(report, known)
	short := shortages(report, uses, known)
	reports := o.find(report.Time, uses, known, short)
	o.keepUnread(report, short, since, reports)
	isGone := func(uid gpu.PodUID) bool { _, exists := known.Pods[uid]; return !exists }
	maps.DeleteFunc(since, func(key containerCard, _ time.Time) bool { return isGone(key.pod) })
	maps.DeleteFunc(reports, func(uid gpu.PodUID, _ protocol.Overuse) bool { return isGone(uid) })
	for uid, next := range reports {
		last, moved := o.reports[uid], false
		for card, use := range next.Cards {
			moved = moved || use.ForLowCard() && known.Cards[card].Promised != o.cards[card].Promised
		}
		if !moved && next.At.Sub(last.At) < renewal && maps.EqualFunc(last.Cards, next.Cards, similar) {
			reports[uid] = last
		}
	}
	o.since, o.reports, o.cards = since, reports, known.Cards
	return maps.Clone(reports)
}

// uses returns what the report shows of each pod on each card, and since when containers exceed their limits.
func (o *Overuse) uses(report protocol.Usage, known Known) (uses map[podCard]use, since map[containerCard]time.Time) {
	uses, since = map[podCard]use{}, map[containerCard]time.Time{}
	for _, row := range report.Containers {
		s := podCard{gpu.PodUID(row.UID), row.Card}
		u := uses[s]
		u.used, u.requested, u.allowance = u.used+row.Used, u.requested+row.Requested, u.allowance+row.Allowance()
		if row.Container != "" && o.exceeds(row.Used, row.Requested) { // What a container requests that the API server doesn't show is not known.
			u.exceeds, u.borrows = true, u.borrows || row.Allowed > row.Requested
			if key := (containerCard{s, row.Container}); o.exceeds(row.Used, row.Allowance()) {
				since[key] = o.began(key, report.Time, known.Pods[s.pod].Annotated)
				if u.began.IsZero() || since[key].Before(u.began) {
					u.began = since[key]
				}
			}
		}
		uses[s] = u
	}
	return uses, since
}

// find returns the pods that exceed their limits for longer than the grace period, or that use more than they request of a card that is low on free
// memory and of which a pod borrows some. A pod whose containers together are within their limits takes nothing from its neighbours,
// unless the card is low on free memory.
func (o *Overuse) find(now time.Time, uses map[podCard]use, known Known, short map[int]uint64) map[gpu.PodUID]protocol.Overuse {
	lent := map[int]uint64{}
	for s, use := range uses {
		if use.borrows {
			lent[s.card] = short[s.card]
		}
	}
	reports := map[gpu.PodUID]protocol.Overuse{}
	for s, use := range uses {
		requested := max(use.requested, known.Pods[s.pod].Held[s.card])
		card := protocol.CardOveruse{Used: int64(use.used >> 20), Requested: int64(requested >> 20)}
		if use.allowance > use.requested {
			card.Limit = int64((requested + use.allowance - use.requested) >> 20)
		}
		over := !use.began.IsZero() && now.Sub(use.began) >= o.options.Grace && card.Above()
		low := use.exceeds && lent[s.card] > 0
		if card.Used <= card.Requested || !over && !low {
			continue
		}
		last, pod := o.reports[s.pod], reports[s.pod]
		began := use.began
		if began.IsZero() {
			began = now
		}
		if !over {
			card.Short = int64(lent[s.card]>>20) + 1
			if last.Cards[s.card].ForLowCard() {
				began = last.Since
			}
		}
		if pod.Cards == nil {
			pod = protocol.Overuse{Since: began, At: now, Cards: map[int]protocol.CardOveruse{}}
		}
		if began.Before(pod.Since) {
			pod.Since = began
		}
		pod.Cards[s.card] = card
		pod.Used, pod.Requested = pod.Used+card.Used, pod.Requested+card.Requested
		reports[s.pod] = pod
	}
	return reports
}

// exceeds reports whether the use exceeds the amount by more than the tolerance.
func (o *Overuse) exceeds(used, amount uint64) bool {
	return float64(used) > float64(amount)*(1+o.options.Tolerance/100)
}

// began returns since when the container has exceeded its limit. annotated is what the pod's annotation reports.
func (o *Overuse) began(key containerCard, now time.Time, annotated *protocol.Overuse) time.Time {
	if began, known := o.since[key]; known {
		return began
	}
	use := annotated.On(key.card)
	if annotated.Current(now) && annotated.Since.Before(now) && use.Used > 0 && !use.ForLowCard() {
		return annotated.Since
	}
	return now
}

// keepUnread adds what the last measurement has shown of the cards that this one could not read, for pods that are not to be reported for others. It
// may not even list such a card: the driver didn't answer when it was listed. Of a card of which it isn't known whether it is low on free memory, it
// adds the pods that borrow, as long as their reports count.
func (o *Overuse) keepUnread(report protocol.Usage, short map[int]uint64, since map[containerCard]time.Time, reports map[gpu.PodUID]protocol.Overuse) {
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
		kept := protocol.Overuse{Since: last.Since, At: last.At, Cards: map[int]protocol.CardOveruse{}}
		for card, use := range last.Cards {
			if _, known := short[card]; !read[card] || !known && use.ForLowCard() && last.Current(report.Time) {
				kept.Cards[card] = use
				kept.Used, kept.Requested = kept.Used+use.Used, kept.Requested+use.Requested
			}
		}
		if _, above := reports[uid]; !above && len(kept.Cards) > 0 {
			reports[uid] = kept
		}
	}
}

// similar reports whether a change of a card's use isn't worth a write.
func similar(before, now protocol.CardOveruse) bool {
	return max(before.Used-now.Used, now.Used-before.Used) <= before.Used/20 && before.Requested == now.Requested && before.Limit == now.Limit &&
		before.ForLowCard() == now.ForLowCard() && before.Above() == now.Above()
}
