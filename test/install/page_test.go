package install

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

const page = "docs/install.md"

func readYAML(t *testing.T, path string) (out map[string]any) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(repository(t), path))
	must(t, err)
	must(t, yaml.Unmarshal(data, &out))
	return out
}

var quoted = regexp.MustCompile("`([^`]+)`")

// TestValuesTable: each value in the page's table exists in the chart and has the default that the table shows.
func TestValuesTable(t *testing.T) {
	values := readYAML(t, chart+"/values.yaml")
	text, err := os.ReadFile(filepath.Join(repository(t), page))
	must(t, err)
	_, section, _ := strings.Cut(string(text), "\n## Values\n")
	section, _, _ = strings.Cut(section, "\n## ")
	checked := 0
	for line := range strings.Lines(section) {
		cells := strings.Split(line, "|")
		if len(cells) < 4 || !strings.Contains(cells[1], "`") {
			continue
		}
		before := ""
		defaults := quoted.FindAllStringSubmatch(cells[2], -1)
		for i, match := range quoted.FindAllStringSubmatch(cells[1], -1) {
			name := strings.TrimSuffix(match[1], ".*")
			if strings.HasPrefix(name, ".") { // a sibling of the previous value
				name = before[:strings.LastIndex(before, ".")] + name
			}
			before = name
			value, found := valueAt(values, name)
			if !found {
				t.Errorf("the chart has no value %s", name)
				continue
			}
			checked++
			if _, group := value.(map[string]any); group || len(defaults) == 0 {
				continue
			}
			want := defaults[min(i, len(defaults)-1)][1]
			if i >= len(defaults) && strings.Contains(cells[2], "none") {
				want = ""
			}
			if got := fmt.Sprint(value); got != want {
				t.Errorf("%s is %q by default, the page has %q", name, got, want)
			}
		}
	}
	if checked < 25 {
		t.Errorf("only %d values are in the table", checked)
	}
}

func valueAt(values map[string]any, name string) (value any, found bool) {
	value = values
	for key := range strings.SplitSeq(name, ".") {
		group, ok := value.(map[string]any)
		if !ok {
			return nil, false
		}
		if value, found = group[key]; !found {
			return nil, false
		}
	}
	return value, true
}
