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
	// Runtime is the node's container runtime with its version, as the Node object has it.
	Runtime string
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

// Backend implements a mode. A new mode needs:
//
//  1. Its name and rules in pkg/protocol/isolation.go. Filter, diagnosis, page and kubectl inspect ask these. Rules that only MPS has had so far
//     name MPS in their texts (pkg/reasons/reason.go; for MaxContainers also text.go in pkg/diagnosis and causes.js in pkg/webui).
//  2. Its Mode above, and its Backend, in NewBackends below.
//  3. What its Backend must know of a card: a field of Card, which isolator.Ask in pkg/deviceplugin reads from the driver, and isolator.card there
//     sets. Most fields of Card are of one mode.
//  4. If Apply returns mounts, a check that the container has no volume there. isolator.Isolate checks protocol.SharedMemory, and no other path.
//  5. In the chart values.schema.json, the mounts for what its Backend reads of the machine, and the templates that name modes:
//     device-plugin-daemonset.yaml, mps-daemonset.yaml and _mistakes.tpl; if it has pods of its own, also networkpolicies.yaml and monitors.yaml.
//  6. docs/limits.md, docs/node.md, docs/glossary.md, docs/metrics.md (gpushare_device_plugin_isolation_mode), CHANGELOG.md and the help of --isolation;
//     docs/events.md for each reason that it adds, and docs/monitoring.md if a change to the mode can make an alert fire.
//  7. Tests: of its Backend, and cases in TestModeOf and TestParseMode, here; cases in TestIsolation, TestIsolationNotReady, TestIsolationChanges and
//     TestPrintedInventory in pkg/deviceplugin, and in chart_test.go in test/install; the text of the error in cmd/gpushare-device-plugin/options_test.go;
//     its limits on a real kubelet, as TestMPS in test/nodee2e.
type Backend interface {
	// Ready returns why a container on this card would not be limited; nil if it would be.
	Ready(card Card) error
	// Apply returns what a container with these shares gets.
	Apply(shares []Share) (Edits, error)
	// LimitOf reports whether a container with these edits is limited by the mode, also if an earlier version of the plugin made them. limit is what
	// the driver can be asked for, in bytes for each card; 0 if the limit can't be read back.
	LimitOf(edits Edits) (limit uint64, limited bool)
	// CheckInForce returns why a limit on this card that can't be read back may not be in force; nil if it is, or if that isn't known.
	CheckInForce(card Card) error
	// SetShared sets which cards the node shares, by UUID, while the mode is in force.
	SetShared(uuids []string) error
	// MaxContainers returns how many containers can have a share of the card; 0 if there is no such bound.
	MaxContainers(card Card) int
}

// Backends are the backends of all modes. Containers that were started in an earlier mode keep their limits, so parts of a mode matter in the
// others too.
type Backends struct {
	of map[Mode]Backend
	// limits is the specification of mode driver, daemons are those of mode mps.
	limits  *limitSpec
	daemons MPSDirectory
}

// NewBackends returns the backends.
func NewBackends(o Options) *Backends {
	devices := newCDIDevices(o.SpecDirs)
	b := &Backends{limits: &limitSpec{}, daemons: o.MPS}
	if n := len(o.SpecDirs); n > 0 {
		b.limits.dir = o.SpecDirs[n-1]
	}
	b.of = map[Mode]Backend{
		None:   none{daemons: b.daemons},
		Driver: &driver{daemons: b.daemons, cgroups: o.CgroupRoot, devices: devices, limits: b.limits},
		MPS:    mps{daemons: b.daemons},
	}
	if o.CardsByCDI {
		b.of[None], b.of[MPS] = byCDI{b.of[None], devices}, byCDI{b.of[MPS], devices}
	}
	return b
}

// Of returns the backend of a mode.
func (b *Backends) Of(mode Mode) Backend { return b.of[mode] }

// ModeOf returns the mode that limits a container with these edits, and the limit that its backend returns; an empty mode if none does.
func (b *Backends) ModeOf(edits Edits) (mode Mode, limit uint64) {
	for mode, backend := range b.of {
		if limit, ok := backend.LimitOf(edits); ok {
			return mode, limit
		}
	}
	return "", 0
}

// KeepLimits makes sure that containers can be started again that have these limits, which LimitOf returned: other programs can remove the
// specification of limits.
func (b *Backends) KeepLimits(limits []uint64) error { return b.limits.Add(limits...) }

// ServerPIDs returns the IDs of the processes whose memory on the card is used by no container in particular: those of its MPS daemon. Without a
// supervisor there is none, and others can have the process IDs.
func (b *Backends) ServerPIDs(uuid string) []int {
	status, err := b.daemons.currentStatus(uuid)
	if err != nil {
		return nil
	}
	return status.Servers
}

// byCDI is a mode in which containers get their card as a CDI device.
type byCDI struct {
	Backend
	devices *cdiDevices
}

// Ready implements Backend.
func (b byCDI) Ready(card Card) error {
	if err := b.Backend.Ready(card); err != nil {
		return err
	}
	_, err := b.devices.hooks(CardKind + "=" + card.Device)
	return err
}

// none is the mode without limits.
type none struct {
	noLimits
	daemons MPSDirectory
}

// Ready implements Backend. It rejects a card that mode mps has left in its compute mode.
func (n none) Ready(card Card) error { return n.daemons.leftoverComputeMode(card) }

// noLimits is what a Backend does that limits nothing. A mode embeds it for what the mode doesn't need.
type noLimits struct{}

func (noLimits) Apply([]Share) (Edits, error) { return Edits{}, nil }
func (noLimits) LimitOf(Edits) (uint64, bool) { return 0, false }
func (noLimits) CheckInForce(Card) error      { return nil }
func (noLimits) SetShared([]string) error     { return nil }
func (noLimits) MaxContainers(Card) int       { return 0 }
