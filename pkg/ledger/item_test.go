package ledger_test

import (
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/ledger"
)

// TestOrder: which of two items comes first.
func TestOrder(t *testing.T) {
	early, late := time.Unix(100, 0), time.Unix(200, 0)
	for name, pair := range map[string][2]ledger.Item{
		"what a broken run needs, before important items": {{CompletesGroup: true, Entered: late}, {Priority: 9, Entered: early}},
		"items that need no turn, before important ones":  {{Entered: late}, {ByTurn: true, Priority: 9, Entered: early}},
		"important items before old ones":                 {{Priority: 1, Entered: late}, {Entered: early}},
		"old ones":                                        {{Entered: early, ID: "b"}, {Entered: late, ID: "a"}},
		"by ID":                                           {{ID: "a"}, {ID: "b"}},
		"of two broken ones the more important":           {{CompletesGroup: true, Priority: 1, Entered: late}, {CompletesGroup: true, Entered: early}},
	} {
		first, second := pair[0], pair[1]
		if !first.Before(&second) || second.Before(&first) || first.Compare(&first) != 0 {
			t.Errorf("%s: not so", name)
		}
	}
}
