package metrics

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
)

// ledgerGauges are the descriptions of a ledger's gauges.
type ledgerGauges struct {
	synced, allocations, cards, overfull *prometheus.Desc
	// These have a series for each card.
	total, allocated, healthy *prometheus.Desc
	// cores has a series for each card of a node that counts cores.
	cores *prometheus.Desc
}

// NewLedger registers a collector that reads the ledger at each scrape. ready returns an error until the caches are synced;
// until then only cache_synced is reported. If eachCard returns true, there are series for each card beside the cluster's sums: three,
// and one more on nodes that count cores.
func NewLedger(registry prometheus.Registerer, l interface{ Nodes() []ledger.Node }, ready func() error, eachCard func() bool) {
	g := ledgerGauges{
		synced:      gaugeDesc("cache_synced", "1 once the caches are synced and the extender can answer kube-scheduler, 0 before."),
		allocations: gaugeDesc("allocations", "Number of allocations of GPU memory, one for each pod that holds some, by state.", "state"),
		cards:       gaugeDesc("cards", "Number of cards of all nodes, by health.", "health"),
		overfull:    gaugeDesc("overfull_cards", "Number of cards with more memory, cores or containers allocated than they can have. It must be 0."),
		total:       gaugeDesc("card_memory_units", "Total memory of a card, in the unit of its node.", "node", "card"),
		allocated:   gaugeDesc("card_memory_allocated_units", "Allocated memory of a card, in the unit of its node.", "node", "card"),
		healthy:     gaugeDesc("card_healthy", "1 for a healthy card, 0 for an unhealthy one, which gets no new pods.", "node", "card"),
		cores:       gaugeDesc("card_cores_allocated", "Computing of a card that pods ask for, in percent of the card; only of nodes that count it.", "node", "card"),
	}
	descs := []*prometheus.Desc{g.synced, g.allocations, g.cards, g.overfull, g.total, g.allocated, g.healthy, g.cores}
	registry.MustRegister(&gauges{descs, func(set setGauge) {
		synced := ready() == nil
		set(g.synced, toFloat(synced))
		if synced {
			g.read(l.Nodes(), eachCard(), set)
		}
	}})
}

func (g *ledgerGauges) read(nodes []ledger.Node, eachCard bool, set setGauge) {
	allocations := map[ledger.State]int{ledger.Assumed: 0, ledger.Bound: 0}
	cards := map[bool]int{true: 0, false: 0}
	overfull := 0
	for _, node := range nodes {
		for _, allocation := range node.Allocations {
			allocations[allocation.State]++
		}
		for i, card := range node.Cards {
			cards[card.Healthy()]++
			if node.Used[i] > card.Memory || node.UsedCores[i] > gpu.CardCores || card.MaxContainers > 0 && int(node.Containers[i]) > card.MaxContainers {
				overfull++
			}
			if !eachCard {
				continue
			}
			labels := []string{node.Name, strconv.Itoa(card.Index)}
			set(g.total, float64(card.Memory), labels...)
			set(g.allocated, float64(node.Used[i]), labels...)
			set(g.healthy, toFloat(card.Healthy()), labels...)
			if node.Cores == placement.Fits {
				set(g.cores, float64(node.UsedCores[i]), labels...)
			}
		}
	}
	for state, n := range allocations {
		set(g.allocations, float64(n), state.String())
	}
	set(g.cards, float64(cards[true]), "healthy")
	set(g.cards, float64(cards[false]), "unhealthy")
	set(g.overfull, float64(overfull))
}

func toFloat(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
