package protocol

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// InventoryVersion is the version of the inventory that this package writes. A new field needs no new version, since
// readers ignore unknown fields. A change of the meaning of a field does: a reader rejects versions above its own.
const InventoryVersion = 1

// ErrNoInventory is returned for a node without an inventory: it runs the original gpushare device plugin, or none.
var ErrNoInventory = errors.New("the node has no GPU inventory")

// Inventory lists a node's cards, as its device plugin found them.
//
// To add a field:
//
//  1. Add it to Inventory or gpu.Card, with its meaning and unit, and with a name in JSON and omitempty: an older plugin doesn't write it, and the
//     value for that must be safe. gpu.Card must stay comparable. If "unknown" isn't the zero value, set it where cards are made: UnmarshalJSON,
//     ParseNode, roster.place (package inventory).
//  2. Replace a value out of bounds by a safe one in UnmarshalJSON; check is for values with which no card can be used, because an error there makes
//     the whole inventory unreadable.
//  3. Fill it: package inventory reads it from the driver (driver.read; connections in topology.go) and keeps it
//     (entry.update). What the plugin itself knows of the node is set in cardState.Inventory, what it learns from the
//     API server in nodeKeeper.keep (node.go), and what it knows of a card in cardState.report (package deviceplugin, cards.go).
//  4. Pass it on if the extender needs it. A field of the node goes through Node and ParseNode, eligibility.Spec, and
//     ledger.NodeSpec (ledger.go) with setSpec, clearSpec and copy (node.go). A field of the card that placement needs goes
//     through placement.NewCard. An amount in units is converted where the unit changes (roster.go, plugin.go).
//  5. If users shall see it: report.go and build.go of package inspect, view.go of package webui.
//  6. Add it to TestInventoryRoundTrip, and to "The wire" in docs/design.md.
type Inventory struct {
	Unit  gpu.Unit   `json:"-"` // See inventoryJSON.
	Cards []gpu.Card `json:"-"`
	// Adapters are the node's RDMA adapters, also those near no card.
	Adapters []gpu.Adapter `json:"adapters,omitempty"`
	// BootID is the kernel's boot ID when the inventory was written (/proc/sys/kernel/random/boot_id), empty if the plugin
	// didn't write it. A restarted plugin uses it to detect that the machine has rebooted.
	BootID string `json:"bootID,omitempty"`
	// Isolation is the mode in which new containers get their share of a card; empty if shares are not enforced.
	Isolation string `json:"isolation,omitempty"`
	// Features are what the device plugin understands, such as FeatureCards. A plugin that writes none is older than all of them.
	Features []string `json:"features,omitempty"`
	// DRADriver is the DRA driver that also offers the node's cards; empty if none does.
	DRADriver string `json:"draDriver,omitempty"`
	// Simulated is true if the cards don't exist, so that no container can compute on them.
	Simulated bool `json:"simulated,omitempty"`
}

// The features of a device plugin without which a pod that needs them doesn't go to its node.
const (
	// FeatureCards is the allocation of several cards to a pod.
	FeatureCards = "cards"
	// FeatureCores is ResourceCores.
	FeatureCores = "cores"
	// FeatureLimits is limits above requests (MemoryLimits).
	FeatureLimits = "limits"
	// FeatureRDMA is LabelRDMA.
	FeatureRDMA = "rdma"
)

// maxFeatures and maxAdapters are the most features, and the most adapters and ports of each, that are read.
const (
	maxFeatures = 64
	maxAdapters = 256
)

// inventoryJSON is the annotation's value. inventoryFields are those of an Inventory that have the same form there.
type (
	inventoryJSON struct {
		Version int    `json:"version"`
		Unit    string `json:"unit"`
		inventoryFields
		Cards []cardJSON `json:"cards"`
	}
	inventoryFields Inventory
)

type cardJSON struct {
	gpu.Card
	NUMANode *int   `json:"numaNode,omitempty"`
	Healthy  bool   `json:"healthy"`
	Reason   string `json:"reason,omitempty"`
}

// MarshalJSON returns the annotation's value. It returns an error for an inventory that UnmarshalJSON would reject.
func (inv Inventory) MarshalJSON() ([]byte, error) {
	if _, err := gpu.ParseUnit(inv.Unit.String()); err != nil {
		return nil, err
	}
	if err := inv.check(); err != nil {
		return nil, err
	}
	out := inventoryJSON{Version: InventoryVersion, Unit: inv.Unit.String(), inventoryFields: inventoryFields(inv), Cards: []cardJSON{}}
	for _, c := range inv.Cards {
		card := cardJSON{Card: c, Healthy: c.Healthy(), Reason: c.Unhealthy}
		if c.NUMANode != gpu.NoNUMANode {
			card.NUMANode = &c.NUMANode
		}
		out.Cards = append(out.Cards, card)
	}
	return json.Marshal(out)
}

// UnmarshalJSON parses the annotation's value. It keeps the order of the cards. More than gpu.MaxNodeCards cards, a duplicate index, a
// negative amount and a version above InventoryVersion are errors. Texts are shortened, and only the first maxFeatures features and
// maxAdapters adapters count.
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
	out := Inventory(in.inventoryFields)
	out.Unit, out.BootID, out.Isolation, out.DRADriver = unit, Shorten(in.BootID), Shorten(in.Isolation), Shorten(in.DRADriver)
	out.Features = slices.Clone(out.Features[:min(len(out.Features), maxFeatures)])
	for i, feature := range out.Features {
		out.Features[i] = Shorten(feature)
	}
	for _, c := range in.Cards {
		card := c.Card
		card.UUID, card.Model, card.RDMAPorts = Shorten(c.UUID), Shorten(c.Model), Shorten(c.RDMAPorts)
		card.NVLink, card.PCIeSwitch, card.MaxContainers = max(c.NVLink, 0), max(c.PCIeSwitch, 0), max(c.MaxContainers, 0)
		card.NUMANode = gpu.NoNUMANode
		if c.NUMANode != nil {
			card.NUMANode = max(*c.NUMANode, gpu.NoNUMANode)
		}
		if !c.Healthy {
			card.Unhealthy = cmp.Or(Shorten(c.Reason), "reported unhealthy")
		}
		out.Cards = append(out.Cards, card)
	}
	out.Adapters = slices.Clone(out.Adapters[:min(len(out.Adapters), maxAdapters)])
	for i := range out.Adapters {
		a := &out.Adapters[i]
		a.Name, a.Device, a.LinkLayer, a.PCIAddress = Shorten(a.Name), Shorten(a.Device), Shorten(a.LinkLayer), Shorten(a.PCIAddress)
		a.ActivePorts, a.NUMANode = a.ActivePorts[:min(len(a.ActivePorts), maxAdapters)], max(a.NUMANode, gpu.NoNUMANode)
	}
	if err := out.check(); err != nil {
		return err
	}
	*inv = out
	return nil
}

// check validates an inventory before it is written and after it is read.
func (inv Inventory) check() error {
	if n := len(inv.Cards); n > gpu.MaxNodeCards {
		return fmt.Errorf("%d cards, want %d at most", n, gpu.MaxNodeCards)
	}
	seen := make(map[int]bool, len(inv.Cards))
	for _, c := range inv.Cards {
		switch {
		case c.Index < 0 || c.Index > maxCard:
			return fmt.Errorf("card index %d is not within 0 to %d", c.Index, maxCard)
		case seen[c.Index]:
			return fmt.Errorf("duplicate card index %d", c.Index)
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

// ParseInventory parses the inventory in a node's annotations. It returns ErrNoInventory if there is none.
func ParseInventory(annotations map[string]string) (Inventory, error) {
	text, ok := annotations[AnnotationInventory]
	if !ok {
		return Inventory{}, ErrNoInventory
	}
	var inv Inventory
	if err := json.Unmarshal([]byte(text), &inv); err != nil {
		return Inventory{}, fmt.Errorf("annotation %s: %s", AnnotationInventory, Shorten(err.Error())) // It can have a number of any length.
	}
	return inv, nil
}

// memory returns the sum over all cards, healthy or not, which is the kubelet's capacity.
func (inv Inventory) memory() gpu.Memory {
	var sum gpu.Memory
	for _, c := range inv.Cards {
		sum = sum.Add(c.Memory)
	}
	return sum
}

// Node is the part of a Node object that concerns the sharing of GPU memory.
type Node struct {
	// Unit is zero if unknown.
	Unit gpu.Unit
	// Cards is empty for a node that shares no cards.
	Cards []gpu.Card
	// WholeCards is true if the node offers its cards by NVIDIA's device plugin or DRA driver as well as by aliyun.com/gpu-mem. Such
	// a node must not be used.
	WholeCards bool
	// Adapters are the inventory's; nil if it isn't used.
	Adapters []gpu.Adapter
	// Isolation is the inventory's; empty if shares are not enforced, or if the inventory isn't used.
	Isolation string
	// Features are the inventory's; nil if it isn't used.
	Features []string
	// Simulated is the inventory's; false if it isn't used.
	Simulated bool
	// Problem is not nil if the inventory is invalid or contradicts the capacity, or if gpu-count is too large. It says what is used.
	Problem error
}

// ParseNode returns a node's cards.
//
// A valid inventory is used, unless both its number of cards and the sum of their memory differ from gpu-count and gpu-mem.
// gpu-mem alone is not reliable: it lags behind the inventory when a card's memory changes, and is zero while the plugin is
// not running. If both differ, or if there is no valid inventory, the node runs the original gpushare plugin, possibly after
// ours, which left its annotation. Then the node has gpu-count equal cards of gpu-mem / gpu-count each. A gpu-count above
// gpu.MaxNodeCards counts as none.
func ParseNode(node *corev1.Node) Node {
	capacity := node.Status.Capacity
	memory, count := memoryOf(capacity, ResourceMemory), int64(memoryOf(capacity, ResourceCount))
	out := Node{WholeCards: memory > 0 && len(WholeCardResources(capacity)) > 0}
	if count > gpu.MaxNodeCards {
		out.Problem = fmt.Errorf("%s is %d, which is ignored: a node has %d cards at most", ResourceCount, count, gpu.MaxNodeCards)
		count = 0
	}

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
			out.Unit, out.Cards, out.Isolation, out.Features = inventory.Unit, inventory.Cards, inventory.Isolation, inventory.Features
			out.Simulated, out.Adapters = inventory.Simulated, inventory.Adapters
			out.WholeCards = out.WholeCards || memory > 0 && inventory.DRADriver != ""
			return out
		}
	} else if !errors.Is(err, ErrNoInventory) {
		out.Problem = fmt.Errorf("the inventory can't be read: %w", err)
	}
	if memory > 0 && count > 0 {
		for i := range int(count) {
			out.Cards = append(out.Cards, gpu.Card{Index: i, Memory: memory / gpu.Memory(count), NUMANode: gpu.NoNUMANode})
		}
	}
	return out
}

// poolLabels name the pool of a node: gpushare's own label, Karpenter's, and those of cloud providers, each as its documentation has it.
var poolLabels = []string{
	LabelPool, "karpenter.sh/nodepool", "cloud.google.com/gke-nodepool", "eks.amazonaws.com/nodegroup", "kubernetes.azure.com/agentpool",
	"alibabacloud.com/nodepool-id",
}

// PoolOf returns the value of the first label that names the node's pool; "" if it has none.
func PoolOf(node *corev1.Node) string {
	for _, label := range poolLabels {
		if pool := node.Labels[label]; pool != "" {
			return pool
		}
	}
	return ""
}

// WholeCardResources returns the sorted names of NVIDIA's resources in the list with a positive quantity. They allocate the
// same cards as aliyun.com/gpu-mem: whole, by time-slicing, or as MIG devices.
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

// IsWholeCard reports whether a resource is one by which NVIDIA's device plugin allocates cards: nvidia.com/gpu,
// nvidia.com/gpu.shared (time-slicing or MPS with renamed resources) or nvidia.com/mig-… (MIG with the mixed strategy).
func IsWholeCard(name corev1.ResourceName) bool {
	return name == ResourceWholeCard || name == resourceSharedCard || strings.HasPrefix(string(name), resourceMIGPrefix)
}
