package inspect

import (
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// This file has everything that terminals get and scripts don't: colors, bars, and a cleared screen for --watch.

// look is the style of the output. The zero look is plain text without bars, which doesn't depend on the environment.
type look struct {
	color bool
	// bars adds a bar for each card.
	bars bool
	// width is the number of columns of the terminal; zero if unknown.
	width int
	// clear clears the screen before each table of --watch.
	clear bool
}

// The values of --color.
const (
	colorAuto   = "auto"
	colorAlways = "always"
	colorNever  = "never"
)

// clearScreen is the control sequence that moves the cursor home and clears the screen (ECMA-48, CUP and ED).
const clearScreen = "\x1b[H\x1b[2J"

// lookFor returns the look for output to out. Colors and bars are for terminals; colorAlways turns them on elsewhere, for
// pagers. With NO_COLOR (no-color.org), and on dumb terminals, there are bars without colors.
func lookFor(out io.Writer, color string) look {
	dumb := os.Getenv("TERM") == "dumb"
	l := look{color: color == colorAlways, bars: color == colorAlways}
	if file, ok := out.(*os.File); ok && term.IsTerminal(int(file.Fd())) {
		l.bars, l.clear = true, !dumb
		l.color = l.color || color == colorAuto && !dumb && os.Getenv("NO_COLOR") == ""
		l.width, _, _ = term.GetSize(int(file.Fd())) // Serial lines have no size.
	}
	return l
}

// style holds the parameters of ECMA-48's "select graphic rendition".
type style string

const (
	plain style = ""
	bold  style = "1"
	red   style = "31"
)

// paint returns the text in a style. The text must not contain control characters.
func (l look) paint(s style, text string) string {
	if !l.color || s == plain {
		return text
	}
	return fmt.Sprintf("\x1b[%sm%s\x1b[0m", s, text)
}

// barWidth is the width of a card's bar.
const barWidth = 10

// cardBar returns the bar of a card. An unhealthy card is crossed out.
func cardBar(card *Card, width int) string {
	if !card.Healthy {
		return strings.Repeat("x", width)
	}
	return bar(card.Allocated, card.Total, width)
}

// bar returns a bar of the given width. It is empty only if nothing is allocated, and full only if nothing is free.
func bar(allocated, total gpu.Memory, width int) string {
	full := 0
	switch {
	case allocated >= total && allocated > 0:
		full = width
	case allocated > 0:
		full = min(max(int(float64(allocated)/float64(total)*float64(width)+0.5), 1), width-1)
	}
	return strings.Repeat("#", full) + strings.Repeat(".", width-full)
}
