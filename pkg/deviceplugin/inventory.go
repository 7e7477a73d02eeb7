package deviceplugin

import (
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/nodeconfig"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// Inventory returns the inventory that a plugin with these options and settings writes to its Node for these cards and adapters, if no pod uses
// a card that the settings exclude, and the kubelet has their devices. What only the API server knows is missing: the node's labels and
// versions, and a DRA driver.
func Inventory(o Options, settings nodeconfig.Settings, cards []gpu.Card, adapters []gpu.Adapter, driver Driver) protocol.Inventory {
	p := &Plugin{options: o, cards: newCardState()}
	p.addIsolator()
	p.cards.bootID, p.cards.simulated = o.BootID, o.Simulated
	p.cards.Set(settings.Unit, cards, adapters, nil, "")
	p.cards.Exclude(settings.Excluded)
	p.cards.SetHeld(map[int]gpu.Memory{})
	p.isolator.Configure(settings.Isolation)
	p.isolator.SetNode(&corev1.Node{})
	p.isolator.Ask(driver)
	p.cards.SetSent(p.cards.Get().Cards)
	return p.cards.Inventory()
}
