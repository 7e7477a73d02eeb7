package docs

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/test/check"
)

// phrases are patterns that are not plain technical English, with what to write instead. They match whole words in any
// case, also over a line break in a comment.
var phrases = []struct{ pattern, instead string }{
	{`anew`, "again"},
	{`whoever|whom`, "that, which, or name the user"},
	{`who (?:asks?|comes?|fits?|gives?|has|have|holds?|is|leaves?|owns?|sits?|uses?|waits?|wins)`, "that, which: pods, nodes and programs are it"},
	{`nobody|everybody|somebody|anybody`, "no pod, all users, ...: name the thing"},
	{`says? whether|tells? whether`, "reports whether"},
	{`(?:is|are|was|were|be|been|being) told`, "is reported, receives"},
	{`looked at`, "checked, read"},
	{`(?:put|set) aside`, "parked, reserved"},
	{`comes? to nothing`, "fails, has no effect"},
	{`in turns`, "alternately"},
	{`on offer`, "candidate, available"},
	{`in vain`, "without success, timed out"},
	{`the ledger stands`, "the cache is synced"},
	{`sits? on (?:it|them|a card|the card)`, "uses the card"},
	{`whose bind was refused`, "a rejected pod"},
	{`is of a build before`, "was measured on an earlier build"},
	{`is no time to wait`, "must be positive, got"},
}

// checkedFiles matches the names of the files to check: code, comments, documents, configuration.
var checkedFiles = regexp.MustCompile(`\.(go|md|sh|ya?ml|tpl|txt|html|js|css|c|h)$|^(Makefile|Dockerfile\..+)$|/NOTES`)

// skippedFolders have no text of this project, or text in a fixed format.
var skippedFolders = []string{".git", "bin", "testdata", "node_modules", "shared"}

// avoided returns an expression for all phrases, and what to write instead of each. A phrase can go on in the next line, behind the marker of a
// comment.
func avoided() (expression *regexp.Regexp, instead []string) {
	var patterns []string
	for _, p := range phrases {
		patterns = append(patterns, "("+strings.ReplaceAll(p.pattern, " ", `[\s/#*]+`)+")")
		instead = append(instead, p.instead)
	}
	return regexp.MustCompile(`(?i)\b(?:` + strings.Join(patterns, "|") + `)\b`), instead
}

// The repository is written in plain technical English: comments, messages, test names, documents, chart and scripts.
func TestLanguage(t *testing.T) {
	expression, instead := avoided()
	files := 0
	root := filepath.Join("..", "..")
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if slices.Contains(skippedFolders, entry.Name()) {
				return filepath.SkipDir
			}
			return nil
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if !checkedFiles.MatchString(entry.Name()) || name == filepath.Join("test", "docs", "language_test.go") {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		files++
		for _, at := range expression.FindAllSubmatchIndex(text, -1) {
			for i := range instead {
				if at[2*i+2] >= 0 {
					t.Errorf("%s:%d: %q: write %q", name, 1+bytes.Count(text[:at[0]], []byte("\n")), text[at[0]:at[1]], instead[i])
				}
			}
		}
		return nil
	})
	check.Must(t, err)
	if files < 300 {
		t.Errorf("too few files: %d", files)
	}
}
