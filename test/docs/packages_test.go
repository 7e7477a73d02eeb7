package docs

import (
	"go/build"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The picture of the packages has all of them, and every import leads from one line to a lower one.
func TestArrowsPointDownInThePicture(t *testing.T) {
	_, section, _ := strings.Cut(read(t, "docs/design.md"), "\n## Packages")
	parts := strings.SplitN(section, "```", 3)
	if len(parts) < 3 {
		t.Fatal("docs/design.md has no picture of the packages")
	}
	line := map[string]int{}
	for i, text := range strings.Split(parts[1], "\n") {
		for _, name := range regexp.MustCompile(`\bpkg/\w+`).FindAllString(text, -1) {
			line[name] = i
		}
	}
	folders, err := filepath.Glob("../../pkg/*")
	if err != nil {
		t.Fatal(err)
	}
	arrows := 0
	for _, folder := range folders {
		from := "pkg/" + filepath.Base(folder)
		if line[from] == 0 {
			t.Errorf("%s isn't in the picture", from)
		}
		code, err := build.ImportDir(folder, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range code.Imports {
			to, ours := strings.CutPrefix(path, "github.com/gpushare/gpushare/")
			if !ours {
				continue
			}
			arrows++
			if line[to] <= line[from] {
				t.Errorf("%s imports %s, which doesn't stand below it", from, to)
			}
		}
	}
	if len(line) != len(folders) || arrows < 20 {
		t.Errorf("%d packages are drawn, %d exist, with %d arrows", len(line), len(folders), arrows)
	}
}
