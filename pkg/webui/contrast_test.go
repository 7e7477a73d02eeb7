package webui

import (
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/test/check"
)

// TestContrast computes the contrast of colours that are beside each other on the page, in both themes, by WCAG 2.2
// (https://www.w3.org/TR/WCAG22/, relative luminance and contrast ratio): at least 4.5 for text (1.4.3) and 3 for everything
// else (1.4.11).
func TestContrast(t *testing.T) {
	const text, other = 4.5, 3
	grounds := []string{"sheet", "ground", "faint"}
	segments := []string{"t0", "t1", "t2", "t3", "t4", "t5", "t6", "t7"}
	neighbours := []struct {
		what       string
		of, beside []string
		least      float64
	}{
		{"text and links", []string{"text", "dim", "accent", "warn"}, grounds, text},
		{"the badge of a standby replica", []string{"warn"}, []string{"warn-ground"}, text},
		{"the selected tab", []string{"sheet"}, []string{"accent"}, text},
		{"the chips of causes and phases: wait, lack, wrong, good", []string{"accent", "lack", "warn", "good"}, []string{"sheet", "faint"}, text},
		{"outlines of bars and controls, stripes of closed nodes, the mark of the focus", []string{"edge", "focus"}, grounds, other},
		{"the mark of the connection", []string{"good", "warn", "edge"}, []string{"sheet"}, other},
		{"stripes and limit of a card with a problem", []string{"warn"}, []string{"faint"}, other},
		// A line in the colour of the sheet separates the segments of a bar from each other.
		{"pods in a bar and in lists", segments, []string{"sheet", "faint"}, other},
		{"parts of the memory and of the chart", []string{"allocated", "pieces", "whole", "out"}, []string{"sheet", "faint"}, other},
		{"neighbouring parts of the memory and of the chart", []string{"pieces"}, []string{"allocated", "whole"}, other},
		{"memory out of use", []string{"out"}, []string{"whole"}, other},
	}
	root, rules := styleSheet(t)
	colours := map[string][2]string{}
	for _, m := range regexp.MustCompile(`--([a-z0-9-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);`).FindAllStringSubmatch(root, -1) {
		colours[m[1]] = [2]string{m[2], m[3]}
	}
	unchecked := maps.Clone(colours)
	delete(unchecked, "line") // It only decorates: what it separates has other marks.
	for _, n := range neighbours {
		for _, a := range n.of {
			for _, b := range n.beside {
				delete(unchecked, a)
				delete(unchecked, b)
				for theme, name := range []string{"light", "dark"} {
					if got := contrast(t, colours[a][theme], colours[b][theme]); got < n.least {
						t.Errorf("%s, %s: %s beside %s has a contrast of %.2f, want %v", n.what, name, a, b, got, n.least)
					}
				}
			}
		}
	}
	if len(unchecked) > 0 {
		t.Errorf("colours without a neighbour in this test: %q", slices.Sorted(maps.Keys(unchecked)))
	}
	// What would make other colours than those of :root.
	if found := regexp.MustCompile(`#[0-9a-f]{3,8}\b[^{]*;|rgb\(|hsl\(|color-mix|opacity|brightness`).FindString(rules); found != "" {
		t.Errorf("the rules have a colour of their own: %q", found)
	}
}

// styleSheet returns the rule of :root, which has the colours, and the other rules.
func styleSheet(t *testing.T) (root, rules string) {
	t.Helper()
	sheet, err := assets.ReadFile("assets/style.css")
	check.Must(t, err)
	root, rules, found := strings.Cut(string(sheet), "}\n")
	if !found || !strings.Contains(root, ":root {") {
		t.Fatal("the style sheet doesn't begin with :root")
	}
	return root, rules
}

// contrast returns the contrast ratio of two colours like "#1b2027".
func contrast(t *testing.T, a, b string) float64 {
	t.Helper()
	x, y := luminance(t, a)+0.05, luminance(t, b)+0.05
	return max(x, y) / min(x, y)
}

func luminance(t *testing.T, colour string) (sum float64) {
	t.Helper()
	if len(colour) != len("#rrggbb") {
		t.Fatalf("colour %q", colour)
	}
	for i, weight := range []float64{0.2126, 0.7152, 0.0722} {
		n, err := strconv.ParseUint(colour[1+2*i:3+2*i], 16, 8)
		if err != nil {
			t.Fatalf("colour %q: %v", colour, err)
		}
		c := float64(n) / 255
		if c <= 0.04045 {
			sum += weight * c / 12.92
		} else {
			sum += weight * math.Pow((c+0.055)/1.055, 2.4)
		}
	}
	return sum
}
