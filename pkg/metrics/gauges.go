package metrics

import "github.com/prometheus/client_golang/prometheus"

// gauges is a Collector of gauges whose values are read at each scrape.
type gauges struct {
	descs []*prometheus.Desc
	read  func(set setGauge)
}

// setGauge reports the value of one series. labels are the values of the desc's labels, in its order.
type setGauge func(desc *prometheus.Desc, value float64, labels ...string)

func gaugeDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName(namespace, "", name), help, labels, nil)
}

func (g *gauges) Describe(ch chan<- *prometheus.Desc) {
	for _, desc := range g.descs {
		ch <- desc
	}
}

func (g *gauges) Collect(ch chan<- prometheus.Metric) {
	g.read(func(desc *prometheus.Desc, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	})
}
