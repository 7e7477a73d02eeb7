package metrics

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"

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

// Cards has the series of each card. They are no part of the registry, which would make and sort all of them at each scrape: Cards
// makes those of a node when the node changes. Its methods are safe for concurrent use.
type Cards struct {
	ledger LedgerState
	// on reports whether there are such series.
	on func() bool

	// mu guards all fields below it.
	mu sync.Mutex
	// revision is that of the ledger for which nodes holds.
	revision uint64
	nodes    map[string]nodeSeries
	// labels are the labels of cards by their index.
	labels map[int]*dto.LabelPair
}

// nodeSeries are the series of a node's cards for each of cardGauges. They are never changed.
type nodeSeries [len(cardGauges)][]*dto.Metric

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
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.on() {
		c.revision, c.nodes, c.labels = 0, nil, nil
		return nil
	}
	c.update()
	names := slices.Sorted(maps.Keys(c.nodes))
	for i, gauge := range cardGauges {
		family := &dto.MetricFamily{Name: new(namespace + "_" + gauge.name), Help: new(gauge.help), Type: dto.MetricType_GAUGE.Enum()}
		for _, name := range names {
			family.Metric = append(family.Metric, c.nodes[name][i]...)
		}
		if len(family.Metric) > 0 {
			families = append(families, family)
		}
	}
	return families
}

// update makes the series of the nodes that have changed. The caller holds the lock.
func (c *Cards) update() {
	changes := c.ledger.ChangesSince(c.revision)
	c.revision = changes.Revision
	if changes.Full {
		c.nodes, c.labels = make(map[string]nodeSeries, len(changes.Nodes)), map[int]*dto.LabelPair{}
	}
	for i := range changes.Nodes {
		c.nodes[changes.Nodes[i].Name] = c.newNodeSeries(&changes.Nodes[i])
	}
}

// newNodeSeries returns the series of the node's cards. Series share what is equal: there can be more than 100,000.
func (c *Cards) newNodeSeries(node *ledger.Node) (series nodeSeries) {
	name := dto.LabelPair{Name: new("node"), Value: new(node.Name)}
	for card := range node.Cards {
		labels := []*dto.LabelPair{c.cardLabel(node.Cards[card].Index), &name}
		for i, gauge := range cardGauges {
			value, has := gauge.value(node, card)
			if !has {
				continue
			}
			metric := &dto.Metric{Label: labels}
			if n := len(series[i]); n > 0 && series[i][n-1].Gauge.GetValue() == value {
				metric.Gauge = series[i][n-1].Gauge
			} else {
				metric.Gauge = &dto.Gauge{Value: &value}
			}
			series[i] = append(series[i], metric)
		}
	}
	return series
}

// cardLabel returns the label of the cards with this index. The caller holds the lock.
func (c *Cards) cardLabel(index int) *dto.LabelPair {
	if c.labels[index] == nil {
		c.labels[index] = &dto.LabelPair{Name: new("card"), Value: new(strconv.Itoa(index))}
	}
	return c.labels[index]
}
