package gpu

// NoNUMANode is the value of Card.NUMANode if the NUMA node is unknown.
const NoNUMANode = -1

// Card is one GPU of a node.
type Card struct {
	// Index is NVML's index of the card on its node. Annotations name cards by it. Indexes can have gaps.
	Index int `json:"index"`
	// UUID is NVML's identifier of the card ("GPU-…"); empty if the node doesn't report it.
	UUID string `json:"uuid,omitempty"`
	// Model is the product name, for display.
	Model string `json:"model,omitempty"`
	// Memory is the card's total memory in the node's unit; after Unreserved only what can be allocated of it.
	Memory Memory `json:"memory"`
	// Reserved is the part of Memory that can't be allocated because the driver keeps it, rounded up. Only modes that limit memory
	// subtract it: without limits, a request is no promise to the last byte.
	Reserved Memory `json:"-"`
	// MaxContainers is how many containers can have a share of the card; 0 if there is no such limit.
	MaxContainers int `json:"maxContainers,omitempty"`
	// NUMANode is the card's NUMA node, or NoNUMANode.
	NUMANode int `json:"-"`
	// NVLink and PCIeSwitch are equal for cards of a node that NVLink connects, or that are behind the same PCIe switch. They are
	// counted from 1; 0 means that nothing is known, or that there is no such connection.
	NVLink     int `json:"nvlink,omitempty"`
	PCIeSwitch int `json:"pcieSwitch,omitempty"`
	// RDMAPorts are the active ports of the RDMA adapters near the card: those behind its PCIe switch or, if there are none, those on its
	// NUMA node. They are written NAME:PORT, ordered, and separated by commas ("mlx5_0:1,mlx5_1:1"); empty if there are none.
	RDMAPorts string `json:"rdmaPorts,omitempty"`
	// Unhealthy is the reason why no new pod may be placed on the card; empty for a healthy card.
	Unhealthy string `json:"-"`
}

// Unreserved returns the card with only the memory that can be allocated.
func (c Card) Unreserved() Card {
	c.Memory = c.Memory.Sub(c.Reserved)
	return c
}

// Healthy reports whether new pods may be placed on the card.
func (c Card) Healthy() bool { return c.Unhealthy == "" }
