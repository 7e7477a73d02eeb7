package deviceplugin

import (
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/await"
)

func TestCardFailsAndRecovers(t *testing.T) {
	b := newFixture(t)
	k, p := b.up(16, 16)
	a := newPod("a", main(4), assumed(1, 1))
	b.create(p, a)
	cards := newCards(16, 16)
	cards[1].Unhealthy = "Xid 79"
	p.SetCards(gpu.GiB, cards, nil, "")
	k.awaitDevices(16, 32)
	b.awaitEvent("GPUCardUnhealthy card 1 (GPU-1): Xid 79")
	await.True(t, "the inventory with the card", func() bool {
		inventory, err := protocol.ParseInventory(b.node().Annotations)
		return err == nil && !inventory.Cards[1].Healthy()
	})
	if _, err := k.admit(a); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("got %v, want FailedPrecondition", err)
	}
	p.SetCards(gpu.GiB, nil, nil, "the driver is being updated")
	k.awaitDevices(0, 32)
	b.awaitEvent("GPUCardUnhealthy card 0 (GPU-0), 1 (GPU-1): the driver is being updated")
	if missing := p.missing(); !slices.Equal(missing, []string{"the driver is being updated"}) {
		t.Errorf("without a driver readyz reports %q", missing)
	}
	p.SetCards(gpu.GiB, newCards(16, 16), nil, "")
	k.awaitDevices(32, 32)
	b.awaitEvent("GPUCardHealthy card 0 (GPU-0), 1 (GPU-1) can be used again")
	if missing := p.missing(); len(missing) > 0 {
		t.Errorf("with a driver readyz reports %q", missing)
	}
	if n := testutil.ToFloat64(p.metrics.registrations); n != 1 {
		t.Errorf("registered %v times, want once", n)
	}
}

func TestNothingToOffer(t *testing.T) {
	b := newFixture(t)
	k := startKubelet(t, b.dir)
	p, _ := b.start(nil)
	for _, test := range []struct {
		cards   []gpu.Card
		problem string
		want    string
	}{
		{nil, "the NVIDIA library can't be loaded", "the NVIDIA library can't be loaded"},
		{nil, "", "the node has no GPU card"},
		{[]gpu.Card{{Index: 0, Unhealthy: "no memory of its own"}}, "", "no GPU card has memory that can be shared: card 0: no memory of its own"},
		{newCards(1150168), "", "the smallest unit that fits is 6GiB (--memory-unit)"},
	} {
		p.SetCards(gpu.GiB, test.cards, nil, test.problem)
		if missing := strings.Join(p.missing(), "\n"); !strings.Contains(missing, test.want) {
			t.Errorf("readyz reports %q, want %q", missing, test.want)
		}
		b.awaitEvent("GPUCardNotOffered")
	}
	p.SetCards(gpu.GiB, newCards(16), nil, "")
	k.awaitDevices(16, 16)
	k.awaitRegistrations(1)
}
