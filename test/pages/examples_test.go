package pages

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestExamples(t *testing.T) {
	const page = "# Page\n\nDo this:\n\n    kubectl apply -f x    # a comment\n    sed s/a/b/ y |\\\n      kubectl apply -f -\n    helm install x\n\n" +
		"```yaml\nlimits: {}\n```\n```yaml\napiVersion: v1\nkind: Pod\n```\n" +
		"    $ kubectl get pods\n    NAME\n\n    p\n\nText\n    kubectl that continues a paragraph\n\n    curl x\n    not an output\n"
	want := []Example{
		{Command: "kubectl apply -f x    # a comment"}, {Command: "sed s/a/b/ y |\\\n  kubectl apply -f -"}, {Object: "apiVersion: v1\nkind: Pod"},
		{Command: "kubectl get pods", Output: []string{"NAME", "p"}}, {Command: "curl x"},
	}
	if diff := cmp.Diff(want, examples(page)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	all, err := OfUsers()
	if err != nil || len(all) < 25 {
		t.Errorf("%d examples in the pages for users: %v", len(all), err)
	}
}
