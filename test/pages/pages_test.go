package pages

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestCommands(t *testing.T) {
	const page = `# Page

    before the heading

## Install

Do this:

    one    # with a comment
    for x in y; do
      two
    done

    # still the same block
    three

Then

    four

- a list that goes on
    with an indented line

### Below

    of another heading
`
	want := []string{"one    # with a comment\nfor x in y; do\n  two\ndone\n# still the same block\nthree\n", "four\n"}
	if diff := cmp.Diff(want, commands(page, "Install")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := commands(page, "Elsewhere"); got != nil {
		t.Errorf("commands under a missing heading: %q", got)
	}
	if _, err := Commands("docs/install.md", "Elsewhere"); err == nil {
		t.Error("a missing heading: no error")
	}
}
