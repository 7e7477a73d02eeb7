package inspect

import (
	"bytes"
	"fmt"
	"io"
)

// screen shows successive texts. On a terminal, each replaces the previous one; elsewhere they follow each other with a
// separator. It is not safe for concurrent use.
type screen struct {
	out io.Writer
	// size returns the terminal's size; nil if out is not a terminal.
	size func() (width, height int)
	// separator is written between texts if out is not a terminal.
	separator string

	last                []byte
	lastWide, lastLines int // The terminal's size when last was shown.
}

// Terminal control sequences (ECMA-48; those with ? are DEC's and xterm's).
const (
	enterScreen = "\x1b[?1049h\x1b[?25l" // The alternate screen, without a cursor.
	leaveScreen = "\x1b[?25h\x1b[?1049l"
	wrapOff     = "\x1b[?7l"
	wrapOn      = "\x1b[?7h"
	home        = "\x1b[H"
	clearLine   = "\x1b[K"
	clearBelow  = "\x1b[J"
)

// newScreen returns a screen on out. With inPlace, texts replace each other on a terminal.
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

// show writes the text, unless it is already shown at the same size.
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

// close restores the terminal.
func (s *screen) close() error {
	if s.size == nil || s.last == nil {
		return nil
	}
	_, err := io.WriteString(s.out, leaveScreen)
	return err
}

// repaint overwrites the screen line by line, to avoid flicker. The terminal cuts lines that are too long. Lines that don't
// fit are replaced by a line with their number.
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
