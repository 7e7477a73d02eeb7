package inspect

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// layout is which columns the table of nodes has.
type layout struct {
	unit    Unit
	indices []int // of cards, over all nodes
	// figures has a column "allocated/total" for every card. Only on a terminal too narrow for them are they left out.
	figures bool
	// addresses has the nodes' addresses: the first to go where even bars have too little room.
	addresses bool
	// unknownCard has the column of pods without a card.
	unknownCard bool
	// largestFree has the column of what the largest pod could be.
	largestFree bool
	// barColumns is the width of a card's bar, zero for none.
	barColumns int
	// wide has the columns on the right that explain.
	wide bool
	look Look
}

// layOut finds the columns that the report needs and that there is room for.
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
	thinnest := 0 // Bars of one character each.
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

// width is that of the table without bars.
func (l layout) width(report Report) int {
	l.wide, l.barColumns = false, 0 // What explains is as long as it likes.
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
