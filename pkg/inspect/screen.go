package inspect

import (
	"bytes"
	"fmt"
	"io"
)

// screen shows one text after another: on a terminal each in the place of the one before, elsewhere one below the
// other with a line between. It is for one goroutine.
type screen struct {
	out io.Writer
	// size is the terminal's, nil where out is none.
	size func() (width, height int)
	// separator goes between texts where out is no terminal.
	separator string

	last                []byte
	lastWide, lastLines int // the terminal's size when last was shown
}

// The sequences that a terminal understands (ECMA-48; those with ? are DEC's and xterm's).
const (
	enterScreen = "\x1b[?1049h\x1b[?25l" // a screen beside the shell's own, and no cursor
	leaveScreen = "\x1b[?25h\x1b[?1049l"
	wrapOff     = "\x1b[?7l"
	wrapOn      = "\x1b[?7h"
	home        = "\x1b[H"
	clearLine   = "\x1b[K"
	clearBelow  = "\x1b[J"
)

// newScreen returns a screen on out. inPlace is what a reader wants of tables, and nobody of JSON.
func newScreen(out io.Writer, inPlace bool, separator string) *screen {
	s := &screen{out: out, separator: separator}
	if _, _, terminal := terminalSize(out); terminal && inPlace {
		s.size = func() (int, int) {
			width, height, _ := terminalSize(out)
			return width, height
		}
	}
	return s
}

// show writes the text unless it is what stands there already.
func (s *screen) show(text []byte) error {
	width, height := 0, 0
	if s.size != nil {
		width, height = s.size()
	}
	if s.last != nil && bytes.Equal(s.last, text) && width == s.lastWide && height == s.lastLines {
		return nil
	}
	first := s.last == nil
	s.last, s.lastWide, s.lastLines = append([]byte{}, text...), width, height

	var frame bytes.Buffer
	switch {
	case s.size != nil:
		if first {
			frame.WriteString(enterScreen)
		}
		repaint(&frame, text, height)
	case first:
		frame.Write(text)
	default:
		frame.WriteString(s.separator)
		frame.Write(text)
	}
	_, err := frame.WriteTo(s.out)
	return err
}

// close gives a terminal back as it was.
func (s *screen) close() error {
	if s.size == nil || s.last == nil {
		return nil
	}
	_, err := io.WriteString(s.out, leaveScreen)
	return err
}

// repaint overwrites the screen in place, line by line, so that nothing flickers. A line that is too long is cut by the
// terminal; lines that are too many are counted.
func repaint(frame *bytes.Buffer, text []byte, height int) {
	lines := bytes.Split(bytes.TrimSuffix(text, []byte("\n")), []byte("\n"))
	if room := max(height-1, 2); len(lines) > room {
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
