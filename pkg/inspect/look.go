package inspect

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"
)

// Look is the style of the output. The zero Look is plain text without bars, for scripts; it doesn't depend on the
// environment.
type Look struct {
	// Color uses colors.
	Color bool
	// Bars adds a bar for each card.
	Bars bool
	// ASCII draws bars with ASCII characters only.
	ASCII bool
	// Width is the number of columns of the terminal; zero if unknown.
	Width int
}

// The values of --color.
const (
	colorAuto   = "auto"
	colorAlways = "always"
	colorNever  = "never"
)

// lookFor returns the Look for output to out. Colors and bars are for terminals; colorAlways turns them on elsewhere, for
// pagers. With NO_COLOR (no-color.org), and on dumb terminals, there are bars without colors.
func lookFor(out io.Writer, color string, getenv func(string) string) Look {
	width, _, terminal := terminalSize(out)
	colorless := getenv("NO_COLOR") != "" || getenv("TERM") == "dumb"
	locale := strings.ToUpper(cmp.Or(getenv("LC_ALL"), getenv("LC_CTYPE"), getenv("LANG")))
	return Look{
		Color: color == colorAlways || color == colorAuto && terminal && !colorless,
		Bars:  color == colorAlways || terminal,
		ASCII: locale != "" && !strings.Contains(strings.ReplaceAll(locale, "-", ""), "UTF8"),
		Width: width,
	}
}

// terminalSize returns the columns and lines of out if it is a terminal.
func terminalSize(out io.Writer) (width, height int, terminal bool) {
	file, ok := out.(*os.File)
	if !ok || !term.IsTerminal(int(file.Fd())) {
		return 0, 0, false
	}
	width, height, err := term.GetSize(int(file.Fd()))
	if err != nil || width < 1 || height < 1 {
		return 80, 24, true // Serial lines don't report their size.
	}
	return width, height, true
}

// style holds the parameters of ECMA-48's "select graphic rendition".
type style string

const (
	plain  style = ""
	bold   style = "1"
	red    style = "31"
	green  style = "32"
	yellow style = "33"
	faint  style = "2"
)

// paint returns the text in a style. The text must not contain control characters.
func (l Look) paint(s style, text string) string {
	if !l.Color || s == plain || text == "" {
		return text
	}
	return fmt.Sprintf("\x1b[%sm%s\x1b[0m", s, text)
}
