package inspect

import (
	"fmt"
	"io"
	"os"

	"golang.org/x/term"
)

// This file has everything that terminals get and scripts don't: colors, and a cleared screen for --watch.

// look is the style of the output. The zero look is plain text, which doesn't depend on the environment.
type look struct {
	color bool
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

// lookFor returns the look for output to out. Colors are for terminals, unless NO_COLOR is set (no-color.org); colorAlways turns them on elsewhere, for
// pagers.
func lookFor(out io.Writer, color string) look {
	file, isFile := out.(*os.File)
	terminal := isFile && term.IsTerminal(int(file.Fd())) && os.Getenv("TERM") != "dumb"
	return look{color: color == colorAlways || color == colorAuto && terminal && os.Getenv("NO_COLOR") == "", clear: terminal}
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
