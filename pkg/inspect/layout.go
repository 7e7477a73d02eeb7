package inspect

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// layout determines the columns of the table of nodes.
type layout struct {
	unit    Unit
	indices []int // The card indices of all nodes.
	// figures adds a column "allocated/total" for each card. They are omitted only if the terminal is too narrow.
	figures bool
	// addresses adds the nodes' addresses. They are omitted if the table is too wide even without figures.
	addresses bool
	// unknownCard adds the column of pods without a card.
	unknownCard bool
	// largestFree adds the column of the largest request that fits.
	largestFree bool
	// barColumns is the width of a card's bar, zero for no bars.
	barColumns int
	// wide adds the last columns: unit, model, problems.
	wide bool
	look Look
}

// layOut returns the columns that the report needs and that fit the terminal.
func layOut(report Report, wide bool, look Look) layout {
	l := layout{
		unit: report.Cluster.Unit, indices: cardIndices(report.Nodes), figures: true, addresses: true, wide: wide, look: look,
		unknownCard: slices.ContainsFunc(report.Nodes, func(n Node) bool { return n.UnknownCard > 0 }),
		largestFree: wide || look.Bars,
	}
	if !look.Bars {
		return l
	}
	if look.Width == 0 {
		l.barColumns = widestBar
		return l
	}
	thinnest := 0 // The width of bars with one character each.
	for _, index := range l.indices {
		thinnest += gap + len(strconv.Itoa(index))
	}
	width := l.width(report)
	if l.figures = wide || width+thinnest <= look.Width; !l.figures {
		width = l.width(report)
	}
	if l.addresses = wide || width+thinnest <= look.Width; !l.addresses {
		width = l.width(report)
	}
	l.barColumns = 1
	for columns := widestBar; columns >= narrowedBar; columns-- {
		if width+len(l.indices)*(gap+max(columns, len("GPU0"))) <= look.Width {
			l.barColumns = columns
			break
		}
	}
	return l
}

// width returns the width of the table without bars and without the columns of wide.
func (l layout) width(report Report) int {
	l.wide, l.barColumns = false, 0
	rows := [][]cell{l.header()}
	for i := range report.Nodes {
		rows = append(rows, l.row(&report.Nodes[i]))
	}
	return rowsWidth(rows)
}

func (l layout) header() []cell {
	names := []string{"NAME"}
	if l.addresses {
		names = append(names, "IPADDRESS")
	}
	if l.figures {
		for _, index := range l.indices {
			names = append(names, fmt.Sprintf("GPU%d(Allocated/Total)", index))
		}
	}
	if l.unknownCard {
		names = append(names, "PENDING(Allocated)")
	}
	names = append(names, fmt.Sprintf("GPU Memory(%s)", l.unit))
	if l.largestFree {
		names = append(names, fmt.Sprintf("LARGEST FREE(%s)", l.unit))
	}
	if l.barColumns > 0 {
		for _, index := range l.indices {
			name := strconv.Itoa(index)
			if l.barColumns >= narrowedBar {
				name = "GPU" + name
			}
			names = append(names, name)
		}
	}
	if l.wide {
		names = append(names, "UNIT", "MODEL", "PROBLEMS")
	}
	row := cells(names...)
	for i := range row {
		row[i].style = bold
	}
	return row
}

func (l layout) row(node *Node) []cell {
	amount := func(m gpu.Memory) string { return convert(m, node.Unit, l.unit).String() }
	row := cells(node.Name)
	if l.addresses {
		row = append(row, cell{text: node.Address})
	}
	if l.figures {
		for _, index := range l.indices {
			c := cell{text: "0/0"}
			if card := node.card(index); card != nil {
				c.text = amount(card.Allocated) + "/" + amount(card.Total)
				if !card.Healthy || card.Oversubscribed {
					c.style = red
				}
			}
			row = append(row, c)
		}
	}
	if l.unknownCard {
		c := cell{}
		if node.UnknownCard > 0 {
			c = cell{amount(node.UnknownCard), yellow}
		}
		row = append(row, c)
	}
	row = append(row, cell{text: amount(node.Allocated) + "/" + amount(node.Total)})
	if l.largestFree {
		row = append(row, cell{text: amount(node.LargestFree)})
	}
	if l.barColumns > 0 {
		for _, index := range l.indices {
			row = append(row, l.bar(node.card(index)))
		}
	}
	if l.wide {
		row = append(row, cell{text: node.Unit.String()}, cell{text: models(node.Cards)},
			cell{orNone(strings.Join(node.Problems, "; ")), problemStyle(node)})
	}
	return row
}

func (l layout) bar(card *Card) cell {
	if card == nil {
		return cell{}
	}
	return cell{l.look.cardBar(card, l.barColumns), cardStyle(card)}
}

func problemStyle(node *Node) style {
	if len(node.Problems) > 0 {
		return red
	}
	return plain
}
