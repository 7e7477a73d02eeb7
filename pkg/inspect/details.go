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

// WriteDetails writes a block a node with the pods on each card, each in its node's own unit, then the cluster's sum
// and the pending pods. Wide adds a table of the node's cards and every pod's status.
func WriteDetails(out io.Writer, report Report, wide bool) error {
	var text bytes.Buffer
	for i := range report.Nodes {
		node := &report.Nodes[i]
		var block bytes.Buffer
		writeRows(&block, [][]string{
			{"NAME:", node.Name},
			{"IPADDRESS:", node.Address},
			{"UNIT:", node.Unit.String()},
		})
		if wide {
			fmt.Fprintln(&block)
			writeRows(&block, cardRows(node))
		}
		fmt.Fprintln(&block)
		writeRows(&block, slices.Concat(podRows(node, wide), sumRows(node)))
		fmt.Fprintln(&block, rule(block.String()))
		fmt.Fprintln(&block)
		text.Write(block.Bytes())
	}
	if len(report.Nodes) > 0 {
		fmt.Fprintf(&text, "Allocated/Total GPU Memory In Cluster:  %s", sumText(report.Cluster))
		if mixedUnits(report) { // Else every block above has told it.
			fmt.Fprintf(&text, " in %s", report.Cluster.Unit)
		}
		fmt.Fprintln(&text)
	}
	writePending(&text, report.PendingPods, wide)
	_, err := text.WriteTo(out)
	return err
}

// podRows has a row for every pod and a column for every card.
func podRows(node *Node, wide bool) [][]string {
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

	rows := [][]string{header}
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
		rows = append(rows, row)
	}
	return rows
}

// sumRows close the table of pods: they are aligned with it.
func sumRows(node *Node) [][]string {
	rows := [][]string{
		{"Allocated :", fmt.Sprintf("%d (%d%%)", node.Allocated, node.Percent)},
		{"Total :", node.Total.String()},
	}
	label := "Problems :"
	for _, problem := range node.Problems {
		rows = append(rows, []string{label, problem})
		label = ""
	}
	return rows
}

func cardRows(node *Node) [][]string {
	rows := [][]string{{"GPU", "UUID", "MODEL", "NUMA", "ALLOCATED/TOTAL", "HEALTH"}}
	for _, card := range node.Cards {
		numa, health := "-", "healthy"
		if card.NUMANode != nil {
			numa = strconv.Itoa(*card.NUMANode)
		}
		if !card.Healthy {
			health = "unhealthy: " + card.Reason
		}
		rows = append(rows, []string{
			"GPU" + strconv.Itoa(card.Index), orNone(card.UUID), orNone(card.Model), numa,
			fmt.Sprintf("%d/%d", card.Allocated, card.Total), health,
		})
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
