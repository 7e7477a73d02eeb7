package inventory

import "testing"

// TestParseReason: the reason of a card with a Xid has its cause and its state, except whether it fails at the moment.
func TestParseReason(t *testing.T) {
	for state := healthy; int(state) < len(transitions); state++ {
		for _, why := range []cause{{"Xid 48", 48}, {"Xid 48" + reasonUnnamed, 48}} {
			want := state
			switch state {
			case healthy:
				why.text, why.xid = "", 0
			case failing:
				want = recovering
			}
			got, gotState := parseReason((&entry{health: state, cause: why}).reason())
			if got != why || gotState != want {
				t.Errorf("state %d with %+v: got %d with %+v", state, why, gotState, got)
			}
		}
	}
	for _, reason := range []string{"", "Xid", "Xid x", reasonNotReported} {
		if _, state := parseReason(reason); state != healthy {
			t.Errorf("%q was taken for a Xid", reason)
		}
	}
}
