package usage

import (
	"cmp"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// collector makes metrics of the last report.
type collector struct {
	report func() protocol.Usage
	// containers is true if the series of containers are collected too. They name pods.
	containers bool

	time, card, used, requested, allowed, limit, borrowed *prometheus.Desc
}

// NewCollector returns the metrics of a meter's last report. The series of containers, which name tenants' pods, are omitted unless
// containers is true.
func NewCollector(report func() protocol.Usage, containers bool) prometheus.Collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prometheus.BuildFQName("gpushare", "device_plugin", name), help, labels, nil)
	}
	container := []string{"namespace", "pod", "container", "card"}
	return &collector{
		report: report, containers: containers,
		time: desc("usage_timestamp_seconds", "When the memory in use was last measured; 0 if it has not been measured yet."),
		card: desc("card_memory_used_bytes", "Memory of the card in use, by what uses it: pods, host (processes of no pod), "+
			"unresolved (processes that were not found), mps (the MPS server), driver (the rest).", "card", "by"),
		used:      desc("container_memory_used_bytes", "Memory of a card that a container uses.", container...),
		requested: desc("container_memory_requested_bytes", "Memory of a card that a container requests; 0 on a card that it was not given.", container...),
		allowed:   desc("container_memory_allowed_bytes", "Memory of a card that a container may use: its limit, or what it requests.", container...),
		limit:     desc("container_memory_limit_bytes", "Limit that the driver enforces for a container on a card.", container...),
		borrowed:  desc("container_memory_borrowed_bytes", "Memory of a card that a container uses above its request and within its limit.", container...),
	}
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(descs chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{c.time, c.card, c.used, c.requested, c.allowed, c.limit, c.borrowed} {
		descs <- desc
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(metrics chan<- prometheus.Metric) {
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		metrics <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	}
	report := c.report()
	seconds := 0.0
	if !report.Time.IsZero() {
		seconds = float64(report.Time.UnixMilli()) / 1000
	}
	gauge(c.time, seconds)
	for _, card := range report.Cards {
		if card.Problem != "" {
			continue
		}
		name, known := strconv.Itoa(card.Index), card.Pods+card.Host+card.Unresolved+card.MPS
		gauge(c.card, float64(card.Pods), name, "pods")
		gauge(c.card, float64(card.Host), name, "host")
		gauge(c.card, float64(card.Unresolved), name, "unresolved")
		gauge(c.card, float64(card.MPS), name, "mps")
		gauge(c.card, float64(card.Used-min(known, card.Used)), name, "driver")
	}
	if !c.containers {
		return
	}
	for _, row := range report.Containers {
		// A pod that the API server doesn't show is named by its UID.
		labels := []string{row.Namespace, cmp.Or(row.Pod, row.UID), row.Container, strconv.Itoa(row.Card)}
		gauge(c.used, float64(row.Used), labels...)
		gauge(c.requested, float64(row.Requested), labels...)
		gauge(c.allowed, float64(row.Allowance()), labels...)
		if row.Limit != nil {
			gauge(c.limit, float64(*row.Limit), labels...)
		}
		gauge(c.borrowed, float64(row.Borrowed()), labels...)
	}
}
