package metrics

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// Ledger collects what a ledger holds, at each scrape.
type Ledger struct {
	ledger *ledger.Ledger
	ready  func() error

	standing, total, used, healthy, holders *prometheus.Desc
}

// NewLedger registers the collector. ready tells whether the ledger stands; until it does, only that is reported.
func NewLedger(registry prometheus.Registerer, l *ledger.Ledger, ready func() error) {
	name := func(s string) string { return prometheus.BuildFQName(namespace, "", s) }
	card := []string{"node", "card"}
	registry.MustRegister(&Ledger{
		ledger: l, ready: ready,
		standing: prometheus.NewDesc(name("ledger_ready"), "1 once the ledger stands.", nil, nil),
		total:    prometheus.NewDesc(name("card_memory_units"), "A card's memory, in its node's unit.", card, nil),
		used:     prometheus.NewDesc(name("card_memory_held_units"), "What of a card's memory is reserved or bound, in its node's unit.", card, nil),
		healthy:  prometheus.NewDesc(name("card_healthy"), "1 for a card on which something may be placed.", card, nil),
		holders:  prometheus.NewDesc(name("holders"), "Pods that hold GPU memory, by state.", []string{"state"}, nil),
	})
}

// Describe implements prometheus.Collector.
func (c *Ledger) Describe(ch chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{c.standing, c.total, c.used, c.healthy, c.holders} {
		ch <- desc
	}
}

// Collect implements prometheus.Collector.
func (c *Ledger) Collect(ch chan<- prometheus.Metric) {
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	}
	standing := c.ready() == nil
	gauge(c.standing, truth(standing))
	if !standing {
		return
	}
	count := map[ledger.State]int{ledger.Reserved: 0, ledger.Bound: 0}
	for _, node := range c.ledger.Nodes() {
		for _, holder := range node.Holders {
			count[holder.State]++
		}
		for i, card := range node.Cards {
			labels := []string{node.Name, strconv.Itoa(card.Index)}
			gauge(c.total, amount(card.Memory), labels...)
			gauge(c.used, amount(node.Used[i]), labels...)
			gauge(c.healthy, truth(card.Healthy()), labels...)
		}
	}
	for state, n := range count {
		gauge(c.holders, float64(n), state.String())
	}
}

func amount(m gpu.Memory) float64 { return float64(m) }

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
