package deviceplugin

import (
	"os"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/await"
)

// TestHealthWithoutAPIServer: the next plugin knows what has happened to the cards while the API server was unreachable.
func TestHealthWithoutAPIServer(t *testing.T) {
	const fatal = "Xid 95, until the card is reset or the machine restarts"
	for name, test := range map[string]struct {
		// before and during are the reasons of a card before the API server is away, and then. want is what the next plugin knows.
		before, during, want string
		// boot is the boot ID of the next plugin, if the machine has restarted.
		boot string
	}{
		"a Xid":                     {during: fatal, want: fatal},
		"a reset":                   {before: fatal, during: "Xid 95", want: "Xid 95"},
		"the machine was restarted": {during: fatal, boot: "next boot"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t)
			startKubelet(t, b.dir)
			cards := newCards(16, 16)
			cards[0].Unhealthy = test.before
			p, stop := b.start(cards)
			await.True(t, "the Node to have the cards", func() bool {
				_, err := os.Stat(p.health.path)
				known := p.node.Inventory().Cards
				return len(known) == 2 && known[0].Unhealthy == test.before && os.IsNotExist(err)
			})
			b.away.Store(true)
			cards = newCards(16, 16)
			cards[0].Unhealthy = test.during
			p.SetCards(gpu.GiB, cards, nil, nil, "")
			stop()
			b.away.Store(false)
			next, _ := b.start(nil)
			if test.boot != "" {
				next.health.bootID = test.boot
			}
			known, boot := next.KnownCards(t.Context())
			if len(known) != 2 || known[0].Unhealthy != test.want || boot != "this boot" {
				t.Errorf("in boot %q there are %+v, want the reason %q", boot, known, test.want)
			}
		})
	}
}
