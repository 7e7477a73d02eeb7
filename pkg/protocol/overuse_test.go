package protocol

import (
	"math"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
)

// The largest report that a device plugin can write is read. Any pod can have the annotation, so a longer one isn't parsed.
func TestParseOveruse(t *testing.T) {
	want := Overuse{Used: math.MaxInt64, Requested: math.MaxInt64, Cards: map[int]CardOveruse{}}
	for card := range gpu.MaxCards {
		want.Cards[maxCard-card] = CardOveruse{Used: math.MaxInt64, Requested: math.MaxInt64 - 1}
	}
	text := want.Annotation()
	got, err := ParseOveruse(text)
	check.Must(t, err)
	expect(t, "the largest report", &want, got)
	if _, err := ParseOveruse(text + strings.Repeat(" ", MaxSize)); err == nil {
		t.Error("a report of any length is parsed")
	}
}
