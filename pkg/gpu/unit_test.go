package gpu

import (
	"cmp"
	"math"
	"strings"
	"testing"
)

func TestParseUnit(t *testing.T) {
	for name, tc := range map[string]struct {
		in      string
		want    Unit
		written string // The expected result of String if it differs from in.
		bad     bool
	}{
		"GiB":                                    {in: "GiB", want: 1 << 30},
		"MiB":                                    {in: "MiB", want: 1 << 20},
		"a number of MiB":                        {in: "256MiB", want: 256 << 20},
		"a number of GiB":                        {in: "2GiB", want: 2 << 30},
		"one GiB":                                {in: "1GiB", want: GiB, written: "GiB"},
		"MiB that make whole GiB":                {in: "2048MiB", want: 2 << 30, written: "2GiB"},
		"MiB that make one GiB":                  {in: "1024MiB", want: GiB, written: "GiB"},
		"MiB that are not a whole number of GiB": {in: "1536MiB", want: 1536 << 20},
		"the largest":                            {in: "8589934591GiB", want: 8589934591 << 30},
		"more than the largest":                  {in: "8589934592GiB", bad: true},
		"a number over 64 bits":                  {in: "99999999999999999999MiB", bad: true},
		"empty":                                  {in: "", bad: true},
		"no suffix":                              {in: "256", bad: true},
		"zero":                                   {in: "0MiB", bad: true},
		"a leading zero":                         {in: "01MiB", bad: true},
		"a sign":                                 {in: "+1MiB", bad: true},
		"a negative number":                      {in: "-1MiB", bad: true},
		"a negative zero":                        {in: "-0MiB", bad: true},
		"a fraction":                             {in: "0.5GiB", bad: true},
		"an underscore":                          {in: "1_024MiB", bad: true},
		"a space":                                {in: "1 GiB", bad: true},
		"a trailing space":                       {in: "GiB ", bad: true},
		"non-ASCII digits":                       {in: "２GiB", bad: true},
		"lower case":                             {in: "mib", bad: true},
		"powers of ten":                          {in: "GB", bad: true},
		"a Kubernetes suffix":                    {in: "Gi", bad: true},
		"a repeated unit":                        {in: "MiBMiB", bad: true},
		"the String of no unit":                  {in: "0B", bad: true},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ParseUnit(tc.in)
			if (err != nil) != tc.bad {
				t.Fatalf("ParseUnit(%q): error %v, want an error: %t", tc.in, err, tc.bad)
			}
			expect(t, "ParseUnit", tc.want, got)
			if !tc.bad {
				expect(t, "String", cmp.Or(tc.written, tc.in), got.String())
			}
		})
	}
}

func TestParseUnitErrorLength(t *testing.T) {
	for _, in := range []string{strings.Repeat("x", 1<<16), strings.Repeat("9", 1<<16) + "MiB"} {
		if _, err := ParseUnit(in); err == nil || len(err.Error()) > 200 {
			t.Errorf("got an error of %d bytes for %.8q…, want at most 200", len(err.Error()), in)
		}
	}
}

func TestUnitStringBytes(t *testing.T) {
	for unit, want := range map[Unit]string{0: "0B", 1000: "1000B", -1: "-1B", -GiB: "-1073741824B"} {
		expect(t, "String", want, unit.String())
	}
}

func TestUnitCount(t *testing.T) {
	for name, tc := range map[string]struct {
		unit  Unit
		bytes uint64
		want  Memory
	}{
		"a card in MiB":                      {MiB, 16276 << 20, 16276},
		"a card in GiB":                      {GiB, 16276 << 20, 15},
		"the remainder isn't counted":        {GiB, 2<<30 - 1, 1},
		"a card smaller than one unit":       {GiB, 1<<30 - 1, 0},
		"no bytes":                           {MiB, 0, 0},
		"no unit":                            {0, 1 << 40, 0},
		"a negative unit":                    {-1, 1 << 40, 0},
		"more than the largest Memory":       {1, math.MaxUint64, math.MaxInt64},
		"the largest number of bytes":        {MiB, math.MaxUint64, 1<<44 - 1},
		"exactly one unit":                   {256 * MiB, 256 << 20, 1},
		"an 80 GiB card in units of 256 MiB": {256 * MiB, 80 << 30, 320},
	} {
		expect(t, name, tc.want, tc.unit.Count(tc.bytes))
	}
}

func TestUnitFormat(t *testing.T) {
	for name, tc := range map[string]struct {
		unit Unit
		want string
	}{
		"MiB":             {MiB, "8138 MiB"},
		"GiB":             {GiB, "8138 GiB"},
		"a number of MiB": {256 * MiB, "8138 x 256MiB"},
		"an unknown unit": {0, "8138"},
	} {
		expect(t, name, tc.want, tc.unit.Format(8138))
	}
}

// FuzzParseUnit checks that a parsed unit is positive, and that its String parses to the same unit.
func FuzzParseUnit(f *testing.F) {
	f.Fuzz(func(t *testing.T, s string) {
		unit, err := ParseUnit(s)
		if err != nil {
			if unit != 0 {
				t.Errorf("ParseUnit(%q) = %d with error %v", s, unit, err)
			}
			return
		}
		if unit <= 0 || unit%MiB != 0 {
			t.Errorf("ParseUnit(%q) = %d, not a whole number of MiB", s, unit)
		}
		written := unit.String()
		if len(written) > len(s) {
			t.Errorf("ParseUnit(%q) has the longer String %q", s, written)
		}
		if again, err := ParseUnit(written); err != nil || again != unit {
			t.Errorf("ParseUnit(%q) = %d, but its String %q is parsed as %d (error %v)", s, unit, written, again, err)
		}
	})
}

func TestUnitBytes(t *testing.T) {
	for name, tc := range map[string]struct {
		unit Unit
		m    Memory
		want uint64
	}{
		"units":                               {GiB, 16, 16 << 30},
		"zero":                                {GiB, 0, 0},
		"a negative unit counts as zero":      {-1, 16, 0},
		"a product that would wrap saturates": {GiB, math.MaxInt64, math.MaxUint64},
	} {
		expect(t, name, tc.want, tc.unit.Bytes(tc.m))
	}
}
