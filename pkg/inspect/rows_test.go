package inspect

import (
	"bytes"
	"strings"
	"testing"
	"unicode/utf8"
)

// TestColumnAlignment checks that columns are aligned for long names and control characters.
func TestColumnAlignment(t *testing.T) {
	long := strings.Repeat("a-very-long-name.", 14) + "node" // 242 characters, of 253 allowed.
	var out bytes.Buffer
	rows{
		{bold, []string{"NAME", "MODEL", "END"}},
		{plain, []string{"größe", "x", "|"}},
		{plain, []string{"a\u202eb\tc", "", "|"}},
		{red, []string{long, "größe", "|"}},
		{plain, []string{"the last cell makes no column wider, however long it may be" + long}},
	}.write(&out, look{})
	lines := strings.Split(out.String(), "\n")
	want := len(long) + 2 + len("MODEL") + 2
	for i, last := range []string{"END", "|", "|", "|"} {
		if got := utf8.RuneCountInString(strings.TrimSuffix(lines[i], last)); got != want {
			t.Errorf("the last column starts at %d, want %d: %s", got, want, lines[i])
		}
	}
	if strings.Contains(out.String(), "\u202e") {
		t.Error("a bidirectional control character was written")
	}
}

func TestOneLine(t *testing.T) {
	for name, test := range map[string]struct{ in, want string }{
		"line breaks and tabs become spaces": {"a\n b\t\tc\r\nd", "a b c d"},
		"escape sequences are shown":         {"\x1b[2Jgone", "^[[2Jgone"},
		"other controls are replaced":        {"a\x00b\x07c\u009bd\x7f", "a?b?c?d?"},
		"other scripts stay":                 {"größe 显存", "größe 显存"},
	} {
		if got := oneLine(test.in); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

// What the API server says in an error is no less harmless, and keeps its lines.
func TestPrintable(t *testing.T) {
	if got := Printable("pods \"\x1b[31mp\" not found\nTry \u202eagain"); got != "pods \"^[[31mp\" not found\nTry again" {
		t.Errorf("%q", got)
	}
}
