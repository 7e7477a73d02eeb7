package inspect

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// format says how a table is written.
type format struct {
	// wide adds columns on the right and doesn't shorten reasons.
	wide bool
	// rowsOnly writes only rows, without headers and sections.
	rowsOnly bool
	// scope is what the sums are about, see scope.name; empty for the cluster.
	scope string
	look  look
}

// writeTable writes a row for each node, the sum of all nodes, problems and pending pods. All amounts are in the unit that
// the header names. Scripts parse the columns up to "GPU Memory" and the last lines of the sum. So new columns come after
// these columns, new lines before these lines, and colors and bars appear on terminals only.
func writeTable(out *bytes.Buffer, report Report, f format) {
	if f.rowsOnly {
		nodeRows(report, layout{wide: f.wide})[1:].write(out, f.look)
		return
	}
	if len(report.Nodes) > 0 {
		nodes, width := fitNodeRows(report, f)
		out.Write(nodes)
		fmt.Fprintln(out, rule(width, f.look))
		fmt.Fprintln(out, largestFreeText(report))
		fmt.Fprintf(out, "%s\n%s", f.sumTitle(), sumText(report.Cluster.Sum))
		if f.look.bars {
			fmt.Fprint(out, "  ", bar(report.Cluster.Allocated, report.Cluster.Total, 2*barWidth))
		}
		fmt.Fprintln(out)
	}
	problemRows(report, f.wide).writeSection(out, f.look, "Problems:")
	writePods(out, report, f)
}

// layout says which columns the table of nodes has. The zero layout is the one that scripts parse.
type layout struct {
	// wide adds columns on the right, bars a bar for each card. short shortens the headers of the cards.
	wide, bars, short bool
}

// fitNodeRows returns the table of nodes in the first layout that fits the terminal, and its width. With wide it has all
// columns everywhere.
func fitNodeRows(report Report, f format) (text []byte, width int) {
	layouts := []layout{{wide: f.wide}}
	if f.look.bars && !f.wide {
		layouts = []layout{{bars: true}, {bars: true, short: true}, {short: true}}
	}
	for _, layout := range layouts {
		var out bytes.Buffer
		width = nodeRows(report, layout).write(&out, f.look)
		text = out.Bytes()
		if f.look.width == 0 || width <= f.look.width {
			break
		}
	}
	return text, width
}

// column is a column of the table of nodes.
type column struct {
	name string
	cell func(*Node) string
}

// nodeRows returns the table's header and a row for each node. Every row has every column, which scripts rely on.
func nodeRows(report Report, layout layout) rows {
	columns := nodeColumns(report, layout)
	header := row{style: bold}
	for _, column := range columns {
		header.cells = append(header.cells, column.name)
	}
	table := rows{header}
	for i := range report.Nodes {
		row := row{}
		if len(report.Nodes[i].Problems) > 0 {
			row.style = red
		}
		for _, column := range columns {
			row.cells = append(row.cells, column.cell(&report.Nodes[i]))
		}
		table = append(table, row)
	}
	return table
}

func nodeColumns(report Report, layout layout) []column {
	unit := report.Cluster.Unit
	amount := func(node *Node, m gpu.Memory) string { return convert(m, node.Unit, unit).String() }
	columns := []column{
		{"NAME", func(n *Node) string { return n.Name }},
		{"IPADDRESS", func(n *Node) string { return n.Address }},
	}
	add := func(name string, cell func(*Node) string) { columns = append(columns, column{name, cell}) }

	indices := cardIndices(report.Nodes)
	for _, index := range indices {
		name := fmt.Sprintf("GPU%d(Allocated/Total)", index)
		if layout.short {
			name = fmt.Sprintf("GPU%d", index)
		}
		add(name, func(n *Node) string {
			if card := n.card(index); card != nil {
				return amount(n, card.Allocated) + "/" + amount(n, card.Total)
			}
			return "0/0"
		})
	}
	if slices.ContainsFunc(report.Nodes, func(n Node) bool { return n.UnknownCard > 0 }) {
		add("PENDING(Allocated)", func(n *Node) string {
			if n.UnknownCard == 0 {
				return ""
			}
			return amount(n, n.UnknownCard)
		})
	}
	add(fmt.Sprintf("GPU Memory(%s)", unit), func(n *Node) string { return amount(n, n.Allocated) + "/" + amount(n, n.Total) })
	columns = append(columns, coresColumns(report.Nodes, indices, layout)...)
	if layout.wide || layout.bars || layout.short {
		add(fmt.Sprintf("LARGEST FREE(%s)", unit), func(n *Node) string { return amount(n, n.LargestFree) })
	}
	if layout.bars {
		for _, index := range indices {
			add(fmt.Sprintf("GPU%d", index), func(n *Node) string {
				if card := n.card(index); card != nil {
					return cardBar(card, barWidth)
				}
				return ""
			})
		}
	}
	if layout.wide {
		add("UNIT", func(n *Node) string { return n.Unit.String() })
		add("MODEL", func(n *Node) string { return models(n.Cards) })
		add("PROBLEMS", func(n *Node) string { return cmp.Or(strings.Join(n.Problems, "; "), "-") })
	}
	return columns
}

// coresColumns returns a column for each card with its allocated and total cores, if a pod asks for cores.
func coresColumns(nodes []Node, indices []int, layout layout) (columns []column) {
	if layout.short || !slices.ContainsFunc(nodes, func(n Node) bool { return n.coresInUse() }) {
		return nil
	}
	for _, index := range indices {
		columns = append(columns, column{fmt.Sprintf("GPU%d(Cores)", index), func(n *Node) string {
			if card := n.card(index); card != nil && (card.Cores > 0 || card.AllocatedCores > 0) {
				return card.coresText()
			}
			return "-"
		}})
	}
	return columns
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
		if card.Model != "" && counts[card.Model] == 0 {
			names = append(names, card.Model)
		}
		counts[card.Model]++
	}
	for i, name := range names {
		names[i] = fmt.Sprintf("%d x %s", counts[name], name)
	}
	return cmp.Or(strings.Join(names, ", "), "-")
}

func sumText(sum Sum) string {
	return fmt.Sprintf("%d/%d (%d%%)", sum.Allocated, sum.Total, sum.Percent)
}

// largestFreeText returns the line with the largest request that fits now and the total free memory.
func largestFreeText(report Report) string {
	cluster := report.Cluster
	if cluster.LargestFree == 0 {
		return "Largest Free Piece: none"
	}
	unit := gpu.Unit(cluster.Unit)
	var names []string
	for _, node := range report.Nodes {
		if convert(node.LargestFree, node.Unit, cluster.Unit) == cluster.LargestFree {
			names = append(names, node.Name)
		}
	}
	others := ""
	if len(names) == 2 {
		others = " and 1 other node"
	} else if len(names) > 2 {
		others = fmt.Sprintf(" and %d other nodes", len(names)-1)
	}
	return fmt.Sprintf("Largest Free Piece: %s of %s free, on %s%s",
		unit.Format(cluster.LargestFree), unit.Format(cluster.Free), oneLine(names[0]), others)
}

func (f format) sumTitle() string {
	return fmt.Sprintf("Allocated/Total GPU Memory %s:", oneLine(cmp.Or(f.scope, "In Cluster")))
}

// problemRows returns a row for each problem. cardlessOnly leaves out nodes that have a row or block of their own with their
// problems.
func problemRows(report Report, cardlessOnly bool) rows {
	table := rows{{bold, []string{"NODE", "PROBLEM"}}}
	add := func(name string, problems []string) {
		for _, problem := range problems {
			table.add(red, name, problem)
		}
	}
	for _, node := range report.Nodes {
		if !cardlessOnly {
			add(node.Name, node.Problems)
		}
	}
	for _, node := range report.NodesWithoutCards {
		add(node.Name, node.Problems)
	}
	return table
}
