package inspect

import (
	"bytes"
	"fmt"
	"strings"
	"text/tabwriter"
	"unicode"
	"unicode/utf8"

	"k8s.io/cli-runtime/pkg/printers"
)

// rows are the rows of a table.
type rows []row

type row struct {
	style style
	cells []string
}

func (r *rows) add(style style, cells ...string) { *r = append(*r, row{style, cells}) }

// column is a column of a table of items.
type column[Item any] struct {
	name string
	cell func(Item) string
}

// newTable returns the header and a row for each item. styleOf returns the style of an item's row.
func newTable[Item any](items []Item, styleOf func(Item) style, columns []column[Item]) rows {
	table := make(rows, 1+len(items))
	table[0].style = bold
	for _, c := range columns {
		table[0].cells = append(table[0].cells, c.name)
		for i, item := range items {
			table[1+i].cells = append(table[1+i].cells, c.cell(item))
		}
	}
	for i, item := range items {
		table[1+i].style = styleOf(item)
	}
	return table
}

// redIf is the style of a row that the reader shall see first.
func redIf(wrong bool) style {
	if wrong {
		return red
	}
	return plain
}

// write writes the rows with aligned columns and returns the width of the longest. The last cell of a row doesn't count for
// the width of its column. Texts come from the network, so write removes control characters.
func (r rows) write(out *bytes.Buffer, look look) (width int) {
	var aligned bytes.Buffer
	writer := tabwriter.NewWriter(&aligned, 0, 0, 2, ' ', 0)
	for _, row := range r {
		for i, cell := range row.cells {
			if i > 0 {
				fmt.Fprint(writer, "\t")
			}
			fmt.Fprint(writer, oneLine(cell))
		}
		fmt.Fprintln(writer)
	}
	_ = writer.Flush() // A buffer accepts everything.
	for _, row := range r {
		line, _ := aligned.ReadString('\n')
		line = strings.TrimRight(line, " \n")
		width = max(width, utf8.RuneCountInString(line))
		fmt.Fprintln(out, look.paint(row.style, line))
	}
	return width
}

// writeAlone writes rows that are the whole output, the first of which is the header. It writes nothing if there is only the
// header.
func (r rows) writeAlone(out *bytes.Buffer, f format) {
	if len(r) > 1 && f.rowsOnly {
		r[1:].write(out, f.look)
	} else if len(r) > 1 {
		r.write(out, f.look)
	}
}

// writeSection writes a title and rows, the first of which is the header. It writes nothing if there is only the header.
func (r rows) writeSection(out *bytes.Buffer, look look, title string) {
	if len(r) < 2 {
		return
	}
	if out.Len() > 0 {
		fmt.Fprintln(out)
	}
	fmt.Fprintln(out, title)
	r.write(out, look)
}

// rule returns a horizontal line below rows of that width, up to a limit.
func rule(width int, look look) string {
	limit := 120
	if look.width > 0 {
		limit = look.width
	}
	return strings.Repeat("-", min(width, limit))
}

// oneLine sanitizes a text for a cell: it contains no line breaks or tabs, and nothing that a terminal interprets.
func oneLine(s string) string {
	s = printers.EscapeTerminal(strings.Join(strings.Fields(s), " "))
	return strings.Map(func(r rune) rune {
		switch {
		case r < ' ' || r >= 0x7f && r < 0xa0:
			return '?'
		case unicode.Is(unicode.Bidi_Control, r): // It could reverse the rest of the line.
			return -1
		}
		return r
	}, s)
}

// Printable sanitizes a text of several lines, such as an error with a message of the API server: it contains nothing that a
// terminal interprets.
func Printable(text string) string {
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		lines[i] = oneLine(line)
	}
	return strings.Join(lines, "\n")
}
