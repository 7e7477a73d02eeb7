package gang

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/test/check"
)

// TestDiagram compares the changes of phases in the diagram of the documentation with the table.
func TestDiagram(t *testing.T) {
	const file = "../../docs/design.md"
	page, err := os.ReadFile(file)
	check.Must(t, err)
	_, section, _ := strings.Cut(string(page), "\n### Phases\n")
	section, _, _ = strings.Cut(section, "\n### ")
	var drawn, want []string
	for _, change := range regexp.MustCompile(`(?m)^    (\w+) --> (\w+): .+$`).FindAllStringSubmatch(section, -1) {
		drawn = append(drawn, change[1]+" "+change[2])
	}
	for from, following := range transitions {
		for _, to := range following {
			want = append(want, Phase(from).String()+" "+to.String())
		}
	}
	slices.Sort(drawn)
	slices.Sort(want)
	if diff := cmp.Diff(want, drawn); diff != "" {
		t.Errorf("the diagram in %s differs from the table (-want +got):\n%s", file, diff)
	}
}
