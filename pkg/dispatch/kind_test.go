package dispatch

import (
	"testing"
	"unique"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Groups whose pods request the same amounts are of one kind.
func TestKinds(t *testing.T) {
	f := newFixture(t, nil, nil)
	like := func(memory gpu.Memory) *pod {
		return &pod{Pod: &Pod{Pod: gpu.Pod{Request: memory}, RoomKey: unique.Make(memory.String())}}
	}
	group := f.kindOf([]*pod{like(2), like(1)})
	want(t, "the same amounts are of one kind", true, group == f.kindOf([]*pod{like(2), like(1)}))
	want(t, "different amounts are of one kind", false, group == f.kindOf([]*pod{like(2), like(2)}))
}
