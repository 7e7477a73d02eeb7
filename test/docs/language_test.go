package docs

import (
	"fmt"
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

// language finds the phrases in a text. A phrase can go on in the next line, behind the marker of a comment.
type language struct {
	expressions []*regexp.Regexp
	// any matches what one of the expressions matches. Nearly no text does, and one expression takes less time than all.
	any *regexp.Regexp
}

func newLanguage() language {
	var l language
	var patterns []string
	for _, p := range phrases {
		pattern := strings.ReplaceAll(p.pattern, " ", `[\s/#*]+`)
		l.expressions = append(l.expressions, regexp.MustCompile(`(?i)\b(?:`+pattern+`)\b`))
		patterns = append(patterns, pattern)
	}
	l.any = regexp.MustCompile(`(?i)\b(?:` + strings.Join(patterns, "|") + `)\b`)
	return l
}

// find returns a message for each phrase in the text, sorted by line.
func (l language) find(name, text string) []string {
	if !l.any.MatchString(text) {
		return nil
	}
	type finding struct {
		line    int
		message string
	}
	var findings []finding
	for i, expression := range l.expressions {
		for _, at := range expression.FindAllStringIndex(text, -1) {
			line := 1 + strings.Count(text[:at[0]], "\n")
			findings = append(findings, finding{line, fmt.Sprintf("%s:%d: %q: write %q",
				name, line, strings.Join(strings.Fields(text[at[0]:at[1]]), " "), phrases[i].instead)})
		}
	}
	slices.SortStableFunc(findings, func(a, b finding) int { return a.line - b.line })
	var messages []string
	for _, f := range findings {
		messages = append(messages, f.message)
	}
	return messages
}

// The repository is written in plain technical English: comments, messages, test names, documents, chart and scripts.
func TestLanguage(t *testing.T) {
	l := newLanguage()
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
		for _, message := range l.find(name, string(text)) {
			t.Error(message)
		}
		return nil
	})
	check.Must(t, err)
	if files < 300 {
		t.Errorf("too few files: %d", files)
	}
}

func TestLanguageFind(t *testing.T) {
	text := "// Wait waits.\n// It says\n// whether anew is a word; renewed isn't.\nWhom"
	want := []string{
		`f.go:2: "says // whether": write "reports whether"`,
		`f.go:3: "anew": write "again"`,
		`f.go:4: "Whom": write "that, which, or name the user"`,
	}
	check.Equal(t, "the result", want, newLanguage().find("f.go", text))
}
