package inspect

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestScreen(t *testing.T) {
	four := func() int { return 4 }
	tests := map[string]struct {
		height func() int
		texts  []string
		want   string
	}{
		"elsewhere texts follow one another": {
			texts: []string{"a\n", "b\n"},
			want:  "a\n==\nb\n",
		},
		"the same text isn't shown twice": {
			texts: []string{"a\n", "a\n", "b\n", "b\n", "a\n"},
			want:  "a\n==\nb\n==\na\n",
		},
		"an empty text counts as shown": {
			texts: []string{"", "", "b\n"},
			want:  "==\nb\n",
		},
		"a terminal is painted over": {
			height: four,
			texts:  []string{"a\nb\n", "c\n", "c\n"},
			want: "\x1b[?7l\x1b[Ha\x1b[K\r\nb\x1b[K\r\n\x1b[J\x1b[?7h" +
				"\x1b[?7l\x1b[Hc\x1b[K\r\n\x1b[J\x1b[?7h",
		},
		"what doesn't fit is counted": {
			height: four,
			texts:  []string{"1\n2\n3\n4\n5\n"},
			want:   "\x1b[?7l\x1b[H1\x1b[K\r\n2\x1b[K\r\n... and 3 more lines\x1b[K\r\n\x1b[J\x1b[?7h",
		},
		"what just fits is whole": {
			height: four,
			texts:  []string{"1\n2\n3\n"},
			want:   "\x1b[?7l\x1b[H1\x1b[K\r\n2\x1b[K\r\n3\x1b[K\r\n\x1b[J\x1b[?7h",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			s := newScreen(&out, "==\n")
			s.height = test.height
			for _, text := range test.texts {
				if err := s.show([]byte(text)); err != nil {
					t.Fatal(err)
				}
			}
			if diff := cmp.Diff(test.want, out.String()); diff != "" {
				t.Errorf("written (-want +got):\n%s", diff)
			}
		})
	}
}
