package inventory

import (
	"fmt"
	"slices"
	"testing"

	"github.com/gpushare/gpushare/test/check"
)

// TestXidChecks: the lists have the same meaning as in NVIDIA's device plugin.
func TestXidChecks(t *testing.T) {
	for name, test := range map[string]struct {
		disable, enable string
		count, ignore   []xid
		malformed       []string
	}{
		"no lists":                                 {count: []xid{48, 79, 94}, ignore: []xid{13, 31, 43, 45, 68, 109}},
		"some disabled":                            {disable: "48, 79", count: []xid{94}, ignore: []xid{13, 48, 79}},
		"all disabled":                             {disable: "all", ignore: []xid{13, 48, 79}},
		"all disabled, by the other word":          {disable: "12,XIDs", ignore: []xid{13, 48, 79}},
		"all disabled but some":                    {disable: "all", enable: "79,13", count: []xid{13, 79}, ignore: []xid{31, 48}},
		"enabled wins over disabled":               {disable: "48,79", enable: "79,31", count: []xid{31, 79, 94}, ignore: []xid{13, 48}},
		"all enabled":                              {disable: "48,all", enable: "all", count: []xid{13, 31, 48, 79}},
		"words that are not numbers are ignored":   {disable: "48,-1,x,,0x4f", count: []xid{79}, ignore: []xid{48}, malformed: []string{"-1", "x", "0x4f"}},
		"an application Xid that is also disabled": {disable: "13", count: []xid{48}, ignore: []xid{13, 31}},
	} {
		disabled, malformed := ParseXids(test.disable)
		enabled, _ := ParseXids(test.enable)
		checks := XidChecks{Disabled: disabled, Enabled: enabled}
		expect(t, name+": malformed", test.malformed, malformed)
		for _, x := range slices.Concat(test.count, test.ignore) {
			expect(t, fmt.Sprintf("%s: %s counts", name, x), slices.Contains(test.count, x), checks.count(x))
		}
	}
}

func TestParseCardMemory(t *testing.T) {
	type want struct {
		text           string
		a, b, reported uint64
	}
	for _, test := range []want{
		{text: ""},
		{text: "", a: 7, b: 7, reported: 7},
		{text: "96Gi", a: 96 << 30, b: 96 << 30},
		{text: "96Gi", a: 1 << 30, b: 1 << 30, reported: 1 << 30},
		{text: "GPU-a=96Gi, GPU-z=1Gi", a: 96 << 30},
		{text: "GPU-a=1Gi,GPU-b=500M", a: 1 << 30, b: 500e6, reported: 1 << 40},
	} {
		memory, err := ParseCardMemory(test.text)
		check.NoError(t, err)
		got := want{text: test.text, a: memory.of("GPU-a", test.reported), b: memory.of("GPU-b", test.reported), reported: test.reported}
		if got != test {
			t.Errorf("got %+v, want %+v", got, test)
		}
	}
	for _, text := range []string{"0", "-1Gi", "many", "GPU-a=", "GPU-a=0", "=1Gi", "GPU-a=1Gi,GPU-a=2Gi", "GPU-a=1Gi,96Gi"} {
		if memory, err := ParseCardMemory(text); err == nil {
			t.Errorf("%q was read as %+v", text, memory)
		}
	}
}
