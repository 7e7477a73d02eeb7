package fakenvml_test

import (
	"debug/elf"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fakenvml"
)

var cards = []fakenvml.Card{
	{UUID: "GPU-a", Model: "Tesla V100-SXM2-16GB", MiB: 16276, NUMANode: 0},
	{UUID: "GPU-b", Model: "NVIDIA H200", MiB: 143771, NUMANode: 1},
}

// TestFake is a single test, because a process can load only one library. Each subtest has its own machine.
func TestFake(t *testing.T) {
	library := fakenvml.BuildForTest(t)
	parts := []struct {
		name string
		test func(*testing.T, nvml.Interface, fakenvml.Machine)
	}{
		{"initialization count", testInit},
		{"cards", testCards},
		{"models", testModels},
		{"failing cards", testFailingCards},
		{"bad files", testBadFiles},
		{"lines in a variable", testLines},
		{"events", testEvents},
		{"memory limits", testLimits},
		{"processes", testProcesses},
		{"compute modes", testComputeModes},
		{"connections", testConnections},
		{"many threads", testThreads},
	}
	for _, part := range parts {
		t.Run(part.name, func(t *testing.T) {
			machine := fakenvml.NewMachine(t.TempDir())
			t.Setenv(fakenvml.CardsEnv, machine.CardsFile)
			t.Setenv(fakenvml.EventsEnv, machine.EventsFile)
			t.Setenv(fakenvml.StateEnv, machine.StateDir)
			set(t, machine, cards...)
			part.test(t, nvml.New(nvml.WithLibraryPath(library)), machine)
		})
	}
}

func set(t *testing.T, machine fakenvml.Machine, cards ...fakenvml.Card) {
	t.Helper()
	check.Must(t, machine.SetCards(cards...))
}

// returns checks the return code of a call.
func returns(t *testing.T, what string, got, want nvml.Return) {
	t.Helper()
	if got != want {
		t.Errorf("%s returned %d, want %d", what, got, want)
	}
}

// start initializes the library until the test ends.
func start(t *testing.T, lib nvml.Interface) {
	t.Helper()
	if ret := lib.Init(); ret != nvml.SUCCESS {
		t.Fatalf("Init: %v", ret)
	}
	t.Cleanup(func() { returns(t, "Shutdown", lib.Shutdown(), nvml.SUCCESS) })
}

func open(t *testing.T, lib nvml.Interface, index int) nvml.Device {
	t.Helper()
	device, ret := lib.DeviceGetHandleByIndex(index)
	if ret != nvml.SUCCESS {
		t.Fatalf("DeviceGetHandleByIndex(%d): %v", index, ret)
	}
	return device
}

func testInit(t *testing.T, lib nvml.Interface, machine fakenvml.Machine) {
	returns(t, "Init", lib.Init(), nvml.SUCCESS)
	returns(t, "second Init", lib.Init(), nvml.SUCCESS)
	returns(t, "Shutdown", lib.Shutdown(), nvml.SUCCESS)
	_, ret := lib.DeviceGetCount()
	returns(t, "DeviceGetCount with one Init left", ret, nvml.SUCCESS)
	returns(t, "last Shutdown", lib.Shutdown(), nvml.SUCCESS)
	returns(t, "extra Shutdown", lib.Shutdown(), nvml.ERROR_UNINITIALIZED)
	_, ret = lib.DeviceGetCount()
	returns(t, "DeviceGetCount after Shutdown", ret, nvml.ERROR_UNINITIALIZED)
	_, ret = lib.EventSetCreate()
	returns(t, "EventSetCreate after Shutdown", ret, nvml.ERROR_UNINITIALIZED)

	check.Must(t, os.Remove(machine.CardsFile))
	returns(t, "Init without a driver", lib.Init(), nvml.ERROR_DRIVER_NOT_LOADED)
	check.Must(t, machine.Mismatch())
	returns(t, "Init with a mismatched driver", lib.Init(), nvml.ERROR_LIB_RM_VERSION_MISMATCH)
	set(t, machine)
	returns(t, "Init without cards", lib.Init(), nvml.SUCCESS)
	n, ret := lib.DeviceGetCount()
	returns(t, "DeviceGetCount", ret, nvml.SUCCESS)
	if n != 0 {
		t.Errorf("%d cards, want none", n)
	}
	set(t, machine, cards...)
	if n, _ = lib.DeviceGetCount(); n != 0 {
		t.Errorf("%d cards appeared without Init", n)
	}
	returns(t, "Shutdown", lib.Shutdown(), nvml.SUCCESS)
}

func testCards(t *testing.T, lib nvml.Interface, _ fakenvml.Machine) {
	start(t, lib)
	var got []fakenvml.Card
	n, ret := lib.DeviceGetCount()
	returns(t, "DeviceGetCount", ret, nvml.SUCCESS)
	for i := range n {
		device := open(t, lib, i)
		index, ret := device.GetIndex()
		returns(t, "GetIndex", ret, nvml.SUCCESS)
		if index != i {
			t.Errorf("index %d, want %d", index, i)
		}
		var c fakenvml.Card
		c.UUID, ret = device.GetUUID()
		returns(t, "GetUUID", ret, nvml.SUCCESS)
		c.Model, ret = device.GetName()
		returns(t, "GetName", ret, nvml.SUCCESS)
		memory, ret := device.GetMemoryInfo()
		returns(t, "GetMemoryInfo", ret, nvml.SUCCESS)
		c.MiB = memory.Total >> 20
		nodes, ret := device.GetMemoryAffinity(64, nvml.AFFINITY_SCOPE_NODE)
		returns(t, "GetMemoryAffinity", ret, nvml.SUCCESS)
		c.NUMANode = int(nodes[0]) - 1 // 1<<0 and 1<<1
		got = append(got, c)

		memory2, ret := device.GetMemoryInfo_v2()
		returns(t, "GetMemoryInfo_v2", ret, nvml.SUCCESS)
		if memory2.Total != memory.Total {
			t.Errorf("GetMemoryInfo_v2: %d bytes, want %d", memory2.Total, memory.Total)
		}
		pci, ret := device.GetPciInfo()
		returns(t, "GetPciInfo", ret, nvml.SUCCESS)
		if want := uint32(i + 1); pci.Bus != want {
			t.Errorf("PCI bus %d, want %d", pci.Bus, want)
		}
		same, ret := lib.DeviceGetHandleByUUID(c.UUID)
		returns(t, "DeviceGetHandleByUUID", ret, nvml.SUCCESS)
		if same != device {
			t.Errorf("different handle for %s", c.UUID)
		}
	}
	check.Equal(t, "the result", cards, got)
	_, ret = lib.DeviceGetHandleByIndex(n)
	returns(t, "DeviceGetHandleByIndex after the last", ret, nvml.ERROR_INVALID_ARGUMENT)
	_, ret = lib.DeviceGetHandleByUUID("GPU-z")
	returns(t, "DeviceGetHandleByUUID with an unknown UUID", ret, nvml.ERROR_NOT_FOUND)
}

// testLines: in a container the cards can be in the environment, with the node's name in the UUID. Names of nodes are longer than UUIDs.
func testLines(t *testing.T, lib nvml.Interface, _ fakenvml.Machine) {
	if err := os.Unsetenv(fakenvml.CardsEnv); err != nil { // TestFake has set it, and restores it.
		t.Fatal(err)
	}
	uuid := "GPU-simulated-" + strings.Repeat("n", 63) + "-0"
	returns(t, "Init without lines", lib.Init(), nvml.ERROR_DRIVER_NOT_LOADED)
	t.Setenv(fakenvml.LinesEnv, "GPU-a, V100")
	returns(t, "Init with an invalid line", lib.Init(), nvml.ERROR_UNKNOWN)
	t.Setenv(fakenvml.LinesEnv, uuid+", V100, 16384, -\nGPU-simulated-b, V100, 8192, -")
	start(t, lib)
	n, _ := lib.DeviceGetCount()
	memory, _ := open(t, lib, 1).GetMemoryInfo()
	if got, _ := open(t, lib, 0).GetUUID(); n != 2 || got != uuid || memory.Total != 8<<30 {
		t.Errorf("%d cards, the first %s, the second with %d bytes", n, got, memory.Total)
	}
}

func testModels(t *testing.T, lib nvml.Interface, machine fakenvml.Machine) {
	type model struct {
		name, capability string
		brand            nvml.BrandType
		architecture     nvml.DeviceArchitecture
		migDevices       int
		state            string
	}
	models := []model{
		{"Tesla V100-SXM2-16GB", "7.0", nvml.BRAND_TESLA, nvml.DEVICE_ARCH_VOLTA, 0, ""},
		{"Tesla T4", "7.5", nvml.BRAND_TESLA, nvml.DEVICE_ARCH_TURING, 0, ""},
		{"NVIDIA A100-SXM4-40GB", "8.0", nvml.BRAND_NVIDIA, nvml.DEVICE_ARCH_AMPERE, 7, "mig"},
		{"NVIDIA L4", "8.9", nvml.BRAND_NVIDIA, nvml.DEVICE_ARCH_ADA, 0, ""},
		{"NVIDIA H200", "9.0", nvml.BRAND_NVIDIA, nvml.DEVICE_ARCH_HOPPER, 0, ""},
		{"old", "2.0", nvml.BRAND_UNKNOWN, nvml.DEVICE_ARCH_UNKNOWN, 0, ""},
	}
	var all []fakenvml.Card
	for _, m := range models {
		all = append(all, fakenvml.Card{UUID: m.name, Model: m.name, State: m.state, Options: []string{"capability=" + m.capability}})
	}
	set(t, machine, all...)
	start(t, lib)
	for i, want := range models {
		device := open(t, lib, i)
		got := want
		var ret nvml.Return
		got.brand, ret = device.GetBrand()
		returns(t, "GetBrand", ret, nvml.SUCCESS)
		got.architecture, ret = device.GetArchitecture()
		returns(t, "GetArchitecture", ret, nvml.SUCCESS)
		got.migDevices, ret = device.GetMaxMigDeviceCount()
		returns(t, "GetMaxMigDeviceCount", ret, nvml.SUCCESS)
		if got != want {
			t.Errorf("the model is %+v, want %+v", got, want)
		}
		minor, ret := device.GetMinorNumber()
		returns(t, "GetMinorNumber", ret, nvml.SUCCESS)
		if minor != i {
			t.Errorf("the minor number of card %d is %d", i, minor)
		}
		_, ret = device.GetGpuInstanceProfileInfo(0)
		returns(t, "GetGpuInstanceProfileInfo", ret, nvml.ERROR_NOT_SUPPORTED)
	}
	cuda, ret := lib.SystemGetCudaDriverVersion()
	returns(t, "SystemGetCudaDriverVersion", ret, nvml.SUCCESS)
	if cuda != 13000 {
		t.Errorf("CUDA version %d, want 13000", cuda)
	}
}

func testConnections(t *testing.T, lib nvml.Interface, machine fakenvml.Machine) {
	linked := func(uuid string, numa int, options ...string) fakenvml.Card {
		return fakenvml.Card{UUID: uuid, NUMANode: numa, Options: options}
	}
	set(t, machine, linked("GPU-a", 0, "nvlink=1", "switch=1"), linked("GPU-b", 0, "nvlink=1"), linked("GPU-c", 1, "switch=1", "nvlink=2"))
	start(t, lib)
	for pair, want := range map[[2]int]struct {
		level  nvml.GpuTopologyLevel
		nvlink nvml.GpuP2PStatus
	}{
		{0, 1}: {nvml.TOPOLOGY_NODE, nvml.P2P_STATUS_OK},
		{0, 2}: {nvml.TOPOLOGY_SINGLE, nvml.P2P_STATUS_NOT_SUPPORTED},
		{1, 2}: {nvml.TOPOLOGY_SYSTEM, nvml.P2P_STATUS_NOT_SUPPORTED},
	} {
		a, b := open(t, lib, pair[0]), open(t, lib, pair[1])
		level, ret := a.GetTopologyCommonAncestor(b)
		returns(t, "GetTopologyCommonAncestor", ret, nvml.SUCCESS)
		nvlink, ret := b.GetP2PStatus(a, nvml.P2P_CAPS_INDEX_NVLINK)
		returns(t, "GetP2PStatus", ret, nvml.SUCCESS)
		if level != want.level || nvlink != want.nvlink {
			t.Errorf("cards %v have level %d and NVLink status %d, want %+v", pair, level, nvlink, want)
		}
	}
	_, ret := open(t, lib, 0).GetTopologyCommonAncestor(open(t, lib, 0))
	returns(t, "GetTopologyCommonAncestor of one card", ret, nvml.ERROR_INVALID_ARGUMENT)
}

func testFailingCards(t *testing.T, lib nvml.Interface, machine fakenvml.Machine) {
	start(t, lib)
	device := open(t, lib, 0)
	for _, c := range []struct {
		state                      string
		handle, uuid, name, memory nvml.Return
		mig, recovery              int
		supportsEvents             bool
	}{
		{state: "ok", supportsEvents: true},
		{
			state: "lost", handle: nvml.ERROR_GPU_IS_LOST, uuid: nvml.ERROR_GPU_IS_LOST, name: nvml.ERROR_GPU_IS_LOST,
			memory: nvml.ERROR_GPU_IS_LOST,
		},
		{state: "reset", name: nvml.ERROR_RESET_REQUIRED, memory: nvml.ERROR_RESET_REQUIRED},
		{state: "denied", handle: nvml.ERROR_NO_PERMISSION, supportsEvents: true},
		{state: "nomemory", memory: nvml.ERROR_UNKNOWN, supportsEvents: true},
		{state: "noevents"},
		{state: "mig", mig: 1, supportsEvents: true},
		{state: "unified", memory: nvml.ERROR_NOT_SUPPORTED, supportsEvents: true},
		{state: "wantsreset", recovery: 1, supportsEvents: true},
		{state: "norecovery", recovery: -1, supportsEvents: true},
	} {
		t.Run(c.state, func(t *testing.T) {
			set(t, machine, fakenvml.Card{UUID: "GPU-a", State: c.state}, cards[1])
			_, ret := lib.DeviceGetHandleByIndex(0)
			returns(t, "DeviceGetHandleByIndex", ret, c.handle)
			_, ret = device.GetUUID()
			returns(t, "GetUUID", ret, c.uuid)
			_, ret = device.GetName()
			returns(t, "GetName", ret, c.name)
			_, ret = device.GetMemoryInfo()
			returns(t, "GetMemoryInfo", ret, c.memory)
			if mode, _, _ := device.GetMigMode(); mode != c.mig {
				t.Errorf("MIG mode %d, want %d", mode, c.mig)
			}
			values := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
			returns(t, "GetFieldValues", device.GetFieldValues(values), c.name)
			recovery := int(values[0].Value[0])
			if nvml.Return(values[0].NvmlReturn) == nvml.ERROR_NOT_SUPPORTED {
				recovery = -1
			}
			if recovery != c.recovery {
				t.Errorf("recovery action %d, want %d", recovery, c.recovery)
			}
			if types, _ := device.GetSupportedEventTypes(); (types != 0) != c.supportsEvents {
				t.Errorf("event types %#x, want any: %v", types, c.supportsEvents)
			}
			_, ret = open(t, lib, 1).GetMemoryInfo()
			returns(t, "GetMemoryInfo of the other card", ret, nvml.SUCCESS)
		})
	}
	set(t, machine, cards[1])
	_, ret := device.GetUUID()
	returns(t, "GetUUID of a removed card", ret, nvml.ERROR_GPU_IS_LOST)
	_, ret = open(t, lib, 1).GetMemoryInfo()
	returns(t, "GetMemoryInfo of the remaining card", ret, nvml.SUCCESS)
}

// A cards file with an error makes Init fail, so that a test with such a file fails.
func testBadFiles(t *testing.T, lib nvml.Interface, machine fakenvml.Machine) {
	const line = "GPU-a, V100, 16276, 0"
	for name, test := range map[string]struct {
		text string
		want nvml.Return
	}{
		"too few fields":        {"GPU-a, V100, 16276\n", nvml.ERROR_UNKNOWN},
		"an option, no value":   {line + ", ok, more\n", nvml.ERROR_UNKNOWN},
		"no UUID":               {", V100, 16276, 0\n", nvml.ERROR_UNKNOWN},
		"a long UUID":           {strings.Repeat("x", 96) + ", V100, 16276, 0\n", nvml.ERROR_UNKNOWN},
		"memory with a unit":    {"GPU-a, V100, 16GiB, 0\n", nvml.ERROR_UNKNOWN},
		"a bad node":            {"GPU-a, V100, 16276, x\n", nvml.ERROR_UNKNOWN},
		"an unknown state":      {line + ", sleepy\n", nvml.ERROR_UNKNOWN},
		"a UUID used twice":     {line + "\n" + line + "\n", nvml.SUCCESS},
		"a long line":           {strings.Repeat(" ", 600) + line + "\n", nvml.ERROR_UNKNOWN},
		"an unknown option":     {line + ", ok, speed=fast\n", nvml.ERROR_UNKNOWN},
		"an option's bad value": {line + ", ok, reserved=all\n", nvml.ERROR_UNKNOWN},
		"no newline at the end": {line, nvml.SUCCESS},
		"comments and space":    {"\n# comment\r\n  " + line + " , ok \r\n", nvml.SUCCESS},
	} {
		t.Run(name, func(t *testing.T) {
			check.Must(t, os.WriteFile(machine.CardsFile, []byte(test.text), 0o644))
			returns(t, "Init", lib.Init(), test.want)
			if test.want == nvml.SUCCESS {
				returns(t, "Shutdown", lib.Shutdown(), nvml.SUCCESS)
			}
		})
	}
}

func testEvents(t *testing.T, lib nvml.Interface, machine fakenvml.Machine) {
	start(t, lib)
	const soon, never = 60_000, 30 // Milliseconds; the first is much longer than any wait.
	report := func(card string, xids ...int) {
		t.Helper()
		check.Must(t, machine.Xid(card, xids...))
	}
	newSet := func(indices ...int) nvml.EventSet {
		t.Helper()
		set, ret := lib.EventSetCreate()
		returns(t, "EventSetCreate", ret, nvml.SUCCESS)
		for _, i := range indices {
			returns(t, "RegisterEvents", open(t, lib, i).RegisterEvents(nvml.EventTypeXidCriticalError, set), nvml.SUCCESS)
		}
		return set
	}
	arrives := func(set nvml.EventSet, uuid string, xid uint64) {
		t.Helper()
		data, ret := set.Wait(soon)
		if ret != nvml.SUCCESS {
			t.Fatalf("Wait returned %d", ret)
		}
		got, ret := data.Device.GetUUID()
		returns(t, "GetUUID", ret, nvml.SUCCESS)
		if got != uuid || data.EventData != xid || data.EventType != nvml.EventTypeXidCriticalError {
			t.Errorf("event %+v of %s, want Xid %d of %s", data, got, xid, uuid)
		}
	}
	nothing := func(set nvml.EventSet) {
		t.Helper()
		_, ret := set.Wait(never)
		returns(t, "Wait", ret, nvml.ERROR_TIMEOUT)
	}

	report("GPU-a", 1)
	empty, both, second := newSet(), newSet(0, 1), newSet(1)
	nothing(both) // Earlier events aren't delivered.
	report("GPU-a", 79)
	report("1", 31, 48)
	arrives(both, "GPU-a", 79)
	arrives(both, "GPU-b", 31)
	arrives(both, "GPU-b", 48)
	nothing(both)
	arrives(second, "GPU-b", 31)
	arrives(second, "GPU-b", 48)
	nothing(second)
	nothing(empty)

	waited := make(chan nvml.EventData)
	go func() {
		data, _ := both.Wait(soon)
		waited <- data
	}()
	report("0", 94)
	if data := <-waited; data.EventData != 94 {
		t.Errorf("event %+v, want Xid 94", data)
	}
	nothing(second)

	for _, bad := range []string{"GPU-z", "2", "GPU-a 1", strings.Repeat("x", 1000)} {
		report(bad, 79)
		_, ret := second.Wait(soon)
		returns(t, "Wait with "+bad[:1], ret, nvml.ERROR_UNKNOWN)
		for ret == nvml.ERROR_UNKNOWN { // A long line is read in pieces.
			_, ret = second.Wait(0)
		}
		returns(t, "Wait after the bad line", ret, nvml.ERROR_TIMEOUT)
	}
	check.Must(t, os.WriteFile(machine.EventsFile, []byte("1 63\n1 6"), 0o644))
	arrives(second, "GPU-b", 63) // The file has shrunk.
	nothing(second)              // An incomplete line isn't read.

	report("0", 79)
	set(t, machine, fakenvml.Card{UUID: "GPU-a", State: "lost"}, cards[1])
	third := newSet(1)
	nothing(third) // The lost card isn't registered in this set.
	if ret := third.Free(); ret != nvml.SUCCESS {
		t.Errorf("Free: %v", ret)
	}
	_, ret := third.Wait(soon)
	returns(t, "Wait on a freed set", ret, nvml.ERROR_INVALID_ARGUMENT)
	for ret = nvml.SUCCESS; ret == nvml.SUCCESS || ret == nvml.ERROR_UNKNOWN; {
		_, ret = both.Wait(soon)
	}
	returns(t, "last Wait with a lost card", ret, nvml.ERROR_GPU_IS_LOST)
}

func testLimits(t *testing.T, lib nvml.Interface, machine fakenvml.Machine) {
	if os.Geteuid() != 0 {
		t.Skip("only root may set memory limits")
	}
	start(t, lib)
	const gib = 1 << 30
	a, b := open(t, lib, 0), open(t, lib, 1)
	cgroup := t.TempDir()
	inner := filepath.Join(cgroup, "inner")
	check.Must(t, os.Mkdir(inner, 0o755))
	// get returns a cgroup's limits on a card and its use.
	get := func(device nvml.Device, cgroup string, want nvml.Return) (limits nvml.MemoryLimits_v1) {
		t.Helper()
		limits, ret := device.GetMemoryLimits_v1(cgroup)
		returns(t, "GetMemoryLimits_v1", ret, want)
		limits.NameSpace = ""
		return limits
	}
	expect := func(got, want nvml.MemoryLimits_v1) {
		t.Helper()
		if got != want {
			t.Errorf("limits %+v, want %+v", got, want)
		}
	}

	get(a, cgroup, nvml.ERROR_NOT_FOUND)
	returns(t, "SetMemoryLimits_v1", a.SetMemoryLimits_v1(cgroup, 0, 4*gib), nvml.SUCCESS)
	expect(get(a, cgroup, nvml.SUCCESS), nvml.MemoryLimits_v1{HardLimit: 4 * gib})
	get(b, cgroup, nvml.ERROR_NOT_FOUND) // Another card.
	get(a, inner, nvml.ERROR_NOT_FOUND)  // Another cgroup.
	if err := machine.SetProcesses(
		fakenvml.Process{Card: "GPU-a", PID: 7, MiB: 1024, Cgroup: cgroup}, fakenvml.Process{Card: "GPU-a", PID: 8, MiB: 2048, Cgroup: inner},
		fakenvml.Process{Card: "GPU-a", PID: 9, MiB: 512, Cgroup: cgroup + "2"}, fakenvml.Process{Card: "GPU-b", PID: 7, MiB: 256, Cgroup: cgroup},
	); err != nil {
		t.Fatal(err)
	}
	expect(get(a, cgroup, nvml.SUCCESS), nvml.MemoryLimits_v1{HardLimit: 4 * gib, CurrentUsed: 3 * gib})
	returns(t, "SetMemoryLimits_v1 with the card's memory", b.SetMemoryLimits_v1(cgroup, gib, cards[1].MiB<<20), nvml.SUCCESS)
	returns(t, "SetMemoryLimits_v1 to none", a.SetMemoryLimits_v1(cgroup, 0, nvml.DEVICE_MEMORY_LIMIT_MAX), nvml.SUCCESS)
	expect(get(a, cgroup, nvml.SUCCESS), nvml.MemoryLimits_v1{HardLimit: nvml.DEVICE_MEMORY_LIMIT_MAX, CurrentUsed: 3 * gib})

	for _, c := range []struct {
		what      string
		got, want nvml.Return
	}{
		{"a soft limit above the hard one", a.SetMemoryLimits_v1(cgroup, 2*gib, gib), nvml.ERROR_INVALID_ARGUMENT},
		{"a hard limit above the card's memory", a.SetMemoryLimits_v1(cgroup, 0, cards[0].MiB<<20+1), nvml.ERROR_INVALID_ARGUMENT},
		{"a soft limit above the card's memory", a.SetMemoryLimits_v1(cgroup, 20*gib, nvml.DEVICE_MEMORY_LIMIT_MAX), nvml.ERROR_INVALID_ARGUMENT},
		{"a missing cgroup", a.SetMemoryLimits_v1(cgroup+"/missing", 0, gib), nvml.ERROR_OPERATING_SYSTEM},
		{"a relative path", a.SetMemoryLimits_v1("cgroup", 0, gib), nvml.ERROR_OPERATING_SYSTEM},
	} {
		returns(t, "SetMemoryLimits_v1 with "+c.what, c.got, c.want)
	}
	got, err := machine.Limits()
	check.Must(t, err)
	slices.SortFunc(got, func(x, y fakenvml.Limit) int { return strings.Compare(x.Card, y.Card) })
	info, err := os.Stat(cgroup)
	check.Must(t, err)
	inode := info.Sys().(*syscall.Stat_t).Ino
	want := []fakenvml.Limit{
		{Card: "GPU-a", Cgroup: cgroup, Inode: inode, Hard: fakenvml.NoLimit},
		{Card: "GPU-b", Cgroup: cgroup, Inode: inode, Soft: gib, Hard: cards[1].MiB << 20},
	}
	check.Equal(t, "the files", want, got)

	for _, c := range []struct {
		card     fakenvml.Card
		set, get nvml.Return
	}{
		{fakenvml.Card{State: "mig"}, nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_NOT_SUPPORTED},
		{fakenvml.Card{State: "lost"}, nvml.ERROR_GPU_IS_LOST, nvml.ERROR_GPU_IS_LOST},
		{fakenvml.Card{Options: []string{"limits=unsupported"}}, nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_NOT_SUPPORTED},
		{fakenvml.Card{Options: []string{"limits=denied"}}, nvml.ERROR_NO_PERMISSION, nvml.ERROR_NO_PERMISSION},
		{fakenvml.Card{Options: []string{"limits=failing"}}, nvml.ERROR_UNKNOWN, nvml.ERROR_UNKNOWN},
		{fakenvml.Card{Options: []string{"limits=ignored"}}, nvml.SUCCESS, nvml.ERROR_NOT_FOUND},
	} {
		c.card.UUID, c.card.MiB = "GPU-a", cards[0].MiB
		set(t, machine, c.card, cards[1])
		returns(t, fmt.Sprintf("SetMemoryLimits_v1 with %+v", c.card), a.SetMemoryLimits_v1(inner, 0, gib), c.set)
		_, ret := a.GetMemoryLimits_v1(inner)
		returns(t, fmt.Sprintf("GetMemoryLimits_v1 with %+v", c.card), ret, c.get)
	}
}

func testProcesses(t *testing.T, lib nvml.Interface, machine fakenvml.Machine) {
	const unavailable = math.MaxUint64
	first := cards[0]
	first.Options = []string{"reserved=276", "capability=8.6"}
	set(t, machine, first, cards[1])
	start(t, lib)
	a, b := open(t, lib, 0), open(t, lib, 1)
	list := func(do func() ([]nvml.ProcessInfo, nvml.Return)) map[uint32]uint64 {
		t.Helper()
		processes, ret := do()
		returns(t, "the list of processes", ret, nvml.SUCCESS)
		out := map[uint32]uint64{}
		for _, p := range processes {
			out[p.Pid] = p.UsedGpuMemory
		}
		return out
	}
	if got := list(a.GetComputeRunningProcesses); len(got) > 0 {
		t.Errorf("processes %v, want none", got)
	}
	if err := machine.SetProcesses(
		fakenvml.Process{Card: "GPU-a", PID: 7, MiB: 1000}, fakenvml.Process{Card: "GPU-a", PID: 8, MiB: -1},
		fakenvml.Process{Card: "GPU-a", PID: 9, MiB: 0}, fakenvml.Process{Card: "GPU-a", PID: 10, MiB: 1},
		fakenvml.Process{Card: "GPU-a", PID: 7, MiB: 2, Graphics: true}, fakenvml.Process{Card: "GPU-b", PID: 7, MiB: 3},
	); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		do   func() ([]nvml.ProcessInfo, nvml.Return)
		want map[uint32]uint64
	}{
		{"compute", a.GetComputeRunningProcesses, map[uint32]uint64{7: 1000 << 20, 8: unavailable, 9: 0, 10: 1 << 20}},
		{"graphics", a.GetGraphicsRunningProcesses, map[uint32]uint64{7: 2 << 20}},
		{"the other card", b.GetComputeRunningProcesses, map[uint32]uint64{7: 3 << 20}},
	} {
		check.Equal(t, c.name, c.want, list(c.do))
	}
	memory, ret := a.GetMemoryInfo()
	returns(t, "GetMemoryInfo", ret, nvml.SUCCESS)
	if want := (nvml.Memory{Total: 16276 << 20, Used: 1279 << 20, Free: 14997 << 20}); memory != want {
		t.Errorf("memory %+v, want %+v", memory, want)
	}
	memory2, ret := a.GetMemoryInfo_v2()
	returns(t, "GetMemoryInfo_v2", ret, nvml.SUCCESS)
	memory2.Version = 0
	if want := (nvml.Memory_v2{Total: 16276 << 20, Reserved: 276 << 20, Used: 1003 << 20, Free: 14997 << 20}); memory2 != want {
		t.Errorf("memory %+v, want %+v", memory2, want)
	}
	if major, minor, _ := a.GetCudaComputeCapability(); major != 8 || minor != 6 {
		t.Errorf("compute capability %d.%d, want 8.6", major, minor)
	}
	first.Options = []string{"processes=denied"}
	set(t, machine, first, cards[1])
	_, ret = a.GetComputeRunningProcesses()
	returns(t, "GetComputeRunningProcesses with a failure", ret, nvml.ERROR_NO_PERMISSION)
}

func testComputeModes(t *testing.T, lib nvml.Interface, machine fakenvml.Machine) {
	if os.Geteuid() != 0 {
		t.Skip("only root may set the compute mode")
	}
	start(t, lib)
	a, b := open(t, lib, 0), open(t, lib, 1)
	expect := func(device nvml.Device, uuid string, want nvml.ComputeMode) {
		t.Helper()
		got, ret := device.GetComputeMode()
		returns(t, "GetComputeMode", ret, nvml.SUCCESS)
		file, err := machine.ComputeMode(uuid)
		if got != want || file != int(want) || err != nil {
			t.Errorf("compute mode %d, in the file %d (%v), want %d", got, file, err, want)
		}
	}
	expect(a, "GPU-a", nvml.COMPUTEMODE_DEFAULT)
	returns(t, "SetComputeMode", a.SetComputeMode(nvml.COMPUTEMODE_EXCLUSIVE_PROCESS), nvml.SUCCESS)
	expect(a, "GPU-a", nvml.COMPUTEMODE_EXCLUSIVE_PROCESS)
	expect(b, "GPU-b", nvml.COMPUTEMODE_DEFAULT)
	returns(t, "SetComputeMode back", a.SetComputeMode(nvml.COMPUTEMODE_DEFAULT), nvml.SUCCESS)
	expect(a, "GPU-a", nvml.COMPUTEMODE_DEFAULT)
	returns(t, "SetComputeMode to a removed mode", a.SetComputeMode(nvml.COMPUTEMODE_EXCLUSIVE_THREAD), nvml.ERROR_NOT_SUPPORTED)
	returns(t, "SetComputeMode to an unknown mode", a.SetComputeMode(9), nvml.ERROR_INVALID_ARGUMENT)
}

// TestBeforeR615: the library of an older driver lacks the functions for memory limits.
func TestBeforeR615(t *testing.T) {
	library, err := elf.Open(fakenvml.BuildForTest(t, fakenvml.BeforeR615))
	check.Must(t, err)
	defer library.Close()
	symbols, err := library.DynamicSymbols()
	check.Must(t, err)
	has := func(name string) bool {
		return slices.ContainsFunc(symbols, func(s elf.Symbol) bool { return s.Name == name })
	}
	if !has("nvmlDeviceGetMigMode") || has("nvmlDeviceSetMemoryLimits_v1") || has("nvmlDeviceGetMemoryLimits_v1") {
		t.Errorf("symbols %v", symbols)
	}
}

func testThreads(t *testing.T, lib nvml.Interface, machine fakenvml.Machine) {
	start(t, lib)
	devices := []nvml.Device{open(t, lib, 0), open(t, lib, 1)}
	var running sync.WaitGroup
	for range 4 {
		running.Go(func() {
			for range 100 {
				set, ret := lib.EventSetCreate()
				returns(t, "EventSetCreate", ret, nvml.SUCCESS)
				for _, device := range devices {
					_ = device.RegisterEvents(nvml.EventTypeXidCriticalError, set)
					_, ret := device.GetMemoryInfo()
					if ret != nvml.SUCCESS && ret != nvml.ERROR_GPU_IS_LOST {
						t.Errorf("GetMemoryInfo returned %d", ret)
					}
				}
				_, _ = set.Wait(1)
				returns(t, "Free", set.Free(), nvml.SUCCESS)
			}
		})
	}
	broken := []fakenvml.Card{cards[0], {UUID: "GPU-b", State: "lost"}}
	for range 100 {
		set(t, machine, broken...)
		check.NoError(t, machine.Xid("0", 79, 31))
		set(t, machine, cards...)
	}
	running.Wait()
}
