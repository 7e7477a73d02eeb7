package inspect

import (
	"bytes"
	"fmt"
	"io"
	"os"

	"golang.org/x/term"
)

// screen shows one text after another: on a terminal each in the place of the one before, elsewhere one below the
// other with a line between. It is for one goroutine.
type screen struct {
	out io.Writer
	// height is the terminal's number of lines, nil where out is none.
	height func() int
	// separator goes between texts where out is no terminal.
	separator string
	last      []byte
}

// The sequences that a terminal understands (ECMA-48; ?7 is DEC's autowrap).
const (
	wrapOff, wrapOn = "\x1b[?7l", "\x1b[?7h"
	home            = "\x1b[H"
	clearLine       = "\x1b[K"
	clearBelow      = "\x1b[J"
)

func newScreen(out io.Writer, separator string) *screen {
	s := &screen{out: out, separator: separator}
	if file, ok := out.(*os.File); ok && term.IsTerminal(int(file.Fd())) {
		s.height = func() int {
			_, height, err := term.GetSize(int(file.Fd()))
			if err != nil || height < 2 {
				return 24
			}
			return height
		}
	}
	return s
}

// show writes the text unless it is what stands there already.
func (s *screen) show(text []byte) error {
	if s.last != nil && bytes.Equal(s.last, text) {
		return nil
	}
	first := s.last == nil
	s.last = append([]byte{}, text...)

	var frame bytes.Buffer
	switch {
	case s.height != nil:
		s.repaint(&frame, text)
	case first:
		frame.Write(text)
	default:
		frame.WriteString(s.separator)
		frame.Write(text)
	}
	_, err := frame.WriteTo(s.out)
	return err
}

// repaint overwrites the screen in place, line by line, so that nothing flickers. A line that is too long is cut by the
// terminal; lines that are too many are counted.
func (s *screen) repaint(frame *bytes.Buffer, text []byte) {
	lines := bytes.Split(bytes.TrimSuffix(text, []byte("\n")), []byte("\n"))
	if room := s.height() - 1; len(lines) > room {
		hidden := len(lines) - (room - 1)
		lines = append(lines[:room-1:room-1], fmt.Appendf(nil, "... and %d more lines", hidden))
	}
	frame.WriteString(wrapOff + home)
	for _, line := range lines {
		frame.Write(line)
		frame.WriteString(clearLine + "\r\n")
	}
	frame.WriteString(clearBelow + wrapOn)
}
