package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// LedgerState provides the state of the ledger; *scheduling.Scheduler implements it.
type LedgerState interface {
	// Nodes returns the nodes by name.
	Nodes() []ledger.Node
	// AwaitedIdle returns the parts of the memory that awaited reservations keep idle.
	AwaitedIdle() map[string]float64
	// Stranded returns the memory that is free, but that no expected kind of pod can use.
	Stranded() ledger.Stranded
}

// ledgerGauges are the descriptions of a ledger's gauges, without those of each card.
type ledgerGauges struct{ synced, allocations, cards, simulated, overfull, problems, idle, stranded *prometheus.Desc }

// NewLedger registers a collector of the cluster's sums, which reads the ledger at each scrape. ready returns an error until the caches
// are synced; until then only cache_synced is reported. It returns the series of each card; there are some if eachCard returns true.
func NewLedger(registry prometheus.Registerer, l LedgerState, ready func() error, eachCard func() bool) *Cards {
	g := ledgerGauges{
		synced:      gaugeDesc("cache_synced", "1 once the caches are synced and the extender can answer kube-scheduler, 0 before."),
		allocations: gaugeDesc("allocations", "Number of allocations of GPU memory, one for each pod that holds some, by state.", "state"),
		cards:       gaugeDesc("cards", "Number of cards of all nodes, by health.", "health"),
		simulated:   gaugeDesc("simulated_cards", "Number of cards that don't exist, of nodes for a trial."),
		overfull:    gaugeDesc("overfull_cards", "Number of cards with more memory, cores or containers allocated than they can have. It must be 0."),
		problems:    gaugeDesc("node_problems", "Number of nodes with a problem, as kubectl inspect gpushare lists them, by problem.", "problem"),
		idle: gaugeDesc("awaited_idle_ratio",
			"Part of the memory of all cards that is free and kept for items that wait until their cards in use are free, from 0 to 1."),
		stranded: gaugeDesc("stranded_ratio",
			"Part of the memory of all cards that is free, but that no expected kind of pod can use, because its node has too little of this free; "+
				"only with --node-policy=least-waste.",
			"lacks"),
	}
	descs := []*prometheus.Desc{g.synced, g.allocations, g.cards, g.simulated, g.overfull, g.problems, g.idle, g.stranded}
	for _, gauge := range cardGauges { // Their names are taken, although the registry collects no series of them.
		descs = append(descs, gaugeDesc(gauge.name, gauge.help, "node", "card"))
	}
	registry.MustRegister(&gauges{descs, func(set setGauge) {
		synced := ready() == nil
		set(g.synced, toFloat(synced))
		if synced {
			g.read(l.Nodes(), set)
			idle := 0.0
			for _, part := range l.AwaitedIdle() {
				idle += part
			}
			set(g.idle, idle)
			for lacks, ratio := range l.Stranded().Ratios {
				set(g.stranded, ratio, lacks.String())
			}
		}
	}})
	return &Cards{ledger: l, on: func() bool { return ready() == nil && eachCard() }}
}

func (g *ledgerGauges) read(nodes []ledger.Node, set setGauge) {
	allocations := map[ledger.State]int{ledger.Assumed: 0, ledger.Bound: 0}
	cards := map[bool]int{true: 0, false: 0}
	overfull, simulated := 0, 0
	problems := make([]int, len(reasons.NodeProblemKinds()))
	for _, node := range nodes {
		kinds := map[reasons.NodeProblemKind]bool{}
		for _, problem := range diagnosis.NodeProblems(&node) {
			kinds[problem.Kind] = true
		}
		for kind := range kinds {
			problems[kind]++
		}
		for _, allocation := range node.Allocations {
			allocations[allocation.State]++
		}
		if node.Simulated {
			simulated += len(node.Cards)
		}
		for i, card := range node.Cards {
			cards[card.Healthy()]++
			if node.Used[i] > card.Memory || node.UsedCores[i] > gpu.CardCores || card.MaxContainers > 0 && int(node.Containers[i]) > card.MaxContainers {
				overfull++
			}
		}
	}
	for state, n := range allocations {
		set(g.allocations, float64(n), state.String())
	}
	set(g.cards, float64(cards[true]), "healthy")
	set(g.cards, float64(cards[false]), "unhealthy")
	set(g.simulated, float64(simulated))
	set(g.overfull, float64(overfull))
	for kind, n := range problems {
		set(g.problems, float64(n), reasons.NodeProblemKind(kind).String())
	}
}

func toFloat(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
