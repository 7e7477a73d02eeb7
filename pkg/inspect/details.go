package inspect

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// writeDetails writes a block for each node with the pods on each card, in the node's unit, then the cluster's sum and the
// pending pods. wide adds the status of every pod and a table of the node's cards, which terminals always get.
func writeDetails(out *bytes.Buffer, report Report, f format) {
	for i := range report.Nodes {
		node := &report.Nodes[i]
		width := append(rows{
			{bold, []string{"NAME:", node.Name}},
			{plain, []string{"IPADDRESS:", node.Address}},
			{plain, []string{"UNIT:", node.Unit.String()}},
		}, node.aboutRows()...).write(out, f.look)
		fmt.Fprintln(out)
		if f.wide || f.look.bars {
			width = max(width, cardRows(node, f.look.bars).write(out, f.look))
			fmt.Fprintln(out)
		}
		width = max(width, podRows(node, f.wide).write(out, f.look))
		fmt.Fprintf(out, "%s\n\n", rule(width, f.look))
	}
	if len(report.Nodes) > 0 {
		fmt.Fprintln(out, largestFreeText(report))
		fmt.Fprintf(out, "%s  %s", f.sumTitle(), sumText(report.Cluster.Sum))
		if slices.ContainsFunc(report.Nodes, func(n Node) bool { return n.Unit != report.Cluster.Unit }) {
			fmt.Fprintf(out, " in %s", report.Cluster.Unit) // Otherwise every block above names the unit.
		}
		fmt.Fprintln(out)
	}
	writeClusterProblems(out, report, f)
	problemRows(report, true).writeSection(out, f.look, "Problems:")
	writePods(out, report, f)
}

// podRows returns a row for each pod, with a column for each card, and the node's sums and problems. Columns for cores are only there if
// a pod of the node asks for some.
func podRows(node *Node, wide bool) rows {
	columns := []column[Pod]{
		{"NAMESPACE", func(p Pod) string { return p.Namespace }},
		{"NAME", func(p Pod) string { return p.Name }},
	}
	for _, card := range node.Cards {
		columns = append(columns, column[Pod]{fmt.Sprintf("GPU%d(Allocated)", card.Index), func(p Pod) string { return p.on(card.Index).Memory.String() }})
	}
	if node.UnknownCard > 0 {
		columns = append(columns, column[Pod]{"Pending(Allocated)", func(p Pod) string { return p.unknownCard.String() }})
	}
	for _, card := range node.Cards {
		if node.coresInUse() {
			columns = append(columns, column[Pod]{fmt.Sprintf("GPU%d(Cores)", card.Index), func(p Pod) string { return p.on(card.Index).Cores.String() }})
		}
	}
	if wide || slices.ContainsFunc(node.Pods, func(p Pod) bool { return p.Terminating || len(p.Notes) > 0 }) {
		columns = append(columns, column[Pod]{"STATUS", status})
	}
	table := newTable(node.Pods, func(Pod) style { return plain }, columns)
	table.add(plain, "Allocated :", fmt.Sprintf("%d (%d%%)", node.Allocated, node.Percent))
	table.add(plain, "Total :", node.Total.String())
	label := "Problems :"
	for _, problem := range node.Problems {
		table.add(red, label, problem)
		label = ""
	}
	return table
}

func cardRows(node *Node, bars bool) rows {
	columns := []column[Card]{
		{"GPU", func(c Card) string { return fmt.Sprintf("GPU%d", c.Index) }},
		{"UUID", func(c Card) string { return cmp.Or(c.UUID, "-") }},
		{"MODEL", func(c Card) string { return cmp.Or(c.Model, "-") }},
		{"NUMA", func(c Card) string {
			if c.NUMANode == nil {
				return "-"
			}
			return strconv.Itoa(*c.NUMANode)
		}},
		{"ALLOCATED/TOTAL", func(c Card) string { return fmt.Sprintf("%d/%d", c.Allocated, c.Total) }},
	}
	if slices.ContainsFunc(node.Cards, func(c Card) bool { return c.Cores > 0 }) {
		columns = append(columns, column[Card]{"CORES", Card.coresText})
	}
	if len(node.Adapters) > 0 {
		columns = append(columns, column[Card]{"RDMA", func(c Card) string { return cmp.Or(c.RDMAPorts, "-") }})
	}
	if bars {
		columns = append(columns, column[Card]{"", func(c Card) string { return cardBar(&c, 2*barWidth) }})
	}
	columns = append(columns, column[Card]{"HEALTH", func(c Card) string {
		if c.Healthy {
			return "healthy"
		}
		return "unhealthy: " + c.Reason
	}})
	return newTable(node.Cards, func(c Card) style { return redIf(!c.Healthy) }, columns)
}

// coresText returns the card's allocated and total cores.
func (c Card) coresText() string { return fmt.Sprintf("%d/%d", c.AllocatedCores, gpu.CardCores) }

func status(pod Pod) string {
	state := pod.Phase
	if pod.Terminating {
		state = "Terminating"
	}
	return strings.Join(append([]string{state}, pod.Notes...), ", ")
}
