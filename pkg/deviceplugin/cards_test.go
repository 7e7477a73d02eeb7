package deviceplugin

import (
	"slices"
	"strconv"
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
	p.SetCards(gpu.GiB, cards, nil, nil, "")
	k.awaitDevices(16, 32)
	b.awaitEvent("GPUCardUnhealthy card 1 GPU-1: Xid 79")
	await.True(t, "the inventory with the card", func() bool {
		inventory, err := protocol.ParseInventory(b.node().Annotations)
		return err == nil && !inventory.Cards[1].Healthy()
	})
	if _, err := k.admit(a); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("got %v, want FailedPrecondition", err)
	}
	p.SetCards(gpu.GiB, nil, nil, nil, "the driver is being updated")
	k.awaitDevices(0, 32)
	b.awaitEvent("GPUCardUnhealthy card 0 GPU-0, 1 GPU-1: the driver is being updated")
	if missing := p.missing(); !slices.Equal(missing, []string{"the driver is being updated"}) {
		t.Errorf("without a driver readyz reports %q", missing)
	}
	p.SetCards(gpu.GiB, newCards(16, 16), nil, nil, "")
	k.awaitDevices(32, 32)
	b.awaitEvent("GPUCardHealthy card 0 GPU-0, 1 GPU-1 can be used again")
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
		p.SetCards(gpu.GiB, test.cards, nil, nil, test.problem)
		if missing := strings.Join(p.missing(), "\n"); !strings.Contains(missing, test.want) {
			t.Errorf("readyz reports %q, want %q", missing, test.want)
		}
		b.awaitEvent("GPUCardNotOffered")
	}
	p.SetCards(gpu.GiB, newCards(16), nil, nil, "")
	k.awaitDevices(16, 16)
	k.awaitRegistrations(1)
}

// TestCardReplaced: the card of a pod gets another UUID, as when a virtual machine is moved. The pod is marked, also by a plugin that
// starts after that, and no longer if the card is back.
func TestCardReplaced(t *testing.T) {
	lost := func(b *fixture, want string) {
		t.Helper()
		await.True(t, "the annotation to be "+strconv.Quote(want), func() bool { return b.pod("a").Annotations[protocol.AnnotationLostCards] == want })
	}
	replaced := newCards(16, 16)
	replaced[0].UUID = "GPU-new"
	for name, restart := range map[string]bool{"while the plugin runs": false, "while it is away": true} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t)
			k := startKubelet(t, b.dir)
			p, stop := b.start(newCards(16, 16))
			k.awaitDevices(32, 32)
			a, other := newPod("a", main(8), assumed(0, 0)), newPod("other", main(8), assumed(1, 0))
			b.create(p, a, other)
			k.mustAdmit(a)
			k.mustAdmit(other)
			b.awaitAssigned("a", 0)
			await.True(t, "the checkpoint to be read", func() bool { return p.annotator.record.Pod("uid-a")["main"].UUIDs != nil })
			if restart {
				stop()
				p, _ = b.start(nil)
			}
			p.SetCards(gpu.GiB, replaced, nil, nil, "")
			b.awaitEvent("GPUCardLost the node doesn't have the pod's card GPU-0 any more")
			lost(b, "GPU-0")
			if _, has := b.pod("other").Annotations[protocol.AnnotationLostCards]; has {
				t.Error("a pod on another card is marked too")
			}
			p.SetCards(gpu.GiB, newCards(16, 16), nil, nil, "")
			lost(b, "")
		})
	}
}
