package pages

import (
	"testing"

	"github.com/gpushare/gpushare/test/check"
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
	check.Equal(t, "the result", want, commands(page, "Install"))
	if got := commands(page, "Elsewhere"); got != nil {
		t.Errorf("commands under a missing heading: %q", got)
	}
	if _, err := Commands("docs/install.md", "Elsewhere"); err == nil {
		t.Error("a missing heading: no error")
	}
}
