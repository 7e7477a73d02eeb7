package webui

import (
	"slices"
	"testing"
	"unique"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/test/await"
)

// TestStranded: a viewer learns which memory is of no use as soon as that changes, although the ledger's nodes are as before.
func TestStranded(t *testing.T) {
	s := start(t, nil)
	s.ledger.SetNode("n1", spec(16, 8))
	s.ledger.SetNode("n2", spec(16))
	kind := placement.Kind{Frequency: 1, Shape: placement.Shape{Demand: gpu.Demand{Cards: 1, Memory: 1}, Beside: placement.Beside{CPU: 1000}}}
	s.ledger.Expect([]placement.Kind{kind}, 0, placement.Binpack, func(unique.Handle[string]) []string { return []string{"n1", "n2"} })
	if got := s.data().Stranded; len(got) != 0 {
		t.Errorf("nothing is stranded, got %v", got)
	}
	s.ledger.SetBeside("n1", placement.Beside{CPU: 999}, placement.Beside{})
	want := []strandedView{{"n1", 24 << 10, "24 GiB free, of no use: the node lacks CPU"}}
	await.True(t, "the stranded memory", func() bool { return slices.Equal(s.data().Stranded, want) })
}
