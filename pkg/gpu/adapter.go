package gpu

// Adapter is an RDMA adapter of a node: an InfiniBand or RoCE device of the kernel. Its JSON is that of inventories and of kubectl inspect's report.
type Adapter struct {
	// Name is the kernel's name of the adapter ("mlx5_0"), and Device that of its character device below /dev/infiniband ("uverbs0").
	Name   string `json:"name"`
	Device string `json:"device"`
	// ActivePorts are the numbers of the ports that have a link, in ascending order.
	ActivePorts []int `json:"activePorts,omitempty"`
	// LinkLayer is that of its first port: "InfiniBand", or "Ethernet" for RoCE.
	LinkLayer string `json:"linkLayer,omitempty"`
	// PCIAddress is its address on the PCI bus ("0000:3b:00.0"); empty if it isn't on that bus.
	PCIAddress string `json:"pciAddress,omitempty"`
	// NUMANode is its NUMA node, or NoNUMANode.
	NUMANode int `json:"numaNode"`
}

// RDMA is whether a pod asks for cards near an adapter.
type RDMA uint8

const (
	// RDMANone pods get no adapter.
	RDMANone RDMA = iota
	// RDMAPreferred pods get cards near an adapter if these are as good as others.
	RDMAPreferred
	// RDMARequired pods get no other cards.
	RDMARequired
)
