package inspect

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode/utf8"

	"k8s.io/cli-runtime/pkg/printers"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// TableOptions say how much the table shows.
type TableOptions struct {
	// Wide adds columns to the right and shows reasons in full.
	Wide bool
	// RowsOnly leaves the rows of the nodes and nothing else.
	RowsOnly bool
}

// WriteTable writes one row a node, the sum of all, and what needs attention: problems and pending pods. All amounts are
// in the unit that the header names. The columns up to "GPU Memory" and the lines of the sum are read by scripts.
func WriteTable(out io.Writer, report Report, options TableOptions) error {
	var text bytes.Buffer
	header, rows := nodeRows(report, options.Wide)
	switch {
	case len(rows) == 0:
	case options.RowsOnly:
		writeRows(&text, rows)
	default:
		writeRows(&text, slices.Insert(rows, 0, header))
		fmt.Fprintln(&text, rule(text.String()))
		fmt.Fprintf(&text, "Allocated/Total GPU Memory In Cluster:\n%s\n", sumText(report.Cluster))
		if !options.Wide { // Wide has them in a column.
			writeProblems(&text, report.Nodes)
		}
	}
	if !options.RowsOnly {
		writePending(&text, report.PendingPods, options.Wide)
	}
	_, err := text.WriteTo(out)
	return err
}

// nodeRows returns the table's header and a row for every node. Scripts count on every row having every column.
func nodeRows(report Report, wide bool) (header []string, rows [][]string) {
	unit := report.Cluster.Unit
	indices := cardIndices(report.Nodes)
	unknownCard := slices.ContainsFunc(report.Nodes, func(n Node) bool { return n.UnknownCard > 0 })

	header = []string{"NAME", "IPADDRESS"}
	for _, index := range indices {
		header = append(header, fmt.Sprintf("GPU%d(Allocated/Total)", index))
	}
	if unknownCard {
		header = append(header, "PENDING(Allocated)")
	}
	header = append(header, fmt.Sprintf("GPU Memory(%s)", unit))
	if wide {
		header = append(header, fmt.Sprintf("LARGEST FREE(%s)", unit), "UNIT", "MODEL", "PROBLEMS")
	}

	for _, node := range report.Nodes {
		amount := func(m gpu.Memory) string { return convert(m, node.Unit, unit).String() }
		row := []string{node.Name, node.Address}
		for _, index := range indices {
			cell := "0/0"
			if card := node.card(index); card != nil {
				cell = amount(card.Allocated) + "/" + amount(card.Total)
			}
			row = append(row, cell)
		}
		if unknownCard {
			cell := ""
			if node.UnknownCard > 0 {
				cell = amount(node.UnknownCard)
			}
			row = append(row, cell)
		}
		row = append(row, amount(node.Allocated)+"/"+amount(node.Total))
		if wide {
			row = append(row, amount(node.LargestFree), node.Unit.String(), models(node.Cards),
				orNone(strings.Join(node.Problems, "; ")))
		}
		rows = append(rows, row)
	}
	return header, rows
}

// cardIndices are the indices of cards that any node has: the table's columns.
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

// models lists what cards a node has, such as "2 x Tesla T4".
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

func writeProblems(out *bytes.Buffer, nodes []Node) {
	rows := [][]string{{"NODE", "PROBLEM"}}
	for _, node := range nodes {
		for _, problem := range node.Problems {
			rows = append(rows, []string{node.Name, problem})
		}
	}
	writeSection(out, "Problems:", rows)
}

func writePending(out *bytes.Buffer, pods []PendingPod, full bool) {
	rows := [][]string{{"NAME", "NAMESPACE", "REQUEST", "REASON"}}
	for _, pod := range pods {
		reason := pod.Reason
		if !full {
			reason = shorten(reason)
		}
		rows = append(rows, []string{pod.Name, pod.Namespace, pod.Request.String(), reason})
	}
	writeSection(out, "Pending Pods:", rows)
}

// writeSection writes a title and its rows, of which the first is the header, or nothing where there is only that.
func writeSection(out *bytes.Buffer, title string, rows [][]string) {
	if len(rows) < 2 {
		return
	}
	if out.Len() > 0 {
		fmt.Fprintln(out)
	}
	fmt.Fprintln(out, title)
	writeRows(out, rows)
}

// writeRows aligns cells two spaces apart. What stands in cells came over the network and is made harmless here.
func writeRows(out *bytes.Buffer, rows [][]string) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		cells := make([]string, len(row))
		for i, cell := range row {
			cells[i] = oneLine(cell)
		}
		fmt.Fprintln(w, strings.Join(cells, "\t"))
	}
	_ = w.Flush() // A bytes.Buffer takes everything.
}

// oneLine makes a cell of any text: no line breaks or tabs, and nothing that a terminal would act on.
func oneLine(s string) string {
	s = printers.EscapeTerminal(strings.Join(strings.Fields(s), " "))
	return strings.Map(func(r rune) rune {
		if r < ' ' || r >= 0x7f && r < 0xa0 {
			return '?'
		}
		return r
	}, s)
}

// shorten keeps what a person needs of kube-scheduler's message: not its account of why preemption doesn't help.
func shorten(message string) string {
	message, _, _ = strings.Cut(oneLine(message), " preemption:")
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

// rule is a line as long as the longest of the text above it, within reason.
func rule(text string) string {
	longest := 0
	for line := range strings.Lines(text) {
		longest = max(longest, utf8.RuneCountInString(strings.TrimSuffix(line, "\n")))
	}
	return strings.Repeat("-", min(longest, 120))
}
