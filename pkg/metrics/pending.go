package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpushare/gpushare/pkg/diagnosis"
)

// Pending counts the pending pods by reason at each scrape.
type Pending struct {
	ready func() error
	pods  func() []diagnosis.Diagnosis
	desc  *prometheus.Desc
}

// NewPending registers the collector. pods returns the diagnosis of each pending pod. ready returns an error until the
// caches are synced; until then nothing is reported.
func NewPending(registry prometheus.Registerer, ready func() error, pods func() []diagnosis.Diagnosis) {
	registry.MustRegister(&Pending{
		ready: ready, pods: pods,
		desc: prometheus.NewDesc(prometheus.BuildFQName(namespace, "", "pending_pods"),
			"Number of pods that ask for GPU memory and have no node, by the reason of their diagnosis.", []string{"reason"}, nil),
	})
}

// Describe implements prometheus.Collector.
func (c *Pending) Describe(ch chan<- *prometheus.Desc) { ch <- c.desc }

// Collect implements prometheus.Collector.
func (c *Pending) Collect(ch chan<- prometheus.Metric) {
	if c.ready() != nil {
		return
	}
	count := map[diagnosis.Reason]int{}
	for _, d := range c.pods() {
		count[d.Reason]++
	}
	for _, reason := range diagnosis.Reasons() {
		ch <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, float64(count[reason]), string(reason))
	}
}
