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

// cells returns cells in the plain style.
func cells(texts ...string) []cell {
	out := make([]cell, len(texts))
	for i, text := range texts {
		out[i].text = text
	}
	return out
}

// gap is the number of spaces between columns.
const gap = 2

// writeRows writes rows with aligned columns. The last cell of a row is not padded and doesn't count for the width of its
// column. Texts come from the network, so writeRows removes control characters.
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

// harmless returns the rows with sanitized texts and without empty cells at their ends.
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

// columnWidths returns the widths of the columns, not counting the last cell of each row.
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

// rowsWidth returns the width of the longest row as writeRows writes it.
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

// textWidth returns the number of terminal columns of a text. East Asian wide characters take two columns, combining marks
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

// oneLine sanitizes a text for a cell: it contains no line breaks or tabs, and nothing that a terminal interprets.
func oneLine(s string) string {
	if isPlain(s) {
		return s
	}
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

// isPlain reports whether a text has only printable ASCII characters without spaces. It is oneLine's fast path.
func isPlain(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] >= 0x7f {
			return false
		}
	}
	return true
}
