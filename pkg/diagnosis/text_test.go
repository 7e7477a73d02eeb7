package diagnosis

import (
	"strings"
	"testing"
)

func TestExcerpt(t *testing.T) {
	if got := Excerpt(" a\n b "); got != "a b" {
		t.Errorf("%q", got)
	}
	if got := Excerpt(strings.Repeat("ä", 400)); got != strings.Repeat("ä", 299)+"…" {
		t.Errorf("%q", got)
	}
}
