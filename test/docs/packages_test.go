package docs

import (
	"go/build"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/test/check"
)

// The diagram of packages in docs/design.md has all packages, and every import points to a lower line.
func TestPackageDiagram(t *testing.T) {
	_, section, _ := strings.Cut(read(t, "docs/design.md"), "\n## Packages")
	parts := strings.SplitN(section, "```", 3)
	if len(parts) < 3 {
		t.Fatal("docs/design.md has no diagram of packages")
	}
	line := map[string]int{}
	for i, text := range strings.Split(parts[1], "\n") {
		for _, name := range regexp.MustCompile(`\bpkg/\w+`).FindAllString(text, -1) {
			line[name] = i
		}
	}
	folders, err := filepath.Glob("../../pkg/*")
	check.Must(t, err)
	arrows := 0
	for _, folder := range folders {
		from := "pkg/" + filepath.Base(folder)
		if line[from] == 0 {
			t.Errorf("%s isn't in the diagram", from)
		}
		code, err := build.ImportDir(folder, 0)
		check.Must(t, err)
		for _, path := range code.Imports {
			to, ours := strings.CutPrefix(path, "github.com/gpushare/gpushare/")
			if !ours {
				continue
			}
			arrows++
			if line[to] <= line[from] {
				t.Errorf("%s imports %s, which isn't below it", from, to)
			}
		}
	}
	if len(line) != len(folders) || arrows < 20 {
		t.Errorf("%d packages in the diagram, %d exist, with %d imports", len(line), len(folders), arrows)
	}
}
