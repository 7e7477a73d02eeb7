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
	// eachCard says whether cards are reported one by one.
	eachCard bool

	standing, holders, cards, over *prometheus.Desc
	total, held, reserved, healthy *prometheus.Desc
}

// NewLedger registers the collector. ready tells whether the ledger stands; until it does, only that is reported.
// eachCard adds four series a card; without it, only the cluster's sums are reported.
func NewLedger(registry prometheus.Registerer, l *ledger.Ledger, ready func() error, eachCard bool) {
	describe := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prometheus.BuildFQName(namespace, "", name), help, labels, nil)
	}
	registry.MustRegister(&Ledger{
		ledger: l, ready: ready, eachCard: eachCard,
		standing: describe("ledger_ready", "1 once the ledger stands."),
		holders:  describe("holders", "Pods that hold GPU memory, by state.", "state"),
		cards:    describe("cards", "Cards of all nodes, by health.", "health"),
		over:     describe("overfull_cards", "Cards of which more is held than they have. This must be 0."),
		total:    describe("card_memory_units", "A card's memory, in its node's unit.", "node", "card"),
		held:     describe("card_memory_held_units", "What of a card's memory is reserved or bound, in its node's unit.", "node", "card"),
		reserved: describe("card_memory_reserved_units", "What of a card's memory is held for pods that aren't bound yet, in its node's unit.", "node", "card"),
		healthy:  describe("card_healthy", "1 for a card on which something may be placed.", "node", "card"),
	})
}

// Describe implements prometheus.Collector.
func (c *Ledger) Describe(ch chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{c.standing, c.holders, c.cards, c.over, c.total, c.held, c.reserved, c.healthy} {
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
	holders := map[ledger.State]int{ledger.Reserved: 0, ledger.Bound: 0}
	cards := map[bool]int{true: 0, false: 0}
	over := 0
	for _, node := range c.ledger.Nodes() {
		reserved := map[int]gpu.Memory{}
		for _, holder := range node.Holders {
			holders[holder.State]++
			if holder.State == ledger.Reserved {
				for _, share := range holder.Placement {
					reserved[share.Card] += share.Memory
				}
			}
		}
		for i, card := range node.Cards {
			cards[card.Healthy()]++
			if node.Used[i] > card.Memory {
				over++
			}
			if !c.eachCard {
				continue
			}
			labels := []string{node.Name, strconv.Itoa(card.Index)}
			gauge(c.total, amount(card.Memory), labels...)
			gauge(c.held, amount(node.Used[i]), labels...)
			gauge(c.reserved, amount(reserved[card.Index]), labels...)
			gauge(c.healthy, truth(card.Healthy()), labels...)
		}
	}
	for state, n := range holders {
		gauge(c.holders, float64(n), state.String())
	}
	gauge(c.cards, float64(cards[true]), "healthy")
	gauge(c.cards, float64(cards[false]), "unhealthy")
	gauge(c.over, float64(over))
}

func amount(m gpu.Memory) float64 { return float64(m) }

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
