package protocol

import (
	"strings"
	"testing"
)

func TestShorten(t *testing.T) {
	for name, tc := range map[string]struct{ text, want string }{
		"empty":                          {"", ""},
		"as long as allowed":             {strings.Repeat("a", MaxText), strings.Repeat("a", MaxText)},
		"too long":                       {strings.Repeat("a", MaxText+1), strings.Repeat("a", MaxText-3) + "…"},
		"no letter is cut in the middle": {strings.Repeat("ä", MaxText), strings.Repeat("ä", (MaxText-3)/2) + "…"},
	} {
		expect(t, name, tc.want, Shorten(tc.text))
	}
}
