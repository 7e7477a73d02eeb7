package inventory

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fakenvml"
	"github.com/gpushare/gpushare/test/fakesysfs"
)

// Two switches below a root port each. The first has another switch below it.
const (
	outer = "pci0000:00/0000:00:01.0/0000:10:00.0/"
	inner = outer + "0000:11:08.0/0000:12:00.0/"
	other = "pci0000:80/0000:80:01.0/0000:90:00.0/"
)

// TestNearAdapters: a card is near the adapters behind its own switch, of nested switches the inner one, or else those on its NUMA node. Only
// active ports count.
func TestNearAdapters(t *testing.T) {
	active := []string{"ACTIVE"}
	for name, tc := range map[string]struct {
		card     string
		numaNode int
		adapters []fakesysfs.Adapter
		want     string
	}{
		"no adapter": {card: outer + "0000:11:00.0/0000:01:00.0"},
		"behind the same switch": {outer + "0000:11:00.0/0000:01:00.0", 0, []fakesysfs.Adapter{
			{Name: "mlx5_0", Device: "uverbs0", Path: outer + "0000:11:01.0/0000:20:00.0", States: active},
			{Name: "mlx5_1", Device: "uverbs1", Path: other + "0000:91:01.0/0000:92:00.0", States: active},
		}, "mlx5_0:1"},
		"of nested switches the inner one": {inner + "0000:13:00.0/0000:01:00.0", 0, []fakesysfs.Adapter{
			{Name: "mlx5_0", Device: "uverbs0", Path: outer + "0000:11:01.0/0000:20:00.0", States: active},
			{Name: "mlx5_1", Device: "uverbs1", Path: inner + "0000:13:01.0/0000:21:00.0", States: active},
		}, "mlx5_1:1"},
		"two behind the switch, one with two ports": {outer + "0000:11:00.0/0000:01:00.0", 0, []fakesysfs.Adapter{
			{Name: "mlx5_0", Device: "uverbs0", Path: outer + "0000:11:01.0/0000:20:00.0", States: []string{"ACTIVE", "ACTIVE"}},
			{Name: "mlx5_1", Device: "uverbs1", Path: outer + "0000:11:02.0/0000:21:00.0", States: active},
		}, "mlx5_0:1,mlx5_0:2,mlx5_1:1"},
		"no active port behind the switch: the NUMA node": {outer + "0000:11:00.0/0000:01:00.0", 1, []fakesysfs.Adapter{
			{Name: "mlx5_0", Device: "uverbs0", Path: outer + "0000:11:01.0/0000:20:00.0", NUMANode: 1, States: []string{"DOWN", "INIT"}},
			{Name: "mlx5_1", Device: "uverbs1", Path: other + "0000:91:01.0/0000:92:00.0", NUMANode: 1, States: []string{"ARMED", "ACTIVE"}},
			{Name: "mlx5_2", Device: "uverbs2", Path: other + "0000:91:02.0/0000:93:00.0", NUMANode: 0, States: active},
		}, "mlx5_1:2"},
		"another NUMA node": {"pci0000:00/0000:00:01.0/0000:01:00.0", 1, []fakesysfs.Adapter{
			{Name: "mlx5_0", Device: "uverbs0", Path: "pci0000:00/0000:00:02.0/0000:20:00.0", NUMANode: 0, States: active},
		}, ""},
		"no NUMA nodes": {"pci0000:00/0000:01:00.0", -1, []fakesysfs.Adapter{
			{Name: "mlx5_0", Device: "uverbs0", Path: "pci0000:00/0000:20:00.0", NUMANode: -1, States: active},
		}, ""},
		"what no container can share": {outer + "0000:11:00.0/0000:01:00.0", 0, []fakesysfs.Adapter{
			{Name: "mlx5_0", Device: "uverbs0", Path: outer + "0000:11:01.0/0000:20:00.0", States: active, VirtualFunction: true},
			{Name: "mlx5_1", Path: outer + "0000:11:02.0/0000:21:00.0", States: active},
			{Name: "rxe0", Device: "uverbs2", Path: "virtual/net/lo", NUMANode: -1, States: active},
			{Name: "mlx5_2", Device: "uverbs3", Path: outer + "0000:11:03.0/0000:22:00.0/mlx5_core.sf.4", States: active},
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			machine := fakesysfs.Machine{Root: t.TempDir()}
			must(t, machine.AddDevice(tc.card, tc.numaNode))
			for _, a := range tc.adapters {
				must(t, machine.AddAdapter(a))
			}
			devices := []device{{pciAddress: "0000:01:00.0"}, {pciAddress: "0000:ff:00.0"}, {}}
			adapters := sysfs(machine.Root).adapters()
			sysfs(machine.Root).connect(devices, adapters)
			if name == "what no container can share" {
				expect(t, "adapters", []adapter(nil), adapters, cmp.AllowUnexported(adapter{}))
			}
			expect(t, "the card's ports, and those of cards that aren't there", [3]string{tc.want}, [3]string{devices[0].rdmaPorts, devices[1].rdmaPorts, devices[2].rdmaPorts})
		})
	}
}

var must = check.Must

// TestListAdapters: the cards are found by the addresses that the driver reports, and the inventory has the adapters.
func TestListAdapters(t *testing.T) {
	cards := []fakenvml.Card{{UUID: "GPU-0", MiB: 1024}, {UUID: "GPU-1", MiB: 1024}, {UUID: "GPU-2", MiB: 1024}}
	onMachine(t, cards, func(t *testing.T, library string, _ fakenvml.Machine) {
		machine := fakesysfs.Machine{Root: t.TempDir()}
		near := fakesysfs.Adapter{Name: "mlx5_0", Device: "uverbs3", Path: outer + "0000:11:01.0/0000:20:00.0", States: []string{"ACTIVE"}}
		must(t, machine.AddDevice(outer+"0000:11:00.0/0000:01:00.0", 0))
		must(t, machine.AddDevice(other+"0000:91:00.0/0000:02:00.0", 1))
		must(t, machine.AddAdapter(near))
		list := func(root string) (ports []string, adapters []gpu.Adapter) {
			t.Helper()
			state, err := List(t.Context(), Options{Library: library, SysfsRoot: root, Settings: Settings{Unit: gpu.MiB}})
			must(t, err)
			for _, card := range state.Cards {
				ports = append(ports, card.RDMAPorts)
			}
			return ports, state.Adapters
		}
		want := gpu.Adapter{Name: "mlx5_0", Device: "uverbs3", ActivePorts: []int{1}, LinkLayer: "InfiniBand", PCIAddress: "0000:20:00.0"}
		ports, adapters := list(machine.Root)
		expect(t, "ports", []string{"mlx5_0:1", "", ""}, ports)
		expect(t, "adapters", []gpu.Adapter{want}, adapters)

		must(t, machine.SetPort(near, 1, "DOWN"))
		want.ActivePorts = nil
		ports, adapters = list(machine.Root)
		expect(t, "ports of an adapter without a link", []string{"", "", ""}, ports)
		expect(t, "an adapter without a link", []gpu.Adapter{want}, adapters)

		for what, root := range map[string]string{"a directory without sysfs": t.TempDir(), "no directory": ""} {
			ports, adapters = list(root)
			expect(t, what+": ports", []string{"", "", ""}, ports)
			expect(t, what+": adapters", []gpu.Adapter(nil), adapters)
		}
	})
}

// TestSlowAdapters: while the adapters are read, the last result counts, no step waits long, and no other read begins.
func TestSlowAdapters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r adapterReader
		reads, name, answer := 0, "mlx5_0", make(chan struct{}, 1)
		read := func() []adapter {
			reads++
			found := []adapter{{Adapter: gpu.Adapter{Name: name}}}
			<-answer
			return found
		}
		step := func(what, want string, waits time.Duration, reading int) {
			t.Helper()
			start, got := time.Now(), ""
			for _, a := range r.adapters(t.Context(), read) {
				got += a.Name
			}
			took := time.Since(start)
			synctest.Wait()
			if got != want || took != waits || reads != reading {
				t.Errorf("%s: got %q after %v in read %d, want %q after %v in read %d", what, got, took, reads, want, waits, reading)
			}
		}
		step("the first read hangs", "", adapterPatience, 1)
		step("it still does", "", adapterPatience, 1)
		answer <- struct{}{}
		step("it has ended", "mlx5_0", 0, 1)
		name = "mlx5_1"
		answer <- struct{}{}
		step("another one answers at once", "mlx5_1", 0, 2)
		name = "mlx5_2"
		step("a later one hangs", "mlx5_1", adapterPatience, 3)
		answer <- struct{}{}
	})
}

// TestHangingAdapter: an adapter whose firmware doesn't answer takes no card away.
func TestHangingAdapter(t *testing.T) {
	onMachine(t, []fakenvml.Card{{UUID: "GPU-0", MiB: 1024}}, func(t *testing.T, library string, _ fakenvml.Machine) {
		machine := fakesysfs.Machine{Root: t.TempDir()}
		must(t, machine.AddAdapter(fakesysfs.Adapter{Name: "mlx5_0", Device: "uverbs0", Path: outer + "0000:11:01.0/0000:20:00.0", States: []string{"ACTIVE"}}))
		state := filepath.Join(machine.Root, "class/infiniband/mlx5_0/ports/1/state")
		must(t, os.Remove(state))
		must(t, syscall.Mkfifo(state, 0o600)) // Its reader waits for a writer, and there is none.
		found, err := List(t.Context(), Options{Library: library, SysfsRoot: machine.Root, Settings: Settings{Unit: gpu.MiB}})
		must(t, err)
		expect(t, "cards", []gpu.Card{{UUID: "GPU-0", Memory: 1024}}, found.Cards)
		writer, err := os.OpenFile(state, os.O_WRONLY|syscall.O_NONBLOCK, 0) // It fails unless a read waits, and ends that one.
		must(t, err)
		must(t, writer.Close())
	})
}

// TestCardWithoutAddress: a card whose PCI address the driver doesn't report keeps its ports.
func TestCardWithoutAddress(t *testing.T) {
	r := newRoster(Options{Settings: Settings{Unit: gpu.MiB, QuietPeriod: time.Minute}})
	after := func(address, ports string) string {
		d := good(0, "a")
		d.pciAddress, d.rdmaPorts = address, ports
		r.list([]device{d}, time.Unix(0, 0))
		return r.state().Cards[0].RDMAPorts
	}
	expect(t, "with an address", "mlx5_0:1", after("0000:01:00.0", "mlx5_0:1"))
	expect(t, "without one", "mlx5_0:1", after("", ""))
	expect(t, "with one, and no port is active", "", after("0000:01:00.0", ""))
}

// FuzzAdapters: whatever the files of an adapter have, a card gets ports only if one is active, as valid text, and the NUMA node is valid.
func FuzzAdapters(f *testing.F) {
	f.Add("mlx5_0", "1", "4: ACTIVE\n", "InfiniBand\n", "0\n")
	f.Add("mlx5_0", "1", " 4: ACTIVE\n", "", "0\n")
	f.Add("mlx5_0", "x", "4: ACTIVE", "", "-1")
	f.Add("mlx5_0", "-1", "4", "Ethernet", "99999999999999999999")
	f.Add("mlx5_0", "007", "1: DOWN\n", "\xff", "")
	f.Fuzz(func(t *testing.T, ibdev, port, state, linkLayer, numaNode string) {
		if port == "" || len(port) > 100 || strings.ContainsAny(port, "/\x00") || port == "." || port == ".." {
			return // No name of a directory.
		}
		root := t.TempDir()
		machine := fakesysfs.Machine{Root: root}
		must(t, machine.AddDevice(outer+"0000:11:00.0/0000:01:00.0", 0))
		must(t, machine.AddAdapter(fakesysfs.Adapter{Name: "mlx5_0", Device: "uverbs0", Path: outer + "0000:11:01.0/0000:20:00.0", States: nil}))
		at := filepath.Join(root, "class/infiniband/mlx5_0")
		must(t, os.MkdirAll(filepath.Join(at, "ports", port), 0o755))
		for file, text := range map[string]string{
			filepath.Join(at, "ports", port, "state"): state, filepath.Join(at, "ports", port, "link_layer"): linkLayer,
			filepath.Join(at, "device/numa_node"): numaNode, filepath.Join(root, "class/infiniband_verbs/uverbs0/ibdev"): ibdev,
		} {
			must(t, os.WriteFile(file, []byte(text), 0o600))
		}
		devices := []device{{pciAddress: "0000:01:00.0"}}
		adapters := sysfs(root).connect(devices, sysfs(root).adapters())
		if ports := devices[0].rdmaPorts; ports != "" && (!strings.HasPrefix(strings.TrimSpace(state), "4:") || len(adapters) != 1 || !utf8.ValidString(ports)) {
			t.Errorf("ports %q of adapters %v", ports, adapters)
		}
		for _, a := range adapters {
			if a.NUMANode < gpu.NoNUMANode {
				t.Errorf("NUMA node %d", a.NUMANode)
			}
		}
	})
}
