package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpushare/gpushare/pkg/waiting"
)

// Pending counts the pods that wait, at each scrape.
type Pending struct {
	ready func() error
	pods  func() []waiting.Why
	desc  *prometheus.Desc
}

// NewPending registers the collector. pods says of each pod without a node why it waits; nothing is reported until the
// ledger stands.
func NewPending(registry prometheus.Registerer, ready func() error, pods func() []waiting.Why) {
	registry.MustRegister(&Pending{
		ready: ready, pods: pods,
		desc: prometheus.NewDesc(prometheus.BuildFQName(namespace, "", "pending_pods"),
			"Pods that wait for GPU memory, by cause.", []string{"cause"}, nil),
	})
}

// Describe implements prometheus.Collector.
func (c *Pending) Describe(ch chan<- *prometheus.Desc) { ch <- c.desc }

// Collect implements prometheus.Collector.
func (c *Pending) Collect(ch chan<- prometheus.Metric) {
	if c.ready() != nil {
		return
	}
	count := map[waiting.Cause]int{}
	for _, why := range c.pods() {
		count[why.Cause]++
	}
	for _, cause := range waiting.Causes() {
		ch <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, float64(count[cause]), string(cause))
	}
}
