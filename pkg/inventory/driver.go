package inventory

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/dl"
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// defaultLibrary is the name that is passed to the dynamic linker if no path is set.
const defaultLibrary = "libnvidia-ml.so.1"

// ErrNoLibrary means that NVIDIA's management library can't be loaded. The usual reason is a node without an NVIDIA driver.
var ErrNoLibrary = errors.New("no NVIDIA driver library")

// errMismatch means that the driver was replaced while this program had the library of the previous driver loaded. A
// library stays loaded until the program ends, so a retry doesn't help.
var errMismatch = errors.New("the library doesn't match the running driver, which was replaced: only a restart of this program loads the new library")

// unusable is why a card can't be used although it answers every call. A new session with the driver would change nothing.
type unusable string

func (u unusable) Error() string { return string(u) }

const (
	// errMIG is the reason for a card in MIG mode: a container that gets the UUID of such a card finds no compute device.
	errMIG unusable = "MIG mode is on, its memory belongs to MIG devices"
	// errNoMemory is the reason for a card that shares the machine's memory, such as GB10, and reports none of its own.
	errNoMemory unusable = "the driver reports no memory of its own for it: set --card-memory"
	// errMemoryChanged is the reason for a card whose memory has changed since the last listing.
	errMemoryChanged unusable = "the driver reports another amount of memory for it than before"
)

// recoveryAction is the action that a card needs before it can be used again, as the driver reports it
// (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION).
type recoveryAction int

const (
	recoveryUnknown recoveryAction = iota - 1
	recoveryNone
	recoveryReset
	recoveryReboot
	recoveryDrainPeers
	recoveryDrainAndReset
)

// recoveryReasons are the reasons for cards that can't be used until the action was taken.
var recoveryReasons = map[recoveryAction]unusable{
	recoveryReset:         "the driver asks for a reset of the card",
	recoveryReboot:        "the driver asks for a restart of the machine",
	recoveryDrainPeers:    "the driver asks to end all peer-to-peer traffic of the card",
	recoveryDrainAndReset: "the driver asks to drain the card and to reset it",
}

// err returns why the card can't be used until the action was taken; nil if none is needed, or the action is unknown.
func (a recoveryAction) err() error {
	if a <= recoveryNone {
		return nil
	}
	if reason, ok := recoveryReasons[a]; ok {
		return reason
	}
	return unusable(fmt.Sprintf("the driver asks for recovery action %d", a))
}

// requiredSymbols are the functions that are called without a further check; of some the bindings call a later version (_v2, _v3) if the library has
// it. Drivers have all of them since R460. They are looked up when the library is opened, because the bindings end the process if a symbol is missing.
var requiredSymbols = []string{
	"nvmlInit_v2",
	"nvmlShutdown",
	"nvmlErrorString",
	"nvmlDeviceGetCount_v2",
	"nvmlDeviceGetHandleByIndex_v2",
	"nvmlDeviceGetUUID",
	"nvmlDeviceGetName",
	"nvmlDeviceGetPciInfo",
	"nvmlDeviceGetMemoryInfo",
	"nvmlDeviceGetMemoryAffinity",
	"nvmlDeviceGetMigMode",
	"nvmlDeviceGetFieldValues",
	"nvmlDeviceGetTopologyCommonAncestor",
	"nvmlDeviceGetP2PStatus",
	"nvmlDeviceGetCudaComputeCapability",
	"nvmlDeviceGetComputeMode",
	"nvmlDeviceSetComputeMode",
	"nvmlDeviceGetComputeRunningProcesses",
	"nvmlDeviceGetGraphicsRunningProcesses",
	"nvmlDeviceGetMPSComputeRunningProcesses",
	"nvmlDeviceGetSupportedEventTypes",
	"nvmlDeviceRegisterEvents",
	"nvmlEventSetCreate",
	"nvmlEventSetFree",
	"nvmlEventSetWait",
}

// Symbols that only newer drivers have: R510, and R615 for limits.
const (
	symbolMemoryInfo = "nvmlDeviceGetMemoryInfo_v2"
	symbolSetLimits  = "nvmlDeviceSetMemoryLimits_v1"
)

// device is the state of one card as the driver reports it in one listing.
type device struct {
	index int
	// uuid is empty if the driver could not read it.
	uuid  string
	model string
	// bytes is the card's total memory; 0 if the driver reports none. reserved is the part that the driver keeps; 0 if unknown.
	bytes    uint64
	reserved uint64
	numaNode int
	// pciAddress is empty if the driver could not read it. rdmaPorts is that of gpu.Card.
	pciAddress, rdmaPorts string
	// err is the reason why the card can't be used. The fields that were read before the error are set.
	err error
	// lost is true if the driver has lost the card, or can use it only after a reset.
	lost     bool
	recovery recoveryAction
	// peers are the cards with which it is connected.
	peers peers

	handle nvml.Device
}

// driver is an initialized NVML session. It has no lock: only one goroutine may use it at a time.
type driver struct {
	lib nvml.Interface
	// hasMemoryInfo and hasLimits report whether the library has the functions that only newer drivers have.
	hasMemoryInfo, hasLimits bool

	// watched holds the UUIDs of the cards for which a watch was set up; nil without a watch. set is its event set; nil if
	// none of the cards reports events. uuids maps the handles of the cards in set to their UUIDs.
	watched []string
	set     nvml.EventSet
	uuids   map[nvml.Device]string
	// failed holds the UUIDs of the cards of the watch that failed last.
	failed []string
}

// openDriver loads the library at path, or if that is empty the one that the dynamic linker finds, and initializes it.
func openDriver(path string) (*driver, error) {
	if path == "" {
		path = defaultLibrary
	}
	// The bindings report neither why a library can't be loaded nor which symbols it lacks before the first call.
	library := dl.New(path, dl.RTLD_LAZY|dl.RTLD_LOCAL)
	if err := library.Open(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoLibrary, err)
	}
	defer func() { _ = library.Close() }() // the bindings open the library themselves
	has := func(symbol string) bool {
		return slices.ContainsFunc([]string{"", "_v2", "_v3"}, func(version string) bool { return library.Lookup(symbol+version) == nil })
	}
	for _, symbol := range requiredSymbols {
		if !has(symbol) {
			return nil, fmt.Errorf("%w: %s is not the NVIDIA driver library, or too old: it has no %s", ErrNoLibrary, path, symbol)
		}
	}
	d := &driver{lib: nvml.New(nvml.WithLibraryPath(path)), hasMemoryInfo: has(symbolMemoryInfo), hasLimits: has(symbolSetLimits)}
	switch ret := d.lib.Init(); ret {
	case nvml.SUCCESS:
		return d, nil
	case nvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return nil, fmt.Errorf("initializing the NVIDIA driver library: %w: %w", ret, errMismatch)
	default:
		return nil, fmt.Errorf("initializing the NVIDIA driver library: %w", ret)
	}
}

// close ends the session. The driver must not be used after it.
func (d *driver) close() error {
	d.unwatch()
	if ret := d.lib.Shutdown(); ret != nvml.SUCCESS {
		return fmt.Errorf("shutting down the NVIDIA driver library: %w", ret)
	}
	return nil
}

// devices lists the cards. A card that can't be read is listed with its error.
func (d *driver) devices() ([]device, error) {
	n, ret := d.lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("counting the cards: %w", ret)
	}
	devices := make([]device, n)
	for i := range devices {
		devices[i] = d.read(i)
	}
	rejectTwins(devices)
	connectAll(devices)
	return devices, nil
}

// rejectTwins makes a card unusable whose UUID an earlier card has: neither a container nor a call of the driver can name it.
func rejectTwins(devices []device) {
	first := map[string]int{}
	for i := range devices {
		d := &devices[i]
		if twin, found := first[d.uuid]; found && d.uuid != "" {
			d.err = unusable(fmt.Sprintf("it has the same UUID as card %d (%s)", twin, d.uuid))
			d.uuid, d.lost = "", false
			continue
		}
		first[d.uuid] = d.index
	}
}

// read reads the UUID, model, NUMA node, MIG mode, memory and recovery action of one card. The memory also serves as the
// health probe: unlike the name, it is not a constant that the library could return without access to the card.
func (d *driver) read(index int) device {
	c := device{index: index, numaNode: gpu.NoNUMANode, recovery: recoveryUnknown}
	fail := func(what string, ret nvml.Return) device {
		c.err = fmt.Errorf("%s: %w", what, ret)
		c.lost = ret == nvml.ERROR_GPU_IS_LOST || ret == nvml.ERROR_RESET_REQUIRED
		return c
	}
	var ret nvml.Return
	c.handle, ret = d.lib.DeviceGetHandleByIndex(index)
	if ret != nvml.SUCCESS {
		return fail("opening the card", ret)
	}
	c.uuid, ret = c.handle.GetUUID()
	if ret != nvml.SUCCESS {
		c.uuid = ""
		return fail("reading its UUID", ret)
	}
	c.model, ret = c.handle.GetName()
	if ret != nvml.SUCCESS {
		c.model = "" // the model is for display only
	}
	c.numaNode = numaNode(c.handle)
	if info, ret := c.handle.GetPciInfo(); ret == nvml.SUCCESS {
		c.pciAddress = fmt.Sprintf("%04x:%02x:%02x.0", info.Domain, info.Bus, info.Device) // As in sysfs. A card is always function 0.
	}
	// A card without MIG support returns NOT_SUPPORTED.
	if mode, _, ret := c.handle.GetMigMode(); ret == nvml.SUCCESS && mode == nvml.DEVICE_MIG_ENABLE {
		c.err = errMIG
	}
	memory, ret := c.handle.GetMemoryInfo()
	switch {
	case ret == nvml.SUCCESS:
		c.bytes = memory.Total
		if d.hasMemoryInfo {
			if detailed, ret := c.handle.GetMemoryInfo_v2(); ret == nvml.SUCCESS {
				c.reserved = detailed.Reserved
			}
		}
	case ret == nvml.ERROR_NOT_SUPPORTED: // The card shares the machine's memory.
	case ret == nvml.ERROR_NO_PERMISSION && c.err != nil: // Only privileged programs can read the memory of a card in MIG mode.
	default:
		return fail("reading its memory", ret)
	}
	c.recovery = readRecoveryAction(c.handle)
	if c.err == nil {
		c.err = c.recovery.err()
	}
	return c
}

// readRecoveryAction returns the recovery action that the driver asks for; recoveryUnknown for drivers without this field.
func readRecoveryAction(handle nvml.Device) recoveryAction {
	values := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
	if handle.GetFieldValues(values) != nvml.SUCCESS || nvml.Return(values[0].NvmlReturn) != nvml.SUCCESS {
		return recoveryUnknown
	}
	switch raw := values[0].Value[:]; nvml.ValueType(values[0].ValueType) {
	case nvml.VALUE_TYPE_UNSIGNED_INT, nvml.VALUE_TYPE_SIGNED_INT:
		return recoveryAction(binary.NativeEndian.Uint32(raw))
	case nvml.VALUE_TYPE_UNSIGNED_LONG, nvml.VALUE_TYPE_UNSIGNED_LONG_LONG, nvml.VALUE_TYPE_SIGNED_LONG_LONG:
		return recoveryAction(binary.NativeEndian.Uint64(raw))
	}
	return recoveryUnknown
}

// numaNode returns the NUMA node that is nearest to the card, or NoNUMANode if it is unknown or several are equally near.
// nvmlDeviceGetNumaNodeId returns something else: the node that the card's own memory forms on some machines.
func numaNode(handle nvml.Device) int {
	const maxNodes = 1024 // the largest CONFIG_NODES_SHIFT of Linux
	set, ret := handle.GetMemoryAffinity(maxNodes, nvml.AFFINITY_SCOPE_NODE)
	if ret != nvml.SUCCESS {
		return gpu.NoNUMANode
	}
	node := gpu.NoNUMANode
	for i, word := range set {
		switch {
		case word == 0:
		case node != gpu.NoNUMANode || bits.OnesCount(word) > 1:
			return gpu.NoNUMANode // several nodes are equally near
		default:
			node = i*bits.UintSize + bits.TrailingZeros(word)
		}
	}
	return node
}

// watch sets up a watch for the Xid errors of the cards that have no error, so that wait returns them. It does nothing if
// exactly these cards are watched already. Otherwise it replaces the watch, and events that were not yet delivered are
// lost. A card whose registration fails gets an error; a card that doesn't support events doesn't. If the last watch
// failed and was for exactly these cards, the call sets up no watch: the new watch might fail at once, again and again.
func (d *driver) watch(devices []device) error {
	for {
		wanted := readable(devices)
		if d.watched != nil && slices.Equal(d.watched, wanted) {
			return nil
		}
		if d.failed != nil && slices.Equal(d.failed, wanted) {
			d.failed = nil
			return nil
		}
		d.unwatch()
		set, ret := d.lib.EventSetCreate()
		if ret != nvml.SUCCESS {
			return fmt.Errorf("creating a set of events: %w", ret)
		}
		uuids, failed := register(set, devices)
		if failed || len(uuids) == 0 {
			_ = set.Free()
			set = nil
		}
		if failed {
			continue // without the card that failed, in a new set: a failed registration leaves the set unusable
		}
		d.watched, d.set, d.uuids = wanted, set, uuids
		return nil
	}
}

// readable returns the UUIDs of the cards without an error. The result is never nil.
func readable(devices []device) []string {
	uuids := make([]string, 0, len(devices))
	for _, c := range devices {
		if c.err == nil {
			uuids = append(uuids, c.uuid)
		}
	}
	return uuids
}

// register adds the cards without an error to the set. It returns the UUIDs of the cards that report events, by handle. It
// stops at the first card whose registration fails and stores the error in that card.
func register(set nvml.EventSet, devices []device) (uuids map[nvml.Device]string, failed bool) {
	uuids = make(map[nvml.Device]string)
	for i := range devices {
		c := &devices[i]
		if c.err != nil {
			continue
		}
		types, ret := c.handle.GetSupportedEventTypes()
		if ret == nvml.SUCCESS && types&nvml.EventTypeXidCriticalError != 0 {
			ret = c.handle.RegisterEvents(nvml.EventTypeXidCriticalError, set)
			if ret == nvml.SUCCESS {
				uuids[c.handle] = c.uuid
			}
		}
		if ret != nvml.SUCCESS && ret != nvml.ERROR_NOT_SUPPORTED {
			c.err = fmt.Errorf("watching its errors: %w", ret)
			return nil, true
		}
	}
	return uuids, false
}

// unwatch ends the watch, if there is one.
func (d *driver) unwatch() {
	if d.set != nil {
		_ = d.set.Free()
	}
	d.watched, d.set, d.uuids = nil, nil, nil
}

// watching reports whether there is an event set to wait on.
func (d *driver) watching() bool { return d.set != nil }

// wait returns the Xid errors of the watched cards. It waits for the first event for at most the timeout. A failure ends
// the watch; the events that were read before the failure are returned with the error.
func (d *driver) wait(timeout time.Duration) ([]event, error) {
	const most = 10000 // limits how long an event storm can keep the loop running
	var events []event
	for d.watching() && len(events) < most {
		data, ret := d.set.Wait(uint32(timeout.Milliseconds()))
		switch ret {
		case nvml.SUCCESS:
		case nvml.ERROR_TIMEOUT:
			return events, nil
		default:
			failed := d.watched
			d.unwatch()
			d.failed = failed
			return events, fmt.Errorf("waiting for events: %w", ret)
		}
		timeout = 0 // read the events that are already queued
		if data.EventType != nvml.EventTypeXidCriticalError {
			continue
		}
		events = append(events, event{uuid: d.uuidOf(data.Device), xid: xid(data.EventData)})
	}
	return events, nil
}

// uuidOf returns the UUID of the card behind a handle, read from the card, because NVML doesn't guarantee that two handles of
// one card are equal. It returns an empty string if the card doesn't answer and the watch doesn't have the handle.
func (d *driver) uuidOf(handle nvml.Device) string {
	if uuid, ret := handle.GetUUID(); ret == nvml.SUCCESS {
		return uuid
	}
	return d.uuids[handle]
}
