package pages

import (
	"strings"
	"testing"

	"github.com/gpushare/gpushare/test/check"
)

func TestExamples(t *testing.T) {
	const page = "# Page\n\nDo this:\n\n    kubectl apply -f x    # a comment\n    sed s/a/b/ y |\\\n      kubectl apply -f -\n    helm install x\n\n" +
		"```yaml\nlimits: {}\n```\n```yaml\napiVersion: v1\nkind: Pod\n```\n" +
		"    $ kubectl get pods\n    NAME\n\n    p\n\nText\n    kubectl that continues a paragraph\n\n    curl x\n    not an output\n"
	want := []Example{
		{Command: "kubectl apply -f x    # a comment"}, {Command: "sed s/a/b/ y |\\\n  kubectl apply -f -", Ignored: []string{"helm install x"}}, {Object: "apiVersion: v1\nkind: Pod"},
		{Command: "kubectl get pods", Output: []string{"NAME", "p"}}, {Command: "curl x", Ignored: []string{"not an output"}},
	}
	check.Equal(t, "the result", want, examples(page))
}

// TestUserPages: what a page shows as the output of a command is compared with it, and the demo runs each command but one that needs a real node.
func TestUserPages(t *testing.T) {
	all, err := OfUsers()
	if err != nil || len(all) < 25 {
		t.Errorf("%d examples in the pages for users: %v", len(all), err)
	}
	for _, example := range all {
		if len(example.Ignored) > 0 {
			t.Errorf("%s: nothing compares %q: write \"$ \" before the command", example.Command, example.Ignored)
		}
		if strings.Contains(example.Command, "not in the demo") && !strings.Contains(example.Command, "--usage") {
			t.Errorf("%s: only what needs a real node is marked", example.Command)
		}
	}
}
