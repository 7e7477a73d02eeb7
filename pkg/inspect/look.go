package inspect

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"
)

// Look is how a text is dressed. The zero Look, plain text without bars, is what scripts get; it never changes with the
// place where the command runs.
type Look struct {
	// Color marks what needs attention with colours.
	Color bool
	// Bars draws a bar for each card.
	Bars bool
	// ASCII draws with characters that every terminal has.
	ASCII bool
	// Width is the number of columns that the text should keep to; zero where nothing is known of that.
	Width int
}

// The values of --color.
const (
	colorAuto   = "auto"
	colorAlways = "always"
	colorNever  = "never"
)

// lookFor decides how to dress what is written to out. Colours and bars are for terminals; colorAlways has them
// elsewhere too, for pagers. NO_COLOR (no-color.org) and terminals that call themselves dumb get bars without colours.
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

// terminalSize returns the columns and lines of the terminal that out is, if it is one.
func terminalSize(out io.Writer) (width, height int, terminal bool) {
	file, ok := out.(*os.File)
	if !ok || !term.IsTerminal(int(file.Fd())) {
		return 0, 0, false
	}
	width, height, err := term.GetSize(int(file.Fd()))
	if err != nil || width < 1 || height < 1 {
		return 80, 24, true // Serial lines don't know theirs.
	}
	return width, height, true
}

// style is a way to show text: the parameters of ECMA-48's "select graphic rendition".
type style string

const (
	plain  style = ""
	bold   style = "1"
	red    style = "31"
	green  style = "32"
	yellow style = "33"
	faint  style = "2"
)

// paint dresses a text that is known to be harmless.
func (l Look) paint(s style, text string) string {
	if !l.Color || s == plain || text == "" {
		return text
	}
	return fmt.Sprintf("\x1b[%sm%s\x1b[0m", s, text)
}
