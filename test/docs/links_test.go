package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/gpushare/gpushare/test/check"
)

var (
	link    = regexp.MustCompile(`(?:\]\(|(?:href|src)=")([^)\s"]+)[)"]`)
	heading = regexp.MustCompile(`(?m)^#+ (.+)$`)
	fenced  = regexp.MustCompile("(?ms)^```.*?^```$")
)

// pages returns the paths of all Markdown pages.
func pages(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, pattern := range []string{"*.md", "docs/*.md"} {
		found, err := filepath.Glob(filepath.Join("..", "..", pattern))
		check.Must(t, err)
		for _, path := range found {
			name, err := filepath.Rel(filepath.Join("..", ".."), path)
			check.Must(t, err)
			out = append(out, name)
		}
	}
	if len(out) < 20 {
		t.Fatalf("found only %v", out)
	}
	return out
}

// anchors returns the anchors of a page's headings, as GitHub makes them.
func anchors(text string) []string {
	var out []string
	for _, h := range heading.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
		out = append(out, strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case unicode.IsLetter(r), unicode.IsDigit(r), r == '-', r == '_':
				return unicode.ToLower(r)
			}
			return -1
		}, h[1]))
	}
	return out
}

func TestLinks(t *testing.T) {
	links := 0
	for _, page := range pages(t) {
		for _, found := range link.FindAllStringSubmatch(read(t, page), -1) {
			target, anchor, _ := strings.Cut(found[1], "#")
			if strings.Contains(target, "://") {
				continue // External links are not checked.
			}
			links++
			file := page
			if target != "" {
				file = filepath.Join(filepath.Dir(page), target)
			}
			if _, err := os.Stat(filepath.Join("..", "..", file)); err != nil {
				t.Errorf("%s: the target of link %s doesn't exist", page, found[1])
				continue
			}
			if anchor != "" && !slices.Contains(anchors(read(t, file)), anchor) {
				t.Errorf("%s: %s has no heading %s", page, file, anchor)
			}
		}
	}
	if links < 60 {
		t.Errorf("too few links: %d", links)
	}
}

// What a page names in a file, as in "`Filter` in [filter.go](…)", is declared there.
func TestNamedCode(t *testing.T) {
	named, checked := regexp.MustCompile("`(\\w+)` in\\s+\\[[^]]+\\]\\(([^)#]+\\.go)\\)"), 0
	for _, page := range pages(t) {
		for _, found := range named.FindAllStringSubmatch(read(t, page), -1) {
			checked++
			declared := regexp.MustCompile(`(?m)^(func (\([^)]*\) )?|type )` + found[1] + `\b`)
			if !declared.MatchString(read(t, filepath.Join(filepath.Dir(page), found[2]))) {
				t.Errorf("%s: %s doesn't declare %s", page, found[2], found[1])
			}
		}
	}
	if checked < 30 {
		t.Errorf("too few names: %d", checked)
	}
}

// docs/README.md lists every page, grouped by kind of reader.
func TestIndexComplete(t *testing.T) {
	const index = "docs/README.md"
	text := read(t, index)
	for _, reader := range []string{"**You run pods", "**You run the cluster**", "**You work on gpushare**"} {
		if !strings.Contains(text, reader) {
			t.Errorf("%s has no section %s", index, strings.Trim(reader, "*"))
		}
	}
	for _, page := range pages(t) {
		if name, ok := strings.CutPrefix(page, "docs/"); ok && page != index && !strings.Contains(text, "]("+name+")") {
			t.Errorf("%s doesn't link to %s", index, page)
		}
	}
}
