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
	unknownCard := node.UnknownCard > 0
	withCores := node.coresInUse()
	withStatus := wide || slices.ContainsFunc(node.Pods, func(p Pod) bool { return p.Terminating || len(p.Notes) > 0 })

	header := []string{"NAMESPACE", "NAME"}
	for _, card := range node.Cards {
		header = append(header, fmt.Sprintf("GPU%d(Allocated)", card.Index))
	}
	if unknownCard {
		header = append(header, "Pending(Allocated)")
	}
	for _, card := range node.Cards {
		if withCores {
			header = append(header, fmt.Sprintf("GPU%d(Cores)", card.Index))
		}
	}
	if withStatus {
		header = append(header, "STATUS")
	}
	table := rows{{bold, header}}
	for i := range node.Pods {
		pod := &node.Pods[i]
		cells := []string{pod.Namespace, pod.Name}
		for _, card := range node.Cards {
			cells = append(cells, pod.on(card.Index).Memory.String())
		}
		if unknownCard {
			cells = append(cells, pod.unknownCard.String())
		}
		for _, card := range node.Cards {
			if withCores {
				cells = append(cells, pod.on(card.Index).Cores.String())
			}
		}
		if withStatus {
			cells = append(cells, status(pod))
		}
		table.add(plain, cells...)
	}
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
	header := []string{"GPU", "UUID", "MODEL", "NUMA", "ALLOCATED/TOTAL"}
	withCores := slices.ContainsFunc(node.Cards, func(c Card) bool { return c.Cores > 0 })
	if withCores {
		header = append(header, "CORES")
	}
	withRDMA := len(node.Adapters) > 0
	if withRDMA {
		header = append(header, "RDMA")
	}
	if bars {
		header = append(header, "")
	}
	table := rows{{bold, append(header, "HEALTH")}}
	for i := range node.Cards {
		card := &node.Cards[i]
		numa, health, style := "-", "healthy", plain
		if card.NUMANode != nil {
			numa = strconv.Itoa(*card.NUMANode)
		}
		if !card.Healthy {
			health, style = "unhealthy: "+card.Reason, red
		}
		cells := []string{fmt.Sprintf("GPU%d", card.Index), cmp.Or(card.UUID, "-"), cmp.Or(card.Model, "-"), numa,
			fmt.Sprintf("%d/%d", card.Allocated, card.Total)}
		if withCores {
			cells = append(cells, card.coresText())
		}
		if withRDMA {
			cells = append(cells, cmp.Or(card.RDMAPorts, "-"))
		}
		if bars {
			cells = append(cells, cardBar(card, 2*barWidth))
		}
		table.add(style, append(cells, health)...)
	}
	return table
}

// coresText returns the card's allocated and total cores.
func (c *Card) coresText() string { return fmt.Sprintf("%d/%d", c.AllocatedCores, gpu.CardCores) }

func status(pod *Pod) string {
	state := pod.Phase
	if pod.Terminating {
		state = "Terminating"
	}
	return strings.Join(append([]string{state}, pod.Notes...), ", ")
}
