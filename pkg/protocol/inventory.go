package protocol

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// InventoryVersion is the version of the inventory that this package writes. A field more needs no new version, since
// readers pass over what they don't know; one that changes what the others mean does, and a reader takes the versions
// up to its own only.
const InventoryVersion = 1

// ErrNoInventory says that a node carries no inventory: a plugin of the existing kind runs there, or none.
var ErrNoInventory = errors.New("the node carries no GPU inventory")

// Inventory is a node's cards, as its device plugin found them.
type Inventory struct {
	Unit  gpu.Unit
	Cards []gpu.Card
	// BootID is the kernel's identity of the boot in which the inventory was written (/proc/sys/kernel/random/boot_id),
	// empty where the plugin didn't write it. It tells the next plugin whether the machine has restarted since.
	BootID string
}

type inventoryJSON struct {
	Version int        `json:"version"`
	Unit    string     `json:"unit"`
	BootID  string     `json:"bootID,omitempty"`
	Cards   []cardJSON `json:"cards"`
}

type cardJSON struct {
	Index    int        `json:"index"`
	UUID     string     `json:"uuid,omitempty"`
	Model    string     `json:"model,omitempty"`
	Memory   gpu.Memory `json:"memory"`
	NUMANode *int       `json:"numaNode,omitempty"`
	Healthy  bool       `json:"healthy"`
	Reason   string     `json:"reason,omitempty"`
}

// MarshalJSON writes the annotation's value. What UnmarshalJSON would refuse isn't written.
func (inv Inventory) MarshalJSON() ([]byte, error) {
	if _, err := gpu.ParseUnit(inv.Unit.String()); err != nil {
		return nil, err
	}
	if err := inv.check(); err != nil {
		return nil, err
	}
	out := inventoryJSON{Version: InventoryVersion, Unit: inv.Unit.String(), BootID: inv.BootID, Cards: []cardJSON{}}
	for _, c := range inv.Cards {
		card := cardJSON{
			Index: c.Index, UUID: c.UUID, Model: c.Model, Memory: c.Memory, Healthy: c.Healthy(), Reason: c.Unhealthy,
		}
		if c.NUMANode != gpu.NoNUMANode {
			card.NUMANode = &c.NUMANode
		}
		out.Cards = append(out.Cards, card)
	}
	return json.Marshal(out)
}

// UnmarshalJSON reads the annotation's value. Cards come out in the order in which they were written; an index that
// stands there twice, a negative amount, or a version from the future is an error.
func (inv *Inventory) UnmarshalJSON(data []byte) error {
	var in inventoryJSON
	if err := json.Unmarshal(data, &in); err != nil {
		return err
	}
	if in.Version < 1 || in.Version > InventoryVersion {
		return fmt.Errorf("inventory version %d: this program reads versions 1 to %d", in.Version, InventoryVersion)
	}
	unit, err := gpu.ParseUnit(in.Unit)
	if err != nil {
		return err
	}
	out := Inventory{Unit: unit, BootID: in.BootID}
	for _, c := range in.Cards {
		card := gpu.Card{Index: c.Index, UUID: c.UUID, Model: c.Model, Memory: c.Memory, NUMANode: gpu.NoNUMANode}
		if c.NUMANode != nil {
			card.NUMANode = max(*c.NUMANode, gpu.NoNUMANode)
		}
		if !c.Healthy {
			card.Unhealthy = c.Reason
			if card.Unhealthy == "" {
				card.Unhealthy = "reported unhealthy"
			}
		}
		out.Cards = append(out.Cards, card)
	}
	if err := out.check(); err != nil {
		return err
	}
	*inv = out
	return nil
}

// check holds for every inventory that is written or read.
func (inv Inventory) check() error {
	seen := make(map[int]bool, len(inv.Cards))
	for _, c := range inv.Cards {
		switch {
		case c.Index < 0 || c.Index > maxCard:
			return fmt.Errorf("card index %d is not within 0 to %d", c.Index, maxCard)
		case seen[c.Index]:
			return fmt.Errorf("card index %d stands there twice", c.Index)
		case c.Memory < 0:
			return fmt.Errorf("card %d has negative memory", c.Index)
		}
		seen[c.Index] = true
	}
	return nil
}

// Annotation returns the value of AnnotationInventory.
func (inv Inventory) Annotation() (string, error) {
	data, err := json.Marshal(inv)
	if err != nil {
		return "", fmt.Errorf("writing the inventory: %w", err)
	}
	return string(data), nil
}

// ParseInventory reads a node's annotations. It returns ErrNoInventory where there is none.
func ParseInventory(annotations map[string]string) (Inventory, error) {
	text, ok := annotations[AnnotationInventory]
	if !ok {
		return Inventory{}, ErrNoInventory
	}
	var inv Inventory
	if err := json.Unmarshal([]byte(text), &inv); err != nil {
		return Inventory{}, fmt.Errorf("annotation %s: %w", AnnotationInventory, err)
	}
	return inv, nil
}

// memory is the sum over all cards, healthy or not: what the kubelet calls capacity.
func (inv Inventory) memory() gpu.Memory {
	var sum gpu.Memory
	for _, c := range inv.Cards {
		sum = sum.Add(c.Memory)
	}
	return sum
}

// Node is what a node object says about sharing GPU memory.
type Node struct {
	// Unit is zero where the node doesn't tell.
	Unit gpu.Unit
	// Cards is empty for a node that shares nothing.
	Cards []gpu.Card
	// WholeCards says that the node offers NVIDIA's resources beside aliyun.com/gpu-mem, and so must not be used.
	WholeCards bool
	// Problem says, for the log, in what the inventory and the capacity disagree, or why the inventory can't be read, and
	// which of the two counts; nil where there is nothing to say.
	Problem error
}

// ParseNode reads a node's cards.
//
// The inventory counts wherever its number of cards is gpu-count: the kubelet's gpu-mem lags behind the inventory when a
// card's memory changes, and a plugin that is away takes it to zero. Only where both the number of cards and the sum of
// their memory differ, or there is no inventory that can be read, the node is one of an existing plugin (also one that
// took over from ours and left the annotation behind): it is read as gpu-count equal cards of gpu-mem / gpu-count.
func ParseNode(node *corev1.Node) Node {
	capacity := node.Status.Capacity
	memory, count := memoryOf(capacity, ResourceMemory), int64(memoryOf(capacity, ResourceCount))
	out := Node{WholeCards: memory > 0 && len(WholeCardResources(capacity)) > 0}

	inventory, err := ParseInventory(node.Annotations)
	if err == nil {
		differs := memory > 0 && memory != inventory.memory()
		equalCards := differs && count > 0 && count != int64(len(inventory.Cards))
		if differs {
			counts := "the inventory counts"
			if equalCards {
				counts = fmt.Sprintf("the inventory lists %d cards, %s is %d: the node is read as %d equal cards",
					len(inventory.Cards), ResourceCount, count, count)
			}
			out.Problem = fmt.Errorf("the inventory's cards add up to %d, the node's %s is %d; %s",
				inventory.memory(), ResourceMemory, memory, counts)
		}
		if !equalCards {
			out.Unit, out.Cards = inventory.Unit, inventory.Cards
			return out
		}
	} else if !errors.Is(err, ErrNoInventory) {
		out.Problem = fmt.Errorf("the inventory can't be read: %w", err)
	}
	if memory > 0 && count > 0 && count <= maxCard {
		for i := range int(count) {
			out.Cards = append(out.Cards, gpu.Card{Index: i, Memory: memory / gpu.Memory(count), NUMANode: gpu.NoNUMANode})
		}
	}
	return out
}

// WholeCardResources returns the names of NVIDIA's resources of which list has some, sorted. They give out the cards that
// aliyun.com/gpu-mem shares: whole, by time-slicing, or as MIG devices.
func WholeCardResources(list corev1.ResourceList) []string {
	var names []string
	for name := range list {
		if IsWholeCard(name) && memoryOf(list, name) > 0 {
			names = append(names, string(name))
		}
	}
	slices.Sort(names)
	return names
}

// IsWholeCard reports whether a resource is one by which NVIDIA's device plugin gives out cards: nvidia.com/gpu,
// nvidia.com/gpu.shared (time-slicing or MPS, where it renames them) or nvidia.com/mig-… (MIG with the strategy mixed).
func IsWholeCard(name corev1.ResourceName) bool {
	return name == ResourceWholeCard || name == resourceSharedCard || strings.HasPrefix(string(name), resourceMIGPrefix)
}
