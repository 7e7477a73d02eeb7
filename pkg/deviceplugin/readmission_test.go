package deviceplugin

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/nodeconfig"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

// A pod runs whose init container has ended, and its card can't be used for new pods any more. A kubelet that starts fails the pod if the
// init container's devices are not healthy.
func TestReadmission(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*Plugin)
		// healthy and all are the numbers of devices when the kubelet doesn't start.
		healthy, all int
	}{
		"the card has failed": {func(p *Plugin) {
			cards := newCards(16, 16)
			cards[0].Unhealthy = "Xid 79"
			p.SetCards(gpu.GiB, cards, nil, nil, "")
		}, 16, 32},
		"the card is excluded": {func(p *Plugin) { p.cards.Exclude(nodeconfig.Cards{{Index: 0}}) }, 16, 32},
		"the card has become smaller": {func(p *Plugin) {
			p.SetCards(gpu.GiB, newCards(1, 16), nil, nil, "")
		}, 17, 17},
		"the driver doesn't answer": {func(p *Plugin) { p.SetCards(gpu.GiB, nil, nil, nil, "no answer") }, 0, 32},
	} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t)
			b.readmission = 5 * time.Second
			k, p := b.up(16, 16)
			pod := newPod("a", initStep(4), main(2), assumed(0, 1))
			ended := newPod("ended", main(2), assumed(0, 2))
			b.create(p, pod, ended)
			k.mustAdmit(pod)
			k.mustAdmit(ended)
			b.delete(p, ended)
			test.change(p)
			k.awaitDevices(test.healthy, test.all)

			k.stop()
			k = startKubelet(t, b.dir, k.entries...)
			owners, err := p.checkpoint.Devices()
			check.Must(t, err)
			await.True(t, "the devices of the pod, and no others of its card, to be healthy", func() bool {
				k.mu.Lock()
				defer k.mu.Unlock()
				for id, uid := range owners {
					healthy := uid == "uid-a" || test.all == 17 && id == "00"
					if healthy != (k.health[id] == pluginapi.Healthy) {
						return false
					}
				}
				return true
			})
			next := newPod("next", main(2), assumed(0, 3))
			b.create(p, next)
			if env, err := k.admit(next); err == nil && cardOf(env["main"]) == "0" {
				t.Errorf("a new pod got %v", env)
			}
			k.awaitDevices(test.healthy, test.all)
		})
	}
}

// Devices of Alibaba's plugin are not kept: its extender would take the node's capacity for that of its cards. Nor are those of pods that are gone.
func TestKeep(t *testing.T) {
	b := newFixture(t)
	_, p := b.up(16)
	b.create(p, newPod("a", main(1), assumed(0, 1)))
	owners := map[string]gpu.PodUID{"00": "uid-a", "01": "uid-gone", "0Z": "uid-a", "GPU-1-_-0": "uid-a"}
	r := &readmission{devices: func() (map[string]gpu.PodUID, error) { return maps.Clone(owners), nil }, pods: p.pods}
	keep := func() (healthy []string) {
		cards := newCards(2)
		cards[0].Unhealthy = "Xid 79"
		for _, device := range r.Keep(t.Context(), devices(cards)) {
			if device.Health == pluginapi.Healthy {
				healthy = append(healthy, device.ID)
			}
		}
		slices.Sort(healthy)
		return healthy
	}
	check.Equal(t, "healthy devices", []string{"00", "0Z"}, keep())
	owners["0"+strings.Repeat("Z", maxMessage)] = "uid-a"
	check.Equal(t, "in a message that would be too large", []string{"00"}, keep())
}
