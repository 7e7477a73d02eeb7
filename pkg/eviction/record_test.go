package eviction

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// The record's text is the same for all versions: during a rollout, extenders of two versions read what the other one has written.
func TestRecordFormat(t *testing.T) {
	const text = `[{"pods":[{"namespace":"bob","name":"v1","uid":"2"},{"namespace":"bob","name":"v2","uid":"3"}],` +
		`"for":{"namespace":"alice","name":"w","uid":"1"},"cause":"share","began":"2026-07-01T12:00:00Z"}]`
	want := []*group{{
		Victim: Victim{
			Pods: []PodID{{Namespace: "bob", Name: "v1", UID: "2"}, {Namespace: "bob", Name: "v2", UID: "3"}},
			For:  PodID{Namespace: "alice", Name: "w", UID: "1"}, Cause: ByShare,
		},
		Began: begin,
	}}
	for name, text := range map[string]string{
		"as it is written":             text,
		"with fields of a later one":   `[{"later":1,` + text[2:],
		"with groups that aren't ones": `[{},null,` + text[1:],
	} {
		got, err := decodeGroups(text)
		if diff := cmp.Diff(want, got, cmpopts.IgnoreUnexported(group{})); diff != "" || err != nil {
			t.Errorf("%s: %v (-want +got):\n%s", name, err, diff)
		}
	}
	if got, err := json.Marshal(want); string(got) != text || err != nil {
		t.Errorf("written as %s, %v", got, err)
	}
}
