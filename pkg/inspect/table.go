package inspect

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// TableOptions are the options of the table of nodes.
type TableOptions struct {
	// Wide adds columns on the right and doesn't shorten reasons.
	Wide bool
	// RowsOnly writes only the rows of the nodes.
	RowsOnly bool
	Look     Look
}

// WriteTable writes a row for each node, the sum of all nodes, problems and pending pods. All amounts are in the unit that
// the header names. Scripts parse the columns up to "GPU Memory" and the last lines of the sum. So new columns come after
// these columns, new lines before these lines, and colors and bars appear on terminals only.
func WriteTable(out io.Writer, report Report, options TableOptions) error {
	var text bytes.Buffer
	if options.RowsOnly {
		options.Look = Look{}
	}
	look := options.Look
	header, rows := nodeRows(report, options.Wide, look)
	switch {
	case len(rows) == 0:
	case options.RowsOnly:
		writeRows(&text, look, rows)
	default:
		rows = slices.Insert(rows, 0, header)
		writeRows(&text, look, rows)
		fmt.Fprintln(&text, rule(rowsWidth(rows), look))
		fmt.Fprintln(&text, largestFreeText(report))
		fmt.Fprintf(&text, "Allocated/Total GPU Memory In Cluster:\n%s\n", clusterText(report.Cluster, look))
		if !options.Wide { // With Wide they are in a column.
			writeProblems(&text, look, report.Nodes)
		}
	}
	if !options.RowsOnly {
		writePending(&text, look, report.PendingPods, options.Wide)
	}
	_, err := text.WriteTo(out)
	return err
}

// nodeRows returns the table's header and a row for each node. Every row has every column, which scripts rely on.
func nodeRows(report Report, wide bool, look Look) (header []cell, rows [][]cell) {
	layout := layOut(report, wide, look)
	rows = make([][]cell, len(report.Nodes))
	for i := range report.Nodes {
		rows[i] = layout.row(&report.Nodes[i])
	}
	return layout.header(), rows
}

// cardIndices returns the sorted card indices of all nodes. Each is a column of the table.
func cardIndices(nodes []Node) []int {
	var indices []int
	for _, node := range nodes {
		for _, card := range node.Cards {
			indices = append(indices, card.Index)
		}
	}
	slices.Sort(indices)
	return slices.Compact(indices)
}

// models returns the number of cards by model, such as "2 x Tesla T4".
func models(cards []Card) string {
	var names []string
	counts := map[string]int{}
	for _, card := range cards {
		if card.Model == "" {
			continue
		}
		if counts[card.Model] == 0 {
			names = append(names, card.Model)
		}
		counts[card.Model]++
	}
	for i, name := range names {
		names[i] = fmt.Sprintf("%d x %s", counts[name], name)
	}
	return orNone(strings.Join(names, ", "))
}

func writeProblems(out *bytes.Buffer, look Look, nodes []Node) {
	rows := [][]cell{cells("NODE", "PROBLEM")}
	for _, node := range nodes {
		for _, problem := range node.Problems {
			rows = append(rows, []cell{{text: node.Name}, {problem, red}})
		}
	}
	writeSection(out, look, "Problems:", rows)
}

func writePending(out *bytes.Buffer, look Look, pods []PendingPod, full bool) {
	rows := [][]cell{cells("NAME", "NAMESPACE", "REQUEST", "REASON")}
	for _, pod := range pods {
		reason := pod.Reason
		if !full {
			reason = shorten(reason)
		}
		rows = append(rows, cells(pod.Name, pod.Namespace, pod.Request.String(), reason))
	}
	writeSection(out, look, "Pending Pods:", rows)
}

// writeSection writes a title and rows, the first of which is the header. It writes nothing if there is only the header.
func writeSection(out *bytes.Buffer, look Look, title string, rows [][]cell) {
	if len(rows) < 2 {
		return
	}
	if out.Len() > 0 {
		fmt.Fprintln(out)
	}
	fmt.Fprintln(out, title)
	writeRows(out, look, rows)
}

// shorten shortens kube-scheduler's message. It removes the part on why preemption doesn't help.
func shorten(message string) string {
	message, _, cut := strings.Cut(oneLine(message), " preemption:")
	if end := strings.LastIndex(message, ". "); cut && end >= 0 && strings.HasSuffix(message, ",") {
		message = message[:end+1] // Messages of other plugins precede it: "no new claims to deallocate, preemption: …".
	}
	const limit = 160
	if utf8.RuneCountInString(message) <= limit {
		return message
	}
	return strings.TrimSpace(string([]rune(message)[:limit-1])) + "…"
}

func sumText(sum Sum) string {
	return fmt.Sprintf("%d/%d (%d%%)", sum.Allocated, sum.Total, sum.Percent)
}

func orNone(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// clusterText returns the cluster's sum, which scripts parse, followed by a bar on terminals.
func clusterText(sum Cluster, look Look) string {
	text := sumText(sum.Sum)
	if look.Bars {
		text += "  " + look.bar(sum.Allocated, sum.Total, 2*widestBar)
	}
	return text
}

// largestFreeText returns the line with the largest request that fits now and the total free memory.
func largestFreeText(report Report) string {
	cluster := report.Cluster
	if cluster.LargestFree == 0 {
		return "Largest Free Piece: none"
	}
	unit := gpu.Unit(cluster.Unit)
	var names []string
	for i := range report.Nodes {
		node := &report.Nodes[i]
		if convert(node.LargestFree, node.Unit, cluster.Unit) == cluster.LargestFree {
			names = append(names, node.Name)
		}
	}
	where := names[0]
	if more := len(names) - 1; more > 0 {
		where += fmt.Sprintf(" and %s", count(more, "other node", "other nodes"))
	}
	return fmt.Sprintf("Largest Free Piece: %s of %s free, on %s", unit.Format(cluster.LargestFree), unit.Format(cluster.Free), oneLine(where))
}

// count returns a number with its noun.
func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// rule returns a horizontal line as long as the longest line above it, up to a limit.
func rule(longest int, look Look) string {
	limit := 120
	if look.Width > 0 {
		limit = look.Width
	}
	return strings.Repeat("-", min(longest, limit))
}
