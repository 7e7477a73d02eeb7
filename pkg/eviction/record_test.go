package eviction

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The record's text is the same for all versions: during a rollout, extenders of two versions read what the other one has written.
func TestRecordFormat(t *testing.T) {
	const waitsText = `"for":{"namespace":"alice","name":"w","uid":"1"}`
	const text = `[{"cause":"share","for":[{"namespace":"alice","name":"w","uid":"1","node":"n1","cards":[0,3]}],` +
		`"victims":[{"pods":[{"namespace":"bob","name":"v1","uid":"2"},{"namespace":"bob","name":"v2","uid":"3"}],` + waitsText + `}]}]`
	const ofTwo = `[{"cause":"share","for":[{"namespace":"alice","name":"w","uid":"1","node":"n1","cards":[0,3]},` +
		`{"namespace":"alice","name":"x","uid":"4","node":"n2","cards":[0]}],` +
		`"victims":[{"pods":[{"namespace":"bob","name":"v1","uid":"2"}],` + waitsText + `},` +
		`{"pods":[{"namespace":"bob","name":"v2","uid":"3"}],"for":{"namespace":"alice","name":"x","uid":"4"}}]}]`
	waits := PodID{Namespace: "alice", Name: "w", UID: "1"}
	want := []Round{{
		Cause: ByShare, For: []Waiting{{waits, "n1", []int{0, 3}}},
		Victims: []Victim{{
			Pods: []PodID{{Namespace: "bob", Name: "v1", UID: "2"}, {Namespace: "bob", Name: "v2", UID: "3"}}, For: waits,
			What: "Evicted after others", Why: ", of which a former leader of the extender began the evictions",
		}},
	}}
	for name, text := range map[string]string{
		"as it is written": text,
		"without the pods that the victims are for, as earlier builds write it": strings.ReplaceAll(text, ","+waitsText, ""),
		"of an earlier build": `[{"Cause":"share","For":[{"UID":"1","Namespace":"alice","Name":"w","Request":16,"Leaving":false,"Node":"n1","Cards":[0,3]}],` +
			`"Victims":[{"Pods":[{"UID":"2","Namespace":"bob","Name":"v1","Request":4},{"UID":"3","Namespace":"bob","Name":"v2","Cards":2}]}]}]`,
		"with fields of a later one":   `[{"later":1,` + text[2:],
		"with rounds that aren't ones": `[{},{"for":[{"uid":"1"}]},` + text[1:],
	} {
		got, err := decodeRounds(text)
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("%s: %v (-want +got):\n%s", name, err, diff)
		}
	}
	if got, err := encodeRounds(want); got != text || err != nil {
		t.Errorf("written as %s, %v", got, err)
	}
	want, err := decodeRounds(ofTwo)
	if err != nil || want[0].Victims[0].For != waits || want[0].Victims[1].For != want[0].For[1].PodID {
		t.Errorf("of two pods: read as %v, %v", want, err)
	}
	if got, err := encodeRounds(want); got != ofTwo || err != nil {
		t.Errorf("of two pods: written as %s, %v", got, err)
	}
}
