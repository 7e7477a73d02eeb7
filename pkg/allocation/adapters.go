package allocation

import (
	"slices"
	"strings"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Adapters is what a container is given of its node's RDMA adapters. The zero value is nothing.
type Adapters struct {
	// Ports are the active ports near the container's cards, as in gpu.Card.
	Ports string
	// Devices are the adapters' devices, as in gpu.Adapter, in the order of Ports.
	Devices []string
}

// adapters returns what the container of the decision is given of the adapters near its cards, if its pod asks for it. If the call is repeated, it
// is given the same as before.
func (s *Snapshot) adapters(d Decision) (near Adapters) {
	if d.Rejection != nil {
		return Adapters{}
	}
	if before, served := s.Given[d.Pod.UID][d.Container.Name]; served && slices.Equal(before.Cards.Cards(), d.Indexes()) {
		return before.Adapters
	}
	if d.Pod.RDMA == gpu.RDMANone {
		return Adapters{}
	}
	var ports []string
	for _, card := range d.Cards {
		for port := range strings.SplitSeq(card.RDMAPorts, ",") {
			name, _, _ := strings.Cut(port, ":")
			i := slices.IndexFunc(s.Adapters, func(a gpu.Adapter) bool { return a.Name == name })
			if i < 0 || slices.Contains(ports, port) {
				continue
			}
			ports = append(ports, port)
			if device := s.Adapters[i].Device; !slices.Contains(near.Devices, device) {
				near.Devices = append(near.Devices, device)
			}
		}
	}
	near.Ports = strings.Join(ports, ",")
	return near
}

// lacksAdapter reports whether the pod must have cards near an adapter, and one of these isn't.
func (p *Pod) lacksAdapter(cards []gpu.Card) bool {
	return p.RDMA == gpu.RDMARequired && slices.ContainsFunc(cards, func(c gpu.Card) bool { return c.RDMAPorts == "" })
}
