package gang

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the state diagram to docs/design.md")

const diagramFile = "../../docs/design.md"

// diagram draws the transition table.
func diagram() string {
	var out strings.Builder
	out.WriteString("stateDiagram-v2\n    [*] --> incomplete: the first member exists\n")
	for from := range phases {
		for to := range phases {
			var why []string
			for _, t := range transitions {
				if t.From == from && t.To == to {
					why = append(why, string(t.Trigger))
				}
			}
			if len(why) > 0 {
				fmt.Fprintf(&out, "    %v --> %v: %s\n", from, to, strings.Join(why, ", or "))
			}
		}
	}
	out.WriteString("    running --> [*]: no member is left\n")
	return out.String()
}

// TestDiagram compares the diagram in the documentation with the transition table.
func TestDiagram(t *testing.T) {
	page, err := os.ReadFile(diagramFile)
	if err != nil {
		t.Fatal(err)
	}
	head, section, _ := strings.Cut(string(page), "\n### Phases\n")
	before, rest, found := strings.Cut(section, "```mermaid\n")
	drawn, after, closed := strings.Cut(rest, "```\n")
	if !found || !closed {
		t.Fatalf("%s has no mermaid block for the phases", diagramFile)
	}
	if drawn == diagram() {
		return
	}
	if !*update {
		t.Fatalf("the diagram in %s differs from the transition table: run go test ./pkg/gang -run TestDiagram -update", diagramFile)
	}
	if err := os.WriteFile(diagramFile, []byte(head+"\n### Phases\n"+before+"```mermaid\n"+diagram()+"```\n"+after), 0o644); err != nil {
		t.Fatal(err)
	}
}
