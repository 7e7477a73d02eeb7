package inspect

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
)

// WriteDetails writes a block for each node with the pods on each card, in the node's unit, then the cluster's sum and the
// pending pods. wide adds the status of every pod and a table of the node's cards, which terminals always get.
func WriteDetails(out io.Writer, report Report, wide bool, look Look) error {
	var text bytes.Buffer
	for i := range report.Nodes {
		node := &report.Nodes[i]
		var block bytes.Buffer
		longest := 0
		section := func(rows [][]cell) {
			if block.Len() > 0 {
				fmt.Fprintln(&block)
			}
			writeRows(&block, look, rows)
			longest = max(longest, rowsWidth(rows))
		}
		section([][]cell{
			{{text: "NAME:"}, {node.Name, bold}},
			cells("IPADDRESS:", node.Address),
			cells("UNIT:", node.Unit.String()),
		})
		if wide || look.Bars {
			section(cardRows(node, look))
		}
		section(slices.Concat(podRows(node, wide), sumRows(node)))
		fmt.Fprintln(&block, rule(longest, look))
		fmt.Fprintln(&block)
		text.Write(block.Bytes())
	}
	if len(report.Nodes) > 0 {
		fmt.Fprintln(&text, largestFreeText(report))
		fmt.Fprintf(&text, "Allocated/Total GPU Memory In Cluster:  %s", sumText(report.Cluster.Sum))
		if mixedUnits(report) { // Otherwise every block above names the unit.
			fmt.Fprintf(&text, " in %s", report.Cluster.Unit)
		}
		fmt.Fprintln(&text)
	}
	writePending(&text, look, report.PendingPods, wide)
	_, err := text.WriteTo(out)
	return err
}

// podRows returns a row for each pod, with a column for each card.
func podRows(node *Node, wide bool) [][]cell {
	unknownCard := node.UnknownCard > 0
	withStatus := wide || slices.ContainsFunc(node.Pods, func(p Pod) bool { return p.Terminating || len(p.Notes) > 0 })

	header := []string{"NAME", "NAMESPACE"}
	for _, card := range node.Cards {
		header = append(header, fmt.Sprintf("GPU%d(Allocated)", card.Index))
	}
	if unknownCard {
		header = append(header, "Pending(Allocated)")
	}
	if withStatus {
		header = append(header, "STATUS")
	}

	rows := [][]cell{cells(header...)}
	for i := range node.Pods {
		pod := &node.Pods[i]
		row := []string{pod.Name, pod.Namespace}
		for _, card := range node.Cards {
			row = append(row, pod.on(card.Index).String())
		}
		if unknownCard {
			row = append(row, node.unknown(pod).String())
		}
		if withStatus {
			row = append(row, status(pod))
		}
		rows = append(rows, cells(row...))
	}
	return rows
}

// sumRows returns the last rows of the table of pods: the node's sums and problems.
func sumRows(node *Node) [][]cell {
	rows := [][]cell{
		cells("Allocated :", fmt.Sprintf("%d (%d%%)", node.Allocated, node.Percent)),
		cells("Total :", node.Total.String()),
	}
	label := "Problems :"
	for _, problem := range node.Problems {
		rows = append(rows, []cell{{text: label}, {problem, red}})
		label = ""
	}
	return rows
}

func cardRows(node *Node, look Look) [][]cell {
	header := cells("GPU", "UUID", "MODEL", "NUMA", "ALLOCATED/TOTAL", "HEALTH")
	if look.Bars {
		header = slices.Insert(header, 5, cells("")...)
	}
	rows := [][]cell{header}
	for i := range node.Cards {
		card := &node.Cards[i]
		numa, health := "-", cell{text: "healthy"}
		if card.NUMANode != nil {
			numa = strconv.Itoa(*card.NUMANode)
		}
		if !card.Healthy {
			health = cell{"unhealthy: " + card.Reason, red}
		}
		row := append(cells("GPU"+strconv.Itoa(card.Index), orNone(card.UUID), orNone(card.Model), numa,
			fmt.Sprintf("%d/%d", card.Allocated, card.Total)), health)
		if look.Bars {
			row = slices.Insert(row, 5, cell{look.cardBar(card, 2*widestBar), cardStyle(card)})
		}
		rows = append(rows, row)
	}
	return rows
}

func status(pod *Pod) string {
	state := cmp.Or(pod.Phase, "Unknown")
	if pod.Terminating {
		state = "Terminating"
	}
	return strings.Join(append([]string{state}, pod.Notes...), ", ")
}

func mixedUnits(report Report) bool {
	return slices.ContainsFunc(report.Nodes, func(n Node) bool { return n.Unit != report.Cluster.Unit })
}
