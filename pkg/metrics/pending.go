package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// NewPending registers a collector that counts the pending pods by reason at each scrape, and the pods with a request problem.
// read returns the diagnosis of each pending pod, and the number of the latter. ready returns an error until the caches are
// synced; until then nothing is reported.
func NewPending(registry prometheus.Registerer, ready func() error, read func() (pending []diagnosis.Diagnosis, requestProblems int)) {
	pending := gaugeDesc("pending_pods", "Number of pods that ask for GPU memory and have no node, by the reason of their diagnosis.", "reason")
	problems := gaugeDesc("request_problems", "Number of pods that get no GPU memory although they seem to ask for some, because of a mistake in their request.")
	registry.MustRegister(&gauges{[]*prometheus.Desc{pending, problems}, func(set setGauge) {
		if ready() != nil {
			return
		}
		diagnoses, requestProblems := read()
		count := map[reasons.Reason]int{}
		for _, d := range diagnoses {
			count[d.Reason]++
		}
		for _, reason := range reasons.OfPods() {
			set(pending, float64(count[reason]), reason.String())
		}
		set(problems, float64(requestProblems))
	}})
}
