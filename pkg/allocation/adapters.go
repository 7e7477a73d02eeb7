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
	if s.has(d.Pod.UID, d.Container.Name, d.Indexes()) {
		return s.Given[d.Pod.UID][d.Container.Name].Adapters
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

// lacksAdapter reports whether the pod must have cards near an adapter, and the node has none near one of these.
func (s *Snapshot) lacksAdapter(pod *Pod, cards []gpu.Card) bool {
	return pod.RDMA == gpu.RDMARequired && slices.ContainsFunc(cards, func(c gpu.Card) bool {
		return !slices.ContainsFunc(s.Adapters, func(a gpu.Adapter) bool {
			return a.Device != "" && strings.Contains(","+c.RDMAPorts, ","+a.Name+":")
		})
	})
}

// withAdapters returns the decision with what its container gets of the adapters, or with a rejection if it must have one and gets none. unsure
// is true if the call can be for a pod that asks for none: then it gets none.
func (s *Snapshot) withAdapters(d Decision, unsure bool) Decision {
	if d.Rejection != nil {
		return d
	}
	near := s.adapters(d)
	switch served := s.has(d.Pod.UID, d.Container.Name, d.Indexes()); {
	case unsure && len(near.Devices) > 0 && d.Pod.RDMA == gpu.RDMARequired:
		return d.Reject(RefusedUnavailable, "pod %s must have an RDMA adapter, and %s", d.Pod, unsureOfAdapters)
	case unsure && len(near.Devices) > 0:
		d.NoAdapter = unsureOfAdapters
	case !served && s.lacksAdapter(d.Pod, d.Cards):
		return d.rejectWithoutPort()
	case !unsure:
		d.Adapters = near
	}
	return d
}

// unsureOfAdapters is why a container gets no adapter, although there are some near its cards and its pod asks for them.
const unsureOfAdapters = "the kubelet can't be asked which of several pods with the same request it starts, and they differ in the label " +
	"gpushare.aliyun.com/rdma"

func (d Decision) rejectWithoutPort() Decision {
	where := d.Pod.DemandOver(len(d.Cards)).On(d.Indexes()...)
	return d.Reject(RefusedUnavailable,
		"pod %s must have cards near an RDMA adapter, and near at least one of its cards no port is active any more: %s", d.Pod, where)
}
