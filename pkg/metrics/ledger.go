package metrics

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// Ledger collects the state of a ledger at each scrape.
type Ledger struct {
	ledger interface{ Nodes() []ledger.Node }
	ready  func() error
	// eachCard adds series for each card.
	eachCard bool

	synced, allocations, cards, over   *prometheus.Desc
	total, allocated, assumed, healthy *prometheus.Desc
}

// NewLedger registers the collector. ready returns an error until the caches are synced; until then only cache_synced is
// reported. eachCard adds four series for each card to the cluster's sums.
func NewLedger(registry prometheus.Registerer, l interface{ Nodes() []ledger.Node }, ready func() error, eachCard bool) {
	describe := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prometheus.BuildFQName(namespace, "", name), help, labels, nil)
	}
	registry.MustRegister(&Ledger{
		ledger: l, ready: ready, eachCard: eachCard,
		synced:      describe("cache_synced", "1 once the caches are synced and the extender can answer kube-scheduler, 0 before."),
		allocations: describe("allocations", "Number of allocations of GPU memory, one for each pod that holds some, by state.", "state"),
		cards:       describe("cards", "Number of cards of all nodes, by health.", "health"),
		over:        describe("overfull_cards", "Number of cards with more allocated memory than they have. It must be 0."),
		total:       describe("card_memory_units", "Total memory of a card, in the unit of its node.", "node", "card"),
		allocated:   describe("card_memory_allocated_units", "Allocated memory of a card, in the unit of its node.", "node", "card"),
		assumed:     describe("card_memory_assumed_units", "Allocated memory of a card that is assumed because the API server has not confirmed the bind yet, in the unit of its node.", "node", "card"),
		healthy:     describe("card_healthy", "1 for a healthy card, 0 for an unhealthy one, which gets no new pods.", "node", "card"),
	})
}

// Describe implements prometheus.Collector.
func (c *Ledger) Describe(ch chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{c.synced, c.allocations, c.cards, c.over, c.total, c.allocated, c.assumed, c.healthy} {
		ch <- desc
	}
}

// Collect implements prometheus.Collector.
func (c *Ledger) Collect(ch chan<- prometheus.Metric) {
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	}
	synced := c.ready() == nil
	gauge(c.synced, toFloat(synced))
	if !synced {
		return
	}
	allocations := map[ledger.State]int{ledger.Assumed: 0, ledger.Bound: 0}
	cards := map[bool]int{true: 0, false: 0}
	over := 0
	for _, node := range c.ledger.Nodes() {
		assumed := map[int]gpu.Memory{}
		for _, allocation := range node.Allocations {
			allocations[allocation.State]++
			if allocation.State == ledger.Assumed {
				for _, share := range allocation.Placement {
					assumed[share.Card] += share.Memory
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
			gauge(c.allocated, amount(node.Used[i]), labels...)
			gauge(c.assumed, amount(assumed[card.Index]), labels...)
			gauge(c.healthy, toFloat(card.Healthy()), labels...)
		}
	}
	for state, n := range allocations {
		gauge(c.allocations, float64(n), state.String())
	}
	gauge(c.cards, float64(cards[true]), "healthy")
	gauge(c.cards, float64(cards[false]), "unhealthy")
	gauge(c.over, float64(over))
}

func amount(m gpu.Memory) float64 { return float64(m) }

func toFloat(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
