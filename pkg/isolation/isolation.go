package isolation

import (
	"fmt"
	"slices"
	"strings"
)

// Mode is how a node enforces the shares of its cards.
type Mode string

const (
	// None enforces nothing: containers read their share from the environment.
	None Mode = "none"
	// Driver has NVIDIA's driver limit the memory of each container's cgroup (R615 and later).
	Driver Mode = "driver"
	// MPS has a daemon of NVIDIA's Multi-Process Service for each card, which limits the memory of each process.
	MPS Mode = "mps"
)

// Modes returns all modes.
func Modes() []Mode { return []Mode{None, Driver, MPS} }

// ParseMode returns the mode with this name.
func ParseMode(name string) (Mode, error) {
	if mode := Mode(name); slices.Contains(Modes(), mode) {
		return mode, nil
	}
	var names []string
	for _, mode := range Modes() {
		names = append(names, string(mode))
	}
	last := len(names) - 1
	return "", fmt.Errorf("isolation mode %.32q: want %s or %s", name, strings.Join(names[:last], ", "), names[last])
}

// Limits reports whether the mode limits memory. A node's cards then have only the memory that can be allocated.
func (m Mode) Limits() bool { return m != None }

// LimitsAboveRequest reports whether containers can have a limit above their request. The driver attributes the memory of all clients of MPS to
// the server, so it is not known which of them uses more than its request.
func (m Mode) LimitsAboveRequest() bool { return m != MPS }

// ReadBack reports whether the driver can be asked which limit it enforces for a container's cgroup.
func (m Mode) ReadBack() bool { return m == Driver }

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

// Backend implements a mode. A new mode needs its name and rules (Modes, and the methods of Mode), its Backend (Backends, and Isolate if it has a
// daemon), which pods can't be placed on its nodes (Spec in pkg/eligibility/node.go; the texts in pkg/reasons/reason.go and pkg/diagnosis/room.go say
// "by MPS" so far), and how it is found out that its limits aren't in force (limits.go in pkg/deviceplugin, which reads limits of the driver). If its
// containers differ from others after a restart of the plugin, the record and what is read back from the kubelet's checkpoint know it
// (Allocation.MPS in pkg/allocation/record.go, checkpoint.go in pkg/deviceplugin). The extender has the modes that it must know in
// pkg/protocol/isolation.go. The help of --isolation, pkg/inspect/isolation.go, pkg/webui/assets/details.js, docs/limits.md and docs/node.md name modes. The
// chart lists them in values.schema.json, and mounts what a Backend reads of the machine.
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
