package docs

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// go.mod requires what the programs are built from, and only what else all tests use. Scanners report each module in it as the product's.
func TestModules(t *testing.T) {
	lines := func(args ...string) []string {
		command := exec.CommandContext(t.Context(), "go", args...)
		command.Dir = "../.."
		out, err := command.Output()
		if err != nil {
			t.Fatalf("go %s: %v", strings.Join(args, " "), err)
		}
		return strings.Fields(string(out))
	}
	built := lines("list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}", "./cmd/...")
	for _, module := range lines("list", "-m", "-f", "{{if not (or .Main .Indirect)}}{{.Path}}{{end}}", "all") {
		if module != "github.com/google/go-cmp" && !slices.Contains(built, module) {
			t.Errorf("no program is built from %s: move what needs it to a module of its own, like test/browser", module)
		}
	}
}
