package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// PendingPods are the pending pods at one moment.
type PendingPods struct {
	At        time.Time
	Diagnoses []diagnosis.Diagnosis
	// RequestProblems is the number of pods with a request problem.
	RequestProblems int
}

// NewPending registers a collector that counts the pending pods by reason at each scrape, and the pods with a request problem.
//
// bound is how long the first item of the queue waits at most if the pods on its cards end in time, the n-th n times as long; 0 if there is no bound.
// ready returns an error until the caches are synced; until then nothing is reported.
func NewPending(registry prometheus.Registerer, ready func() error, bound time.Duration, read func() PendingPods) {
	pending := gaugeDesc("pending_pods", "Number of pods that ask for GPU memory and have no node, by the reason of their diagnosis.", "reason")
	longest := gaugeDesc("longest_wait_seconds", "How long the one of these pods that waits longest has waited, by the same reason; 0 if there is none.", "reason")
	ratio := gaugeDesc("longest_wait_bound_ratio",
		"Largest part of its bound for which a queued pod or group has waited: four times --reservation-max-age for itself and for each one ahead of it.")
	problems := gaugeDesc("request_problems", "Number of pods that get no GPU memory although they seem to ask for some, because of a mistake in their request.")
	registry.MustRegister(&gauges{[]*prometheus.Desc{pending, longest, ratio, problems}, func(set setGauge) {
		if ready() != nil {
			return
		}
		now := read()
		count, waits := map[reasons.Reason]int{}, map[reasons.Reason]time.Duration{}
		ofBound := 0.0
		for _, p := range now.Diagnoses {
			count[p.Reason]++
			if p.Position.Since.IsZero() {
				continue
			}
			waited := now.At.Sub(p.Position.Since)
			waits[p.Reason] = max(waits[p.Reason], waited)
			if p.Position.Queued && bound > 0 {
				ofBound = max(ofBound, waited.Seconds()/(float64(p.Position.Ahead+1)*bound.Seconds()))
			}
		}
		for _, reason := range reasons.OfPods() {
			set(pending, float64(count[reason]), reason.String())
			set(longest, waits[reason].Seconds(), reason.String())
		}
		set(ratio, ofBound)
		set(problems, float64(now.RequestProblems))
	}})
}
