package inspect

import (
	"bytes"
	"strings"
	"unicode"

	"golang.org/x/text/width"
	"k8s.io/cli-runtime/pkg/printers"
)

// cell is one cell of a table.
type cell struct {
	text  string
	style style
}

// cells are plain ones.
func cells(texts ...string) []cell {
	out := make([]cell, len(texts))
	for i, text := range texts {
		out[i].text = text
	}
	return out
}

// gap stands between columns.
const gap = 2

// writeRows aligns the rows' cells, two spaces apart. Nothing follows a row's last cell, so that it makes no column wider.
// What stands in cells came over the network and is made harmless here.
func writeRows(out *bytes.Buffer, look Look, rows [][]cell) {
	rows = harmless(rows)
	widths := columnWidths(rows)
	for _, row := range rows {
		for i, c := range row {
			out.WriteString(look.paint(c.style, c.text))
			if i < len(row)-1 {
				out.WriteString(strings.Repeat(" ", widths[i]+gap-textWidth(c.text)))
			}
		}
		out.WriteByte('\n')
	}
}

// harmless returns the rows as they may be written, without what is empty at their ends.
func harmless(rows [][]cell) [][]cell {
	out := make([][]cell, len(rows))
	for i, row := range rows {
		for len(row) > 0 && row[len(row)-1].text == "" {
			row = row[:len(row)-1]
		}
		out[i] = make([]cell, len(row))
		for j, c := range row {
			out[i][j] = cell{oneLine(c.text), c.style}
		}
	}
	return out
}

// columnWidths are those of every column but the last of each row.
func columnWidths(rows [][]cell) []int {
	var widths []int
	for _, row := range rows {
		for i := range len(row) - 1 {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], textWidth(row[i].text))
		}
	}
	return widths
}

// rowsWidth is the width of the longest row, written.
func rowsWidth(rows [][]cell) int {
	rows = harmless(rows)
	widths, longest := columnWidths(rows), 0
	for _, row := range rows {
		sum := 0
		for i, c := range row {
			if i < len(row)-1 {
				sum += widths[i] + gap
			} else {
				sum += textWidth(c.text)
			}
		}
		longest = max(longest, sum)
	}
	return longest
}

// textWidth is the number of columns that a terminal gives to the text: Chinese characters take two, combining marks
// none.
func textWidth(s string) int {
	columns := 0
	for _, r := range s {
		switch {
		case r < 0x80:
			columns++
		case unicode.In(r, unicode.Mn, unicode.Me, unicode.Cf):
		default:
			switch width.LookupRune(r).Kind() {
			case width.EastAsianWide, width.EastAsianFullwidth:
				columns += 2
			default:
				columns++
			}
		}
	}
	return columns
}

// oneLine makes a cell of any text: no line breaks or tabs, and nothing that a terminal would act on.
func oneLine(s string) string {
	if isPlain(s) {
		return s
	}
	s = printers.EscapeTerminal(strings.Join(strings.Fields(s), " "))
	return strings.Map(func(r rune) rune {
		switch {
		case r < ' ' || r >= 0x7f && r < 0xa0:
			return '?'
		case unicode.Is(unicode.Bidi_Control, r): // Would turn the rest of the line around.
			return -1
		}
		return r
	}, s)
}

// Printable returns a text of several lines, such as an error with what the API server said, without anything that a
// terminal would act on.
func Printable(text string) string {
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		lines[i] = oneLine(line)
	}
	return strings.Join(lines, "\n")
}

// isPlain says of most texts, quickly, that oneLine has nothing to do.
func isPlain(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] >= 0x7f {
			return false
		}
	}
	return true
}
