package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpushare/gpushare/pkg/diagnosis"
)

// NewPending registers a collector that counts the pending pods by reason at each scrape. pods returns the diagnosis of each
// pending pod. ready returns an error until the caches are synced; until then nothing is reported.
func NewPending(registry prometheus.Registerer, ready func() error, pods func() []diagnosis.Diagnosis) {
	pending := gaugeDesc("pending_pods", "Number of pods that ask for GPU memory and have no node, by the reason of their diagnosis.", "reason")
	registry.MustRegister(&gauges{[]*prometheus.Desc{pending}, func(set setGauge) {
		if ready() != nil {
			return
		}
		count := map[diagnosis.Reason]int{}
		for _, d := range pods() {
			count[d.Reason]++
		}
		for _, reason := range diagnosis.Reasons() {
			set(pending, float64(count[reason]), string(reason))
		}
	}})
}
