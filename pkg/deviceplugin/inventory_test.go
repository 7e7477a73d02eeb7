package deviceplugin

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/pkg/nodeconfig"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

// TestPrintedInventory: a printed inventory is the annotation that a plugin writes.
func TestPrintedInventory(t *testing.T) {
	for name, test := range map[string]struct {
		mode     isolation.Mode
		excluded nodeconfig.Cards
		driver   limiter
	}{
		"mode none":                     {isolation.None, nil, limiter{}},
		"mode driver":                   {isolation.Driver, nil, limiter{hard: inventory.NoLimit}},
		"mode driver, the driver can't": {isolation.Driver, nil, limiter{problem: inventory.ErrUnsupported}},
		"mode mps":                      {isolation.MPS, nil, volta},
		"an excluded card":              {isolation.None, nodeconfig.Cards{{Index: 1}}, limiter{}},
		"all cards are excluded":        {isolation.None, nodeconfig.Cards{{Index: 0}, {Index: 1}}, limiter{}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t)
			b.isolation = newIsolation(t, test.mode)
			b.isolation.writeStatus(t, ready)
			startKubelet(t, b.dir)
			p, _ := b.start(nil)
			<-p.configurator.decided
			p.cards.Exclude(test.excluded)
			p.Measure(test.driver)
			adapters := []gpu.Adapter{{Name: "mlx5_0", Device: "uverbs0", ActivePorts: []int{1}}}
			p.SetCards(gpu.GiB, reservedCards(), adapters, nil, "")
			settings := nodeconfig.Settings{Isolation: test.mode, Excluded: test.excluded}
			settings.Unit = gpu.GiB
			want, err := Inventory(p.options, settings, reservedCards(), adapters, test.driver).Annotation()
			check.Must(t, err)
			var got string
			await.True(t, "the annotation "+want, func() bool {
				b.isolation.writeStatus(t, ready)
				got = b.node().Annotations[protocol.AnnotationInventory]
				return cmp.Diff(want, got) == ""
			})
		})
	}
}
