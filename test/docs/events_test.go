package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
)

// eventConstants returns the string constants whose names start with "event", the reasons of Events, by folder and
// name. calls are the reasons that are passed to an event recorder.
func eventConstants(t *testing.T) (reasons map[string]string, calls []string) {
	t.Helper()
	reasons = map[string]string{}
	files := token.NewFileSet()
	err := filepath.WalkDir("../../pkg", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		file, err := parser.ParseFile(files, path, nil, 0)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(node ast.Node) bool {
			switch n := node.(type) {
			case *ast.ValueSpec:
				for i, name := range n.Names {
					if !strings.HasPrefix(strings.ToLower(name.Name), "event") || i >= len(n.Values) {
						continue
					}
					if literal, ok := n.Values[i].(*ast.BasicLit); ok && literal.Kind == token.STRING {
						reasons[filepath.Dir(path)+"."+name.Name], _ = strconv.Unquote(literal.Value)
					}
				}
			case *ast.CallExpr:
				// Event(object, type, reason, …) and Eventf. Reasons from another package are not checked.
				if f, ok := n.Fun.(*ast.SelectorExpr); ok && strings.HasPrefix(f.Sel.Name, "Event") && len(n.Args) > 3 {
					switch reason := n.Args[2].(type) {
					case *ast.Ident:
						calls = append(calls, filepath.Dir(path)+"."+reason.Name)
					case *ast.SelectorExpr:
					default:
						t.Errorf("%s: the reason of an Event is not a constant", files.Position(n.Pos()))
					}
				}
			}
			return true
		})
		return nil
	})
	check.Must(t, err)
	return reasons, calls
}

func TestEventsDocumented(t *testing.T) {
	constants, calls := eventConstants(t)
	if len(constants) < 8 || len(calls) < 4 {
		t.Fatalf("too few reasons: constants %v, used %v", constants, calls)
	}
	inCode := map[string]bool{}
	for _, reason := range constants {
		inCode[reason] = true
	}
	for _, name := range calls {
		if _, known := constants[name]; !known {
			t.Errorf("the reason %s of an Event is not a constant whose name starts with event", name)
		}
	}
	onPage := map[string]bool{}
	for _, row := range regexp.MustCompile("(?m)^\\| `((?:GPU|Gang|FairShare)\\w+)` \\|").FindAllStringSubmatch(read(t, "docs/events.md"), -1) {
		onPage[row[1]] = true
	}
	if diff := cmp.Diff(inCode, onPage); diff != "" {
		t.Errorf("reasons of Events (-code +docs/events.md):\n%s", diff)
	}
}

func TestReasonsDocumented(t *testing.T) {
	page := read(t, "docs/events.md")
	section, _, _ := strings.Cut(page[strings.Index(page, "## Why a pod is not scheduled"):], "\n## Events")
	var onPage []string
	for _, row := range regexp.MustCompile(`(?m)^\| ([^|]+) \| [^|]+ \| [^|]+ \|$`).FindAllStringSubmatch(section, -1) {
		onPage = append(onPage, row[1])
	}
	for _, reason := range reasons.OfNodes() {
		if !slices.Contains(onPage, reason.Text()) {
			t.Errorf("docs/events.md doesn't explain %q", reason.Text())
		}
	}
	if !slices.Contains(onPage, reasons.AwaitsTurn) {
		t.Errorf("docs/events.md doesn't explain %q", reasons.AwaitsTurn)
	}
	// Other allowed rows: the table's header, the gang reasons, and kube-scheduler's own messages.
	for _, row := range onPage {
		ours := slices.ContainsFunc(reasons.OfNodes(), func(r reasons.Reason) bool { return r.Text() == row })
		if !ours && row != "reason" && row != "---" && row != "gang: …" && row != reasons.AwaitsTurn && !strings.HasPrefix(row, "Insufficient ") {
			t.Errorf("docs/events.md explains %q, which is not a reason", row)
		}
	}
}

// The page on pending pods explains each reason, and the page of metrics lists it.
func TestCausesDocumented(t *testing.T) {
	var causes []string
	for _, reason := range reasons.OfPods() {
		causes = append(causes, reason.String())
	}
	slices.Sort(causes)
	_, section, _ := strings.Cut(read(t, "docs/inspect.md"), "\n## Why pods wait")
	section, _, _ = strings.Cut(section, "\n## ")
	row := regexp.MustCompile("(?m)^\\| `gpushare_extender_pending_pods` .*").FindString(read(t, "docs/metrics.md"))
	_, row, _ = strings.Cut(row, "`reason`")
	row, _, _ = strings.Cut(row, " |")
	for page, found := range map[string][][]string{
		"inspect.md": regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\|").FindAllStringSubmatch(section, -1),
		"metrics.md": backquoted.FindAllStringSubmatch(row, -1),
	} {
		var documented []string
		for _, match := range found {
			documented = append(documented, match[1])
		}
		slices.Sort(documented)
		if diff := cmp.Diff(causes, documented); diff != "" {
			t.Errorf("causes of pending pods (-code +docs/%s):\n%s", page, diff)
		}
	}
}

// The pages about groups and fair sharing explain each of their options, annotations, labels and Events, and docs/events.md each reason.
func TestGroupsAndSharesDocumented(t *testing.T) {
	explains := func(page, what string, texts ...string) {
		t.Helper()
		for _, text := range texts {
			if !strings.Contains(page, text) {
				t.Errorf("no page explains the %s %q", what, text)
			}
		}
	}
	all := func(pattern, file string) (found []string) {
		for _, match := range regexp.MustCompile(pattern).FindAllStringSubmatch(read(t, file), -1) {
			found = append(found, match[1])
		}
		return found
	}
	pages := read(t, "docs/gangs.md") + read(t, "docs/fair-share.md")
	flags := all(`Var\([^,"]+, "((?:gang|fair-share|reservation|native)[a-z-]*)"`, "cmd/gpushare-extender/options.go")
	names := slices.Concat(all(`(?m)^\s+(?:Annotation|Label|label)\w+\s+= "([^"]+)"`, "pkg/protocol/group.go"), all(`"(gpushare.aliyun.com/(?:group|fair)-[^"]+)"`, "pkg/protocol/names.go"))
	if len(flags) < 12 || len(names) < 9 {
		t.Fatalf("too few flags or names: %q, %q", flags, names)
	}
	for _, flag := range flags {
		explains(pages, "option", "`--"+flag+"`")
	}
	for _, name := range names {
		domain, key, _ := strings.Cut(name, "/")
		explains(pages, "annotation or label", domain, key) // Of two names of one domain the second one is written "…/key".
	}
	constants, _ := eventConstants(t)
	for _, event := range constants {
		if strings.HasPrefix(event, "Gang") || strings.HasPrefix(event, "FairShare") {
			explains(pages, "Event", "`"+event+"`")
		}
	}
	_, section, _ := strings.Cut(read(t, "docs/events.md"), "\n### What a group or a turn waits for")
	for _, reason := range append(reasons.Groups(), reasons.GroupIncomplete(3, 4), reasons.GroupCardless(4), reasons.GroupArriving(2, 4), reasons.GroupBroken(1, 4), reasons.GroupInvalid("…")) {
		explains(section, "reason", reason.Words)
	}
	for _, obstacle := range reasons.Obstacles() {
		explains(section, "reason", obstacle.String())
	}
}
