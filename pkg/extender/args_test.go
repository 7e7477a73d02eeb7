package extender

import (
	"bytes"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/scheduling"
	"github.com/gpushare/gpushare/test/fake"
)

// lookalikes are bodies in which the list of names may not be what it looks like, or where.
var lookalikes = []string{
	`{"Pod":null,"NodeNames":["a","b"]}`,
	`{"NodeNames":[]}`,
	"{\"NodeNames\":[\"a\"]} \r\n\t",
	`{"NodeNames":["a",]}`,
	`{"NodeNames":["a" ,"b"]}`,
	`{"NodeNames":["a""b"]}`,
	`{"NodeNames":[,"a"]}`,
	`{"NodeNames":["a"]]}`,
	`{"NodeNames":["a"]}}`,
	`{"NodeNames":["a"],"NodeNames":["b"]}`,
	`{"nodenames":["a","c"],"NodeNames":["b"]}`,
	`{"NodeNames":["b"],"nodenames":["a","c"]}`,
	`{"NodeNames":null,"NodeNames":["b"]}`,
	`{"NodeNames":["a\"b","c\u0041","ü","` + "\xff" + `"]}`,
	`{"NodeNames":["a` + "\n" + `"]}`,
	`{"Pod":{"NodeNames":["a"]}`,
	`{"Pod":{"NodeNames":["a"]}}`,
	`{"Pod":{"metadata":{"name":"\"NodeNames\":[","NodeNames":["a"]}},"NodeNames":["b"]}`,
	`{"Pod":"x"NodeNames":["a"]}`,
	`{"Pod":","NodeNames":["a"]}`,
	`{"Pod":null,"\"NodeNames":["a"]}`,
	`{"Pod":7,"NodeNames":["a"]}`,
	`"NodeNames":["a"]}`,
	`["NodeNames":["a"]}`,
	`{"Pod":null "NodeNames":["a"]}`,
	`{,"NodeNames":["a"]}`,
	`{"NodeNames":[7]}`,
	`{"NodeNames":[`,
	`{"NodeNames":["`,
	`{"NodeNames":["a"`,
}

func FuzzNodesArgs(f *testing.F) {
	for _, body := range lookalikes {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		var want extenderv1.ExtenderArgs
		wantErr := decodeJSON(slices.Clone(body), &want)
		var got nodesArgs
		gotErr := got.decode(slices.Clone(body))
		if (gotErr == nil) != (wantErr == nil) {
			t.Fatalf("error %v, want %v", gotErr, wantErr)
		}
		if diff := cmp.Diff(want, got.ExtenderArgs); wantErr == nil && diff != "" {
			t.Errorf("(-encoding/json +got):\n%s", diff)
		}
	})
}

// Bodies in kube-scheduler's form are decoded the fast way.
func TestSplitNames(t *testing.T) {
	rest, got, found := splitNames([]byte(text(t, nodesRequest(fake.Pod("p", 1), "n1", "n2"))))
	if !found || !slices.Equal(got, []string{"n1", "n2"}) || !bytes.HasSuffix(rest, []byte(`"NodeNames":[]}`)) {
		t.Errorf("names %q, found %v, rest %s", got, found, rest)
	}
}

// A later request can be read into the buffer of an earlier one. The names of the earlier request don't change.
func TestNamesOutliveTheBuffer(t *testing.T) {
	var first []string
	h := newServer(&fakeScheduler{filter: func(nodes []string) scheduling.FilterResult {
		if first == nil {
			first = nodes
		}
		return scheduling.FilterResult{Nodes: nodes}
	}}).Handler()
	for _, name := range []string{"first", "later"} {
		post(h, "filter", text(t, nodesRequest(fake.Pod("p", 1), name)))
	}
	if !slices.Equal(first, []string{"first"}) {
		t.Errorf("the first request's names are now %q", first)
	}
}
