package extender

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/placement"
)

// lookalikes are bodies in which the list of names isn't what or where it seems to be.
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

func TestWhatKubeSchedulerSendsIsReadTheShortWay(t *testing.T) {
	body, err := json.Marshal(extenderv1.ExtenderArgs{Pod: newPod("p", 1), NodeNames: names("n1", "n2")})
	if err != nil {
		t.Fatal(err)
	}
	rest, got, found := splitNames(body)
	if !found || !slices.Equal(got, []string{"n1", "n2"}) || !bytes.HasSuffix(rest, []byte(`"NodeNames":[]}`)) {
		t.Errorf("names %q, found %v, and what stays is %s", got, found, rest)
	}
}

func TestAnswersAreWrittenAsEncodingJSONWritesThem(t *testing.T) {
	odd := []string{"n1", "", `quoted "n2"`, `n\3`, "n\n4", "<&>", "nü5", "\xff", "\u2028", "n\x7f6"}
	args := nodesArgs{extenderv1.ExtenderArgs{NodeNames: &odd}}
	reasons := make([]placement.Reason, len(odd))
	for i := range reasons {
		reasons[i] = placement.Reason(i % (len(placement.Reasons()) + 1))
	}
	for name, answer := range map[string]filterAnswer{
		"nothing":      {},
		"every node":   {names: odd, fit: everyNode(odd)},
		"some":         {names: odd, fit: []placement.Candidate{{Node: 2}, {Node: 0}}},
		"with reasons": {names: odd, fit: []placement.Candidate{{Node: 0}}, reasons: reasons},
		"nothing fits": {names: odd[:2], reasons: []placement.Reason{placement.Full, placement.Full}},
	} {
		t.Run(name, func(t *testing.T) {
			want := extenderv1.ExtenderFilterResult{NodeNames: &[]string{}}
			for _, candidate := range answer.fit {
				*want.NodeNames = append(*want.NodeNames, odd[candidate.Node])
			}
			if answer.reasons != nil {
				want.FailedNodes, want.FailedAndUnresolvableNodes = extenderv1.FailedNodesMap{}, extenderv1.FailedNodesMap{}
			}
			for i, reason := range answer.reasons {
				switch {
				case reason.Unresolvable():
					want.FailedAndUnresolvableNodes[odd[i]] = reason.String()
				case reason != placement.Fits:
					want.FailedNodes[odd[i]] = reason.String()
				}
			}
			var again, got extenderv1.ExtenderFilterResult
			roundTrip(t, want, &again)
			if err := json.Unmarshal(args.answer(answer).(filterAnswer).appendJSON(nil), &got); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(again, got); diff != "" {
				t.Errorf("(-encoding/json +got):\n%s", diff)
			}
		})
	}
}

func roundTrip(t *testing.T, in, out any) {
	t.Helper()
	body, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(body, out); err != nil {
		t.Fatal(fmt.Errorf("%s: %w", body, err))
	}
}
