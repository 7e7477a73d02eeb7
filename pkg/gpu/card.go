package gpu

// NoNUMANode says that a card's NUMA node isn't known.
const NoNUMANode = -1

// Card is one GPU of a node.
type Card struct {
	// Index is NVML's index of the card on its node. It is what annotations name; it need not be dense.
	Index int
	// UUID is NVML's identity of the card ("GPU-…"), empty where the node doesn't tell.
	UUID string
	// Model is the product name, for people.
	Model string
	// Memory is what the card has in total, in the node's unit.
	Memory Memory
	// NUMANode is the NUMA node that the card is attached to, or NoNUMANode.
	NUMANode int
	// Unhealthy is the reason why nothing new may be placed on the card, empty for a healthy one.
	Unhealthy string
}

// Healthy says whether something new may be placed on the card.
func (c Card) Healthy() bool { return c.Unhealthy == "" }
