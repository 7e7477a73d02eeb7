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
}

// Overuse finds the pods that use more memory than they request, from measurement to measurement. Only one goroutine may use it at
// a time.
type Overuse struct {
	options OveruseOptions
	// since is when a container began to exceed its request on a card.
	since map[excess]time.Time
	// reports are the last ones.
	reports map[gpu.PodUID]protocol.Overuse
}

type excess struct {
	pod       gpu.PodUID
	container string
	card      int
}

// NewOveruse returns an Overuse without a measurement.
func NewOveruse(o OveruseOptions) *Overuse { return &Overuse{options: o} }

// Update adds a measurement and returns the reports by pod. A report keeps its value until it is due for renewal, or until it
// has changed much: each change is written to the API server. A card that could not be read changes nothing.
func (o *Overuse) Update(report protocol.Usage, pods OverusePods) map[gpu.PodUID]protocol.Overuse {
	since, reports := o.find(report, pods)
	o.keepUnread(report.Cards, since, reports)
	for uid, next := range reports {
		last, known := o.reports[uid]
		if known && next.At.Sub(last.At) < renewal && maps.EqualFunc(last.Cards, next.Cards, similar) {
			reports[uid] = last
		}
	}
	o.since, o.reports = since, reports
	return maps.Clone(reports)
}

// find returns since when containers exceed their requests, and the pods for which that is longer than the grace period.
func (o *Overuse) find(report protocol.Usage, pods OverusePods) (since map[excess]time.Time, reports map[gpu.PodUID]protocol.Overuse) {
	now := report.Time
	since, reports = map[excess]time.Time{}, map[gpu.PodUID]protocol.Overuse{}
	for _, row := range report.Containers {
		key := excess{gpu.PodUID(row.UID), row.Container, row.Card}
		if row.Container == "" || float64(row.Used) <= float64(row.Requested)*(1+o.options.Tolerance/100) {
			continue // What a container requests that the API server doesn't show is not known.
		}
		began, known := o.since[key]
		if !known {
			began = now
			if before := pods.Annotated(key.pod); before.Current(now) && before.Since.Before(now) && before.Cards[key.card].Used > 0 {
				began = before.Since
			}
		}
		since[key] = began
		if now.Sub(began) >= o.options.Grace {
			if pod := o.add(reports[key.pod], report, key, began, pods.Held(key.pod, key.card)); len(pod.Cards) > 0 {
				reports[key.pod] = pod
			}
		}
	}
	return since, reports
}

// keepUnread adds what the last measurement has shown of the cards that this one could not read. It may not even list such a card: the
// driver didn't answer when it was listed.
func (o *Overuse) keepUnread(cards []protocol.CardUsage, since map[excess]time.Time, reports map[gpu.PodUID]protocol.Overuse) {
	read := map[int]bool{}
	for _, card := range cards {
		read[card.Index] = card.Problem == ""
	}
	for key, began := range o.since {
		if _, above := since[key]; !above && !read[key.card] {
			since[key] = began
		}
	}
	for uid, last := range o.reports {
		for card := range last.Cards {
			if _, above := reports[uid]; !above && !read[card] {
				reports[uid] = last
			}
		}
	}
}

// similar reports whether a change of a card's use isn't worth a write.
func similar(before, now protocol.CardOveruse) bool {
	return max(before.Used-now.Used, now.Used-before.Used) <= before.Used/20 && before.Requested == now.Requested
}

// add adds a card to a pod's report, with the use of all of the pod's containers there. A pod whose containers together are within
// their requests takes nothing from its neighbours. held is what they were given of the card, also those that don't run now.
func (o *Overuse) add(pod protocol.Overuse, report protocol.Usage, over excess, began time.Time, held uint64) protocol.Overuse {
	if _, counted := pod.Cards[over.card]; counted {
		if began.Before(pod.Since) {
			pod.Since = began
		}
		return pod
	}
	var used, requested uint64
	for _, row := range report.Containers {
		if row.UID == string(over.pod) && row.Card == over.card {
			used, requested = used+row.Used, requested+row.Requested
		}
	}
	card := protocol.CardOveruse{Used: int64(used >> 20), Requested: int64(max(requested, held) >> 20)}
	if card.Used <= card.Requested {
		return pod
	}
	if pod.Cards == nil {
		pod = protocol.Overuse{Since: began, Cards: map[int]protocol.CardOveruse{}}
	}
	if began.Before(pod.Since) {
		pod.Since = began
	}
	pod.At = report.Time
	pod.Cards[over.card] = card
	pod.Used, pod.Requested = pod.Used+card.Used, pod.Requested+card.Requested
	return pod
}
