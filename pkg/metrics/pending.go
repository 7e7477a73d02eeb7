package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpushare/gpushare/pkg/reasons"
)

// Pending is why a pod is pending, and for how long it has been.
type Pending struct {
	Reason reasons.Reason
	Waits  time.Duration
}

// NewPending registers a collector that counts the pending pods by reason at each scrape, and the pods with a request problem.
// read returns each pending pod, and the number of the latter. ready returns an error until the caches are
// synced; until then nothing is reported.
func NewPending(registry prometheus.Registerer, ready func() error, read func() (pending []Pending, requestProblems int)) {
	pending := gaugeDesc("pending_pods", "Number of pods that ask for GPU memory and have no node, by the reason of their diagnosis.", "reason")
	longest := gaugeDesc("longest_wait_seconds", "How long the oldest of these pods has existed, by the same reason; 0 if there is none.", "reason")
	problems := gaugeDesc("request_problems", "Number of pods that get no GPU memory although they seem to ask for some, because of a mistake in their request.")
	registry.MustRegister(&gauges{[]*prometheus.Desc{pending, longest, problems}, func(set setGauge) {
		if ready() != nil {
			return
		}
		pods, requestProblems := read()
		count, waits := map[reasons.Reason]int{}, map[reasons.Reason]time.Duration{}
		for _, p := range pods {
			count[p.Reason]++
			waits[p.Reason] = max(waits[p.Reason], p.Waits)
		}
		for _, reason := range reasons.OfPods() {
			set(pending, float64(count[reason]), reason.String())
			set(longest, waits[reason].Seconds(), reason.String())
		}
		set(problems, float64(requestProblems))
	}})
}
