package isolation

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// Mode is how a node enforces the shares of its cards.
type Mode string

// The modes, see package protocol.
const (
	None   Mode = protocol.IsolationNone
	Driver Mode = protocol.IsolationDriver
	MPS    Mode = protocol.IsolationMPS
)

// ParseMode returns the mode with this name.
func ParseMode(name string) (Mode, error) {
	names := protocol.IsolationModes()
	if slices.Contains(names, name) {
		return Mode(name), nil
	}
	last := len(names) - 1
	return "", fmt.Errorf("isolation mode %.32q: want %s or %s", name, strings.Join(names[:last], ", "), names[last])
}

// Rules returns the mode's rules.
func (m Mode) Rules() protocol.IsolationRules { return protocol.RulesOfIsolation(string(m)) }

// Card is what a backend knows of a card.
type Card struct {
	// UUID identifies the card. Device is its name in the CDI specifications of NVIDIA's toolkit: its UUID or its index.
	UUID, Device string
	// Unlimitable is why the driver can't limit memory of this card; nil if it can.
	Unlimitable error
	// Compute is what mode mps needs to know. Unreadable is why it isn't known.
	Compute    Compute
	Unreadable error
}

// Compute are a card's properties that matter for MPS.
type Compute struct {
	// Major and Minor are the compute capability.
	Major, Minor int
	// Mode is NVML's name of the compute mode.
	Mode string
}

// Share is a container's share of a card.
type Share struct {
	Card Card
	// Limit is the share of the card's memory in bytes.
	Limit uint64
	// Cores is the share of the card's computing in percent; 0 for a container that asks for none.
	Cores int
}

// Edits are what a container gets in addition to the environment that names its cards.
type Edits struct {
	Env    map[string]string
	Mounts []Mount
	// Devices are CDI devices.
	Devices []string
}

// Mount is a directory of the machine in a container.
type Mount struct{ HostPath, ContainerPath string }

// Node is what a backend knows of the node from its Node object.
type Node struct{ KubeletVersion, Runtime string }

// Backend implements a mode. A new mode needs:
//
//   - its name and rules in pkg/protocol/isolation.go. Filter, diagnosis, page and kubectl inspect ask these. Rules that only MPS has had so far name MPS
//     in their texts (pkg/reasons/reason.go; for MaxContainers also room.go in pkg/diagnosis and causes.js in pkg/webui);
//   - its Backend here, in Backends, and in the isolator of pkg/deviceplugin if it has a daemon;
//   - how the plugin finds out that its limits aren't in force, if they can't be read back: limits.go in pkg/deviceplugin, with a field in
//     pkg/allocation/record.go, which allocate.go sets and checkpoint.go restores after a restart of the plugin;
//   - values.schema.json of the chart, and the mounts for what its Backend reads of the machine; docs/limits.md, docs/node.md and the help of --isolation.
type Backend interface {
	// Ready returns why a container on this card would not be limited; nil if it would be.
	Ready(node Node, card Card) error
	// Apply returns what a container with these shares gets.
	Apply(shares []Share) (Edits, error)
	// MaxContainers returns how many containers can have a share of the card; 0 if there is no such bound.
	MaxContainers(card Card) int
}

// Backends returns the backends by mode.
func Backends(o Options) map[Mode]Backend {
	devices := newCDIDevices(o.SpecDirs)
	backends := map[Mode]Backend{None: none{o.MPS}, Driver: &driver{o, devices}, MPS: mps{o.MPS}}
	if o.CardsByCDI {
		backends[None], backends[MPS] = byCDI{backends[None], devices}, byCDI{backends[MPS], devices}
	}
	return backends
}

// byCDI is a mode in which containers get their card as a CDI device.
type byCDI struct {
	Backend
	devices *cdiDevices
}

// Ready implements Backend.
func (b byCDI) Ready(node Node, card Card) error {
	if err := b.Backend.Ready(node, card); err != nil {
		return err
	}
	_, err := b.devices.hooks(CardKind, card.Device)
	return err
}

type none struct{ daemons *MPSDaemons }

func (n none) Ready(_ Node, card Card) error { return n.daemons.Left(card) }
func (none) Apply([]Share) (Edits, error)    { return Edits{}, nil }
func (none) MaxContainers(Card) int          { return 0 }
