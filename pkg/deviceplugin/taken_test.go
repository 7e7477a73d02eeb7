package deviceplugin

import (
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/await"
)

// awaitReason waits until the node's inventory has this reason for each of its cards.
func (b *fixture) awaitReason(reasons ...string) {
	b.t.Helper()
	await.True(b.t, "the reasons in the inventory", func() bool {
		cards := protocol.ParseNode(b.node()).Cards
		for i, reason := range reasons {
			if len(cards) != len(reasons) || cards[i].Unhealthy != reason {
				return false
			}
		}
		return true
	})
}

// TestInventoryFollowsKubelet: the extender sees no card as healthy before the kubelet has its devices. A pod that is bound earlier fails
// for good.
func TestInventoryFollowsKubelet(t *testing.T) {
	b := newFixture(t)
	b.start(newCards(16, 24))
	b.awaitReason(reasonNotSent, reasonNotSent)
	startKubelet(t, b.dir)
	b.awaitHealthy(2)
}

// TestInventoryOutlivesRestart: the cards of a plugin that restarts stay healthy in the inventory, so that no reservation of the
// extender ends. Those that it didn't list, or that were unhealthy, wait for the kubelet.
func TestInventoryOutlivesRestart(t *testing.T) {
	b := newFixture(t)
	cards := newCards(16, 24)
	cards[1].Unhealthy = "Xid 79"
	_, stop := b.start(cards)
	k := startKubelet(t, b.dir)
	b.awaitHealthy(1)
	stop()
	k.stop()

	b.start(newCards(16, 24, 24))
	b.awaitReason("", reasonNotSent, reasonNotSent)
	startKubelet(t, b.dir)
	b.awaitHealthy(3)
}

// TestRecoveredCardFollowsKubelet: so does a card that recovers or grows while the plugin runs. One that fails is unhealthy at once.
func TestRecoveredCardFollowsKubelet(t *testing.T) {
	b := newFixture(t)
	k := startKubelet(t, b.dir)
	p, _ := b.start(nil)
	p.service.interval = time.Hour // The kubelet gets no second message.
	failed := newCards(16, 16, 16)
	failed[1].Unhealthy = "Xid 79"
	p.SetCards(gpu.GiB, failed, nil, nil, "")
	k.awaitDevices(32, 48)
	b.awaitHealthy(2)

	next := newCards(16, 16, 24)
	next[0].Unhealthy = "Xid 48"
	p.SetCards(gpu.GiB, next, nil, nil, "")
	b.awaitReason("Xid 48", reasonNotSent, reasonNotSent)
}
