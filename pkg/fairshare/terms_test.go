package fairshare

import (
	"strconv"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
)

func TestParseTerms(t *testing.T) {
	for text, want := range map[string]struct {
		weight     int64
		guaranteed gpu.Memory
	}{
		"1": {1, 1}, "12": {12, 12}, "1000000": {1_000_000, 1_000_000}, "0": {-1, 0}, "1000001": {-1, 1_000_001},
		"1099511627776": {-1, 1 << 40}, "1099511627777": {-1, -1}, "": {-1, -1}, "-1": {-1, -1}, "2Gi": {-1, -1}, "1.5": {-1, -1},
		" 1": {-1, -1}, "9223372036854775808": {-1, -1},
	} {
		if weight, err := ParseWeight(text); (err == nil) != (want.weight >= 0) || err == nil && weight != want.weight {
			t.Errorf("weight %q: %d, %v", text, weight, err)
		}
		if amount, err := ParseGuaranteed(text); (err == nil) != (want.guaranteed >= 0) || err == nil && amount != want.guaranteed {
			t.Errorf("guaranteed %q: %d, %v", text, amount, err)
		}
	}
}

// FuzzParseTerms checks that every accepted text is the number that it says, and that shares can be computed from it.
func FuzzParseTerms(f *testing.F) {
	f.Add("1", "0")
	f.Add("1000000", "1099511627776")
	f.Add("007", "+3")
	f.Fuzz(func(t *testing.T, weight, guaranteed string) {
		terms := DefaultTerms
		if parsed, err := ParseWeight(weight); err == nil {
			if terms.Weight = parsed; parsed < 1 || parsed > MaxWeight || strings.TrimLeft(strings.TrimPrefix(weight, "+"), "0") != strconv.FormatInt(parsed, 10) {
				t.Fatalf("weight %q is read as %d", weight, parsed)
			}
		}
		if parsed, err := ParseGuaranteed(guaranteed); err == nil {
			if terms.Guaranteed = parsed; parsed < 0 || parsed > MaxGuaranteed {
				t.Fatalf("guaranteed amount %q is read as %d", guaranteed, parsed)
			}
		}
		shares := Shares(1000, []Tenant{{terms, "a", 800}, {DefaultTerms, "b", 800}})
		if shares[0]+shares[1] != 1000 || shares[0] > 800 || shares[1] > 800 {
			t.Fatalf("%v: shares %v", terms, shares)
		}
	})
}
