package metrics

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// cardGauges are the gauges that have a series for each card. value returns false if the card has no such series. They are ordered by
// name.
var cardGauges = [...]struct {
	name, help string
	value      func(node *ledger.Node, card int) (float64, bool)
}{
	{"card_cores_allocated", "Computing of a card that pods ask for, in percent of the card; only of nodes that " +
		"count it.", func(node *ledger.Node, card int) (float64, bool) {
		return float64(node.UsedCores[card]), node.Cores == reasons.Fits
	}},
	{"card_healthy", "1 for a healthy card, 0 for an unhealthy one, which gets no new pods.", func(node *ledger.Node, card int) (float64, bool) {
		return toFloat(node.Cards[card].Healthy()), true
	}},
	{"card_memory_allocated_units", "Allocated memory of a card, in the unit of its node.", func(node *ledger.Node, card int) (float64, bool) {
		return float64(node.Used[card]), true
	}},
	{"card_memory_units", "Total memory of a card, in the unit of its node.", func(node *ledger.Node, card int) (float64, bool) {
		return float64(node.Cards[card].Memory), true
	}},
	{"card_rdma_ports", "Active ports of the RDMA adapters near a card; only of cards that have one.", func(node *ledger.Node, card int) (float64, bool) {
		ports := node.Cards[card].RDMAPorts
		return float64(strings.Count(ports, ",") + 1), ports != ""
	}},
}

// Cards has the series of each card. They are no part of the registry, which would check and sort each of them at each scrape: there can be more than
// 100,000.
type Cards struct {
	ledger LedgerState
	// on reports whether there are such series.
	on func() bool
}

// Beside returns a Gatherer of what the registry has and of the series of each card.
func (c *Cards) Beside(registry prometheus.Gatherer) prometheus.Gatherer {
	return prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
		families, err := registry.Gather()
		families = append(families, c.families()...)
		slices.SortFunc(families, func(a, b *dto.MetricFamily) int { return cmp.Compare(a.GetName(), b.GetName()) })
		return families, err
	})
}

func (c *Cards) families() (families []*dto.MetricFamily) {
	if !c.on() {
		return nil
	}
	for _, gauge := range cardGauges {
		families = append(families, &dto.MetricFamily{Name: new(namespace + "_" + gauge.name), Help: new(gauge.help), Type: dto.MetricType_GAUGE.Enum()})
	}
	for _, node := range c.ledger.Nodes() {
		name := dto.LabelPair{Name: new("node"), Value: new(node.Name)}
		for card := range node.Cards {
			labels := []*dto.LabelPair{{Name: new("card"), Value: new(strconv.Itoa(node.Cards[card].Index))}, &name}
			for i, gauge := range cardGauges {
				if value, has := gauge.value(&node, card); has {
					families[i].Metric = append(families[i].Metric, &dto.Metric{Label: labels, Gauge: &dto.Gauge{Value: &value}})
				}
			}
		}
	}
	return slices.DeleteFunc(families, func(f *dto.MetricFamily) bool { return len(f.Metric) == 0 })
}
