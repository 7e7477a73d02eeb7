package inspect

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
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

// writeTable writes a row for each node, the sum of all nodes, problems and pending pods. Nodes with the same cards are in one table. All
// amounts are in the unit that the header names. Scripts parse the columns up to "GPU Memory" and the last lines of the sum. So new columns
// come after these columns, new lines before these lines, and colors and bars appear on terminals only.
func writeTable(out *bytes.Buffer, report Report, f format) {
	if f.rowsOnly {
		for _, table := range nodeTables(report, layout{wide: f.wide}) {
			table[1:].write(out, f.look)
		}
		return
	}
	if len(report.Nodes) > 0 {
		nodes, width := fitNodeTables(report, f)
		out.Write(nodes)
		fmt.Fprintln(out, rule(width, f.look))
		if text := simulatedText(report); text != "" {
			fmt.Fprintln(out, text)
		}
		fmt.Fprintln(out, largestFreeText(report))
		fmt.Fprintf(out, "%s\n%s", f.sumTitle(), sumText(report.Cluster.Sum))
		if f.look.bars {
			fmt.Fprint(out, "  ", bar(report.Cluster.Allocated, report.Cluster.Total, 2*barWidth))
		}
		fmt.Fprintln(out)
	}
	writeClusterProblems(out, report, f)
	problemRows(report, f.wide).writeSection(out, f.look, "Problems:")
	writePods(out, report, f)
}

// layout says which columns the table of nodes has. The zero layout is the one that scripts parse.
type layout struct {
	// wide adds columns on the right, bars a bar for each card. short shortens the headers of the cards.
	wide, bars, short bool
}

// fitNodeTables returns the tables of nodes in the first layout that fits the terminal, and the width of the widest. With wide they
// have all columns everywhere.
func fitNodeTables(report Report, f format) (text []byte, width int) {
	layouts := []layout{{wide: f.wide}}
	if f.look.bars && !f.wide {
		layouts = []layout{{bars: true}, {bars: true, short: true}, {short: true}}
	}
	for _, layout := range layouts {
		var out bytes.Buffer
		width = 0
		for i, table := range nodeTables(report, layout) {
			if i > 0 {
				fmt.Fprintln(&out)
			}
			width = max(width, table.write(&out, f.look))
		}
		text = out.Bytes()
		if f.look.width == 0 || width <= f.look.width {
			break
		}
	}
	return text, width
}

// nodeTables returns a table for all nodes with the same cards. In a single table a node with many cards would make the rows of all others as long as
// its own. Every row of a table has every column, which scripts rely on.
func nodeTables(report Report, layout layout) (tables []rows) {
	var keys []string
	nodes := map[string][]*Node{} // By the indices of their cards.
	for i := range report.Nodes {
		node := &report.Nodes[i]
		key := fmt.Sprint(cardIndices(node))
		if nodes[key] == nil {
			keys = append(keys, key)
		}
		nodes[key] = append(nodes[key], node)
	}
	for _, key := range keys {
		columns := nodeColumns(report, cardIndices(nodes[key][0]), layout)
		tables = append(tables, newTable(nodes[key], func(n *Node) style { return redIf(len(n.Problems) > 0) }, columns))
	}
	return tables
}

// nodeColumns returns the columns of the table of the nodes that have the cards with these indices.
func nodeColumns(report Report, indices []int, layout layout) []column[*Node] {
	unit := report.Cluster.Unit
	amount := func(node *Node, m gpu.Memory) string { return convert(m, node.Unit, unit).String() }
	columns := []column[*Node]{
		{"NAME", func(n *Node) string { return n.Name }},
		{"IPADDRESS", func(n *Node) string { return n.Address }},
	}
	add := func(name string, cell func(*Node) string) { columns = append(columns, column[*Node]{name, cell}) }

	for _, index := range indices {
		name := fmt.Sprintf("GPU%d(Allocated/Total)", index)
		if layout.short {
			name = fmt.Sprintf("GPU%d", index)
		}
		add(name, func(n *Node) string { return amount(n, n.card(index).Allocated) + "/" + amount(n, n.card(index).Total) })
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
			add(fmt.Sprintf("GPU%d", index), func(n *Node) string { return cardBar(n.card(index), barWidth) })
		}
	}
	if layout.wide {
		add("UNIT", func(n *Node) string { return n.Unit.String() })
		add("MODEL", func(n *Node) string { return models(n) })
		if slices.ContainsFunc(report.Nodes, func(n Node) bool { return len(n.Adapters) > 0 }) {
			add("RDMA", rdmaPorts)
		}
		if slices.ContainsFunc(report.Nodes, func(n Node) bool { return n.Stranded != placement.Stranded{} }) {
			add("STRANDED", func(n *Node) string { return cmp.Or(n.Stranded.Text(n.Unit), "-") })
		}
		add("PROBLEMS", func(n *Node) string { return cmp.Or(strings.Join(n.Problems, "; "), "-") })
	}
	return columns
}

// coresColumns returns a column for each card with its allocated and total cores, if a pod asks for cores.
func coresColumns(nodes []Node, indices []int, layout layout) (columns []column[*Node]) {
	if layout.short || !slices.ContainsFunc(nodes, func(n Node) bool { return n.coresInUse() }) {
		return nil
	}
	for _, index := range indices {
		columns = append(columns, column[*Node]{fmt.Sprintf("GPU%d(Cores)", index), func(n *Node) string {
			if card := n.card(index); card.Cores > 0 || card.AllocatedCores > 0 {
				return card.coresText()
			}
			return "-"
		}})
	}
	return columns
}

// cardIndices returns the indices of the node's cards. Each is a column of its table.
func cardIndices(node *Node) []int {
	indices := make([]int, len(node.Cards))
	for i, card := range node.Cards {
		indices[i] = card.Index
	}
	return indices
}

// models returns the number of the node's cards by model, such as "2 x Tesla T4".
func models(node *Node) string {
	var names []string
	counts := map[string]int{}
	for _, card := range node.Cards {
		if card.Model != "" && counts[card.Model] == 0 {
			names = append(names, card.Model)
		}
		counts[card.Model]++
	}
	for i, name := range names {
		names[i] = fmt.Sprintf("%d x %s", counts[name], name)
		if node.Simulated {
			names[i] += " (simulated)"
		}
	}
	return cmp.Or(strings.Join(names, ", "), "-")
}

// rdmaPorts returns the active ports near each of the node's cards, such as "GPU0 mlx5_0:1, GPU1 -".
func rdmaPorts(node *Node) string {
	if len(node.Adapters) == 0 {
		return "-"
	}
	var cards []string
	for _, card := range node.Cards {
		cards = append(cards, fmt.Sprintf("GPU%d %s", card.Index, cmp.Or(card.RDMAPorts, "-")))
	}
	return strings.Join(cards, ", ")
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
	unit := cluster.Unit
	where := someNames(report.Nodes, func(n *Node) bool { return convert(n.LargestFree, n.Unit, cluster.Unit) == cluster.LargestFree })
	return fmt.Sprintf("Largest Free Piece: %s of %s free, on %s", unit.Format(cluster.LargestFree), unit.Format(cluster.Free), where)
}

// simulatedText returns the line about nodes whose cards don't exist; empty if there are none.
func simulatedText(report Report) string {
	where := someNames(report.Nodes, func(n *Node) bool { return n.Simulated })
	if where == "" {
		return ""
	}
	return fmt.Sprintf("Simulated Cards: on %s, for a trial: no container can compute on them", where)
}

// someNames returns the name of the first of the nodes for which of returns true, and the number of the others; empty if there are none.
func someNames(nodes []Node, of func(*Node) bool) string {
	first, others := "", -1
	for i := range nodes {
		if node := &nodes[i]; of(node) {
			first, others = cmp.Or(first, oneLine(node.Name)), others+1
		}
	}
	switch {
	case others < 1:
		return first
	case others == 1:
		return first + " and 1 other node"
	}
	return fmt.Sprintf("%s and %d other nodes", first, others)
}

func (f format) sumTitle() string {
	return fmt.Sprintf("Allocated/Total GPU Memory %s:", oneLine(cmp.Or(f.scope, "In Cluster")))
}

// writeClusterProblems writes a line for each problem that is not that of a node.
func writeClusterProblems(out *bytes.Buffer, report Report, f format) {
	if len(report.Problems) > 0 && out.Len() > 0 {
		fmt.Fprintln(out)
	}
	for _, problem := range report.Problems {
		fmt.Fprintln(out, f.look.paint(red, "Problem: "+oneLine(problem)))
	}
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
