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

// defaultLibrary is what the dynamic linker is asked for when no path is given.
const defaultLibrary = "libnvidia-ml.so.1"

// ErrNoLibrary says that NVIDIA's management library can't be loaded: mostly, that the node has no NVIDIA driver.
var ErrNoLibrary = errors.New("no NVIDIA driver library")

// errMismatch means that the driver was exchanged while this program had the library of the one before loaded. The library
// stays loaded until the program ends, so waiting doesn't help.
var errMismatch = errors.New("the library doesn't match the running driver, which was exchanged under it: only a restart of this program loads the new one")

// unusable is why a card that answers every question can't be used. Asking through a new session would change nothing.
type unusable string

func (u unusable) Error() string { return string(u) }

const (
	// Containers that are given the UUID of a card in MIG mode find no card to compute on.
	errMIG unusable = "MIG mode is on, its memory belongs to MIG devices"
	// Cards that share the machine's memory (GB10 and the like) report none of their own.
	errNoMemory unusable = "the driver reports no memory of its own for it: set --card-memory"
)

// recoveryAction is what the driver says that a card needs before it can be used again (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION).
type recoveryAction int

const (
	recoveryUnknown recoveryAction = iota - 1
	recoveryNone
	recoveryReset
	recoveryReboot
	recoveryDrainPeers
	recoveryDrainAndReset
)

// err returns why the card can't be used before the action was taken, nil where none is needed or known.
func (a recoveryAction) err() error {
	switch a {
	case recoveryUnknown, recoveryNone:
		return nil
	case recoveryReset:
		return unusable("the driver asks for a reset of the card")
	case recoveryReboot:
		return unusable("the driver asks for a restart of the machine")
	case recoveryDrainPeers:
		return unusable("the driver asks to end all peer-to-peer traffic of the card")
	case recoveryDrainAndReset:
		return unusable("the driver asks to drain the card and to reset it")
	}
	return unusable(fmt.Sprintf("the driver asks for recovery action %d", a))
}

// requiredSymbols are called without asking: the bindings end the process when a symbol isn't there.
var requiredSymbols = []string{
	"nvmlInit_v2",
	"nvmlShutdown",
	"nvmlErrorString",
	"nvmlDeviceGetCount_v2",
	"nvmlDeviceGetHandleByIndex_v2",
	"nvmlDeviceGetUUID",
	"nvmlDeviceGetName",
	"nvmlDeviceGetMemoryInfo",
	"nvmlDeviceGetSupportedEventTypes",
	"nvmlDeviceRegisterEvents",
	"nvmlEventSetCreate",
	"nvmlEventSetWait_v2",
	"nvmlEventSetFree",
}

// Symbols that came with later drivers; without them there is nothing to tell.
const (
	symbolMemoryAffinity = "nvmlDeviceGetMemoryAffinity"
	symbolMIGMode        = "nvmlDeviceGetMigMode"
	symbolFieldValues    = "nvmlDeviceGetFieldValues"
)

// device is what the driver says of one card now.
type device struct {
	index int
	// uuid is empty where the card couldn't even tell that.
	uuid  string
	model string
	// bytes is the card's total memory.
	bytes    uint64
	numaNode int
	// err is why the card can't be used; the fields read before it happened are set.
	err error
	// lost means that the driver has lost the card, or works with it only after a reset.
	lost bool
	// recovery is what the driver asks for.
	recovery recoveryAction

	handle nvml.Device
}

// driver is an initialized NVML. It may be used by one goroutine at a time.
type driver struct {
	lib nvml.Interface
	// hasAffinity, hasMIG and hasFields report whether the library has the function.
	hasAffinity, hasMIG, hasFields bool

	// watched are the UUIDs of the cards whose events are waited for, nil while there is no watch. set is nil too where
	// none of them reports events.
	watched []string
	set     nvml.EventSet
	uuids   map[nvml.Device]string
	// failed are the cards of the watch that failed last.
	failed []string
}

// openDriver loads the library at path, or the one that the dynamic linker finds where path is empty, and initializes
// it.
func openDriver(path string) (*driver, error) {
	if path == "" {
		path = defaultLibrary
	}
	// The bindings tell neither why a library can't be loaded nor, before calling it, what it lacks.
	library := dl.New(path, dl.RTLD_LAZY|dl.RTLD_LOCAL)
	if err := library.Open(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoLibrary, err)
	}
	defer func() { _ = library.Close() }() // the bindings hold it by themselves
	for _, symbol := range requiredSymbols {
		if err := library.Lookup(symbol); err != nil {
			return nil, fmt.Errorf("%w: %s is none or too old: %w", ErrNoLibrary, path, err)
		}
	}

	d := &driver{
		lib:         nvml.New(nvml.WithLibraryPath(path)),
		hasAffinity: library.Lookup(symbolMemoryAffinity) == nil,
		hasMIG:      library.Lookup(symbolMIGMode) == nil,
		hasFields:   library.Lookup(symbolFieldValues) == nil,
	}
	switch ret := d.lib.Init(); ret {
	case nvml.SUCCESS:
		return d, nil
	case nvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return nil, fmt.Errorf("initialize the NVIDIA driver library: %w: %w", ret, errMismatch)
	default:
		return nil, fmt.Errorf("initialize the NVIDIA driver library: %w", ret)
	}
}

// close ends the session. The driver can't be used afterwards.
func (d *driver) close() error {
	d.unwatch()
	if ret := d.lib.Shutdown(); ret != nvml.SUCCESS {
		return fmt.Errorf("shut the NVIDIA driver library down: %w", ret)
	}
	return nil
}

// devices lists the cards. One that can't be read is listed with its error.
func (d *driver) devices() ([]device, error) {
	n, ret := d.lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("count the cards: %w", ret)
	}
	devices := make([]device, n)
	for i := range devices {
		devices[i] = d.read(i)
	}
	return devices, nil
}

// read asks one card who it is, how much memory it has and what it needs. The memory doubles as the probe of its health:
// unlike the name, it is no constant that the library could answer without the card.
func (d *driver) read(index int) device {
	c := device{index: index, numaNode: gpu.NoNUMANode, recovery: recoveryUnknown}
	fail := func(what string, ret nvml.Return) device {
		c.err = fmt.Errorf("%s: %w", what, ret)
		c.lost = ret == nvml.ERROR_GPU_IS_LOST || ret == nvml.ERROR_RESET_REQUIRED
		return c
	}
	var ret nvml.Return
	if c.handle, ret = d.lib.DeviceGetHandleByIndex(index); ret != nvml.SUCCESS {
		return fail("open the card", ret)
	}
	if c.uuid, ret = c.handle.GetUUID(); ret != nvml.SUCCESS {
		c.uuid = ""
		return fail("read its UUID", ret)
	}
	if c.model, ret = c.handle.GetName(); ret != nvml.SUCCESS {
		c.model = "" // for people only
	}
	c.numaNode = d.numaNode(c.handle)
	memory, ret := c.handle.GetMemoryInfo()
	switch ret {
	case nvml.SUCCESS:
		c.bytes = memory.Total
	case nvml.ERROR_NOT_SUPPORTED: // It shares the machine's memory.
	default:
		return fail("read its memory", ret)
	}
	c.recovery = d.recoveryAction(c.handle)
	c.err = c.recovery.err()
	if d.hasMIG {
		// NOT_SUPPORTED is the answer of cards that know no MIG.
		if mode, _, ret := c.handle.GetMigMode(); ret == nvml.SUCCESS && mode == nvml.DEVICE_MIG_ENABLE {
			c.err = errMIG
		}
	}
	return c
}

// recoveryAction returns what the driver asks for. Older drivers don't know the question.
func (d *driver) recoveryAction(handle nvml.Device) recoveryAction {
	if !d.hasFields {
		return recoveryUnknown
	}
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

// numaNode returns the one NUMA node that is nearest to the card. nvmlDeviceGetNumaNodeId would be another question:
// which node the card's own memory is, on machines where it is one.
func (d *driver) numaNode(handle nvml.Device) int {
	const maxNodes = 1024 // the largest CONFIG_NODES_SHIFT of Linux
	if !d.hasAffinity {
		return gpu.NoNUMANode
	}
	set, ret := handle.GetMemoryAffinity(maxNodes, nvml.AFFINITY_SCOPE_NODE)
	if ret != nvml.SUCCESS {
		return gpu.NoNUMANode
	}
	node := gpu.NoNUMANode
	for i, word := range set {
		switch {
		case word == 0:
		case node != gpu.NoNUMANode || bits.OnesCount(word) > 1:
			return gpu.NoNUMANode // equally near to several
		default:
			node = i*bits.UintSize + bits.TrailingZeros(word)
		}
	}
	return node
}

// watch has wait tell the Xid errors of the cards that have no error. It does nothing where those are watched already;
// else what waits to be delivered is lost. A card whose events can't be had gets an error, unless it just doesn't
// report any. The very cards whose watch has just failed are left alone this time: it might fail at once, without end.
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
			return fmt.Errorf("create a set of events: %w", ret)
		}
		uuids, failed := register(set, devices)
		if failed || len(uuids) == 0 {
			_ = set.Free()
			set = nil
		}
		if failed {
			continue // with a card less; a failed registration leaves the set unusable
		}
		d.watched, d.set, d.uuids = wanted, set, uuids
		return nil
	}
}

// readable returns the UUIDs of the cards without an error, never nil.
func readable(devices []device) []string {
	uuids := make([]string, 0, len(devices))
	for _, c := range devices {
		if c.err == nil {
			uuids = append(uuids, c.uuid)
		}
	}
	return uuids
}

// register adds the cards to the set, and returns those that report events. It stops at the first that fails, and notes
// the error there.
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
			uuids[c.handle] = c.uuid
		}
		if ret != nvml.SUCCESS && ret != nvml.ERROR_NOT_SUPPORTED {
			c.err = fmt.Errorf("watch its errors: %w", ret)
			return nil, true
		}
	}
	return uuids, false
}

// unwatch ends what watch began.
func (d *driver) unwatch() {
	if d.set != nil {
		_ = d.set.Free()
	}
	d.watched, d.set, d.uuids = nil, nil, nil
}

// watching says whether there is anything to wait for.
func (d *driver) watching() bool { return d.set != nil }

// wait returns the Xid errors that the watched cards reported, waiting for the first one at most the given time. A
// failure ends the watch; what had been read before it is returned too.
func (d *driver) wait(timeout time.Duration) ([]event, error) {
	const most = 10000 // a bound on how long a storm can keep it here
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
			return events, fmt.Errorf("wait for events: %w", ret)
		}
		timeout = 0 // take what else is there
		if data.EventType != nvml.EventTypeXidCriticalError {
			continue
		}
		events = append(events, event{uuid: d.uuidOf(data.Device), xid: xid(data.EventData)})
	}
	return events, nil
}

// uuidOf asks the card first: that two handles of one card are equal is nothing that NVML promises. It returns an empty
// string where neither tells.
func (d *driver) uuidOf(handle nvml.Device) string {
	if uuid, ret := handle.GetUUID(); ret == nvml.SUCCESS {
		return uuid
	}
	return d.uuids[handle]
}
