package inspect

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestScreen(t *testing.T) {
	four := func() (int, int) { return 80, 4 }
	grows := func() func() (int, int) {
		height := 3
		return func() (int, int) { height++; return 80, height }
	}()
	tests := map[string]struct {
		size  func() (width, height int)
		texts []string
		want  string
	}{
		"without a terminal texts follow each other": {
			texts: []string{"a\n", "b\n"},
			want:  "a\n==\nb\n",
		},
		"the same text is shown once": {
			texts: []string{"a\n", "a\n", "b\n", "b\n", "a\n"},
			want:  "a\n==\nb\n==\na\n",
		},
		"an empty text counts as shown": {
			texts: []string{"", "", "b\n"},
			want:  "==\nb\n",
		},
		"a terminal is repainted": {
			size:  four,
			texts: []string{"a\nb\n", "c\n", "c\n"},
			want: "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[Ha\x1b[K\r\nb\x1b[K\r\n\x1b[J\x1b[?7h" +
				"\x1b[?7l\x1b[Hc\x1b[K\r\n\x1b[J\x1b[?7h" + "\x1b[?25h\x1b[?1049l",
		},
		"lines that don't fit are counted": {
			size:  four,
			texts: []string{"1\n2\n3\n4\n5\n"},
			want: "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[H1\x1b[K\r\n2\x1b[K\r\n... and 3 more lines\x1b[K\r\n\x1b[J\x1b[?7h" +
				"\x1b[?25h\x1b[?1049l",
		},
		"lines that just fit are shown": {
			size:  four,
			texts: []string{"1\n2\n3\n"},
			want: "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[H1\x1b[K\r\n2\x1b[K\r\n3\x1b[K\r\n\x1b[J\x1b[?7h" +
				"\x1b[?25h\x1b[?1049l",
		},
		"another size shows the same text again": {
			size:  grows,
			texts: []string{"1\n2\n3\n4\n", "1\n2\n3\n4\n"},
			want: "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[H1\x1b[K\r\n2\x1b[K\r\n... and 2 more lines\x1b[K\r\n\x1b[J\x1b[?7h" +
				"\x1b[?7l\x1b[H1\x1b[K\r\n2\x1b[K\r\n3\x1b[K\r\n4\x1b[K\r\n\x1b[J\x1b[?7h" + "\x1b[?25h\x1b[?1049l",
		},
		"a terminal on which nothing was shown is not restored": {size: four},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			s := newScreen(&out, true, "==\n")
			s.size = test.size
			for _, text := range test.texts {
				if err := s.show([]byte(text)); err != nil {
					t.Fatal(err)
				}
			}
			if err := s.close(); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, out.String()); diff != "" {
				t.Errorf("written (-want +got):\n%s", diff)
			}
		})
	}
}
