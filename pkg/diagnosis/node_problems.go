package diagnosis

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// NodeProblems returns what is wrong with a node that shares its cards, or should, or has pods that use some. kubectl inspect, the page and
// the metrics show this list.
func NodeProblems(n *ledger.Node) (problems []reasons.NodeProblem) {
	add := func(kind reasons.NodeProblemKind, format string, args ...any) {
		problems = append(problems, reasons.NewNodeProblem(kind, format, args...))
	}
	if n.Gone {
		add(reasons.NodeGone, "the node is gone, but pods are bound to it")
	}
	problems = append(problems, n.Problems...)
	unit := gpu.UnitOf(n.Unit, n.Cards)
	for i, card := range n.Cards {
		if !card.Healthy() {
			add(reasons.NodeUnhealthyCard, "GPU%d is unhealthy: %s", card.Index, card.Unhealthy)
		}
		if n.Used[i] > card.Memory {
			add(reasons.NodeOverfullCard, "GPU%d is oversubscribed: %d of %d (%s)", card.Index, n.Used[i], card.Memory, unit)
		}
		if n.UsedCores[i] > gpu.CardCores {
			add(reasons.NodeOverfullCard, "the cores of GPU%d are oversubscribed: %d of %d", card.Index, n.UsedCores[i], gpu.CardCores)
		}
		if most := card.MaxContainers; most > 0 && int(n.Containers[i]) > most {
			add(reasons.NodeOverfullCard, "GPU%d has more containers than it can have: %d of %d", card.Index, n.Containers[i], most)
		}
	}
	missing, unknown := offCards(n)
	if len(n.Cards) == 0 { // Then there is no unit, and no card is more missing than another.
		for _, memory := range missing {
			unknown = unknown.Add(memory)
		}
		if unknown > 0 {
			add(reasons.NodeUnknownCard, "pods hold %d units of GPU memory there", unknown)
		}
		return problems
	}
	for _, index := range slices.Sorted(maps.Keys(missing)) {
		add(reasons.NodeUnknownCard, "pods hold %d (%s) of GPU%d, which the node doesn't report", missing[index], unit, index)
	}
	if unknown > 0 {
		add(reasons.NodeUnknownCard, "pods whose card is not known hold %d (%s)", unknown, unit)
	}
	return problems
}

// offCards returns the memory that pods hold on cards that the node doesn't report, by index, and what they hold on cards that are unknown.
func offCards(n *ledger.Node) (missing map[int]gpu.Memory, unknown gpu.Memory) {
	missing = map[int]gpu.Memory{}
	for _, allocation := range n.Allocations {
		rest := allocation.Request
		for _, share := range allocation.Placement {
			rest = rest.Sub(share.Memory)
			if !slices.ContainsFunc(n.Cards, func(c gpu.Card) bool { return c.Index == share.Card }) {
				missing[share.Card] = missing[share.Card].Add(share.Memory)
			}
		}
		unknown = unknown.Add(rest)
	}
	return missing, unknown
}

// UnitsProblem returns the problem that nodes with cards count GPU memory in different units, by their names for each unit; empty if they don't.
// Pods request numbers of units, so one that was meant for a node with a large unit gets almost nothing of a node with a small one.
func UnitsProblem(nodes map[gpu.Unit][]string) string {
	if len(nodes) < 2 {
		return ""
	}
	var units []string
	for _, unit := range slices.Sorted(maps.Keys(nodes)) {
		units = append(units, fmt.Sprintf("%s (%s)", unit, FirstOf(slices.Sorted(slices.Values(nodes[unit])))))
	}
	return fmt.Sprintf("nodes have different units of GPU memory, so the same request means different amounts: %s; "+
		"give all the same devicePlugin.memoryUnit", strings.Join(units, ", "))
}
