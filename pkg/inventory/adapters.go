package inventory

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// sysfs is the directory in which sysfs is mounted. What can't be read there counts as not present: an adapter can vanish at any time.
// Its files are described in the kernel's Documentation/ABI/stable/sysfs-class-infiniband and Documentation/ABI/testing/sysfs-bus-pci.
type sysfs string

// pciDevice is a device's place on the PCI bus.
type pciDevice struct {
	// address is empty for a device that isn't on the bus itself, such as an auxiliary device of one that is.
	address string
	// bridges are the addresses of the devices above it, from the root port down: a PCIe switch is several.
	bridges  []string
	numaNode int
}

// pciAddress matches the name of a PCI device, such as "0000:3b:00.0".
var pciAddress = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)

// device returns the PCI device to which a link in sysfs leads.
func (s sysfs) device(link ...string) pciDevice {
	d := pciDevice{numaNode: gpu.NoNUMANode}
	path, err := filepath.EvalSymlinks(filepath.Join(append([]string{string(s)}, link...)...))
	if err != nil {
		return d
	}
	for name := range strings.SplitSeq(path, string(filepath.Separator)) {
		if pciAddress.MatchString(name) {
			d.bridges = append(d.bridges, name)
		}
	}
	if n := len(d.bridges); n > 0 && d.bridges[n-1] == filepath.Base(path) {
		d.address, d.bridges = d.bridges[n-1], d.bridges[:n-1]
	}
	if node, err := strconv.Atoi(s.read(append(link, "numa_node")...)); err == nil && node >= 0 {
		d.numaNode = node
	}
	return d
}

// read returns the content of a small file; empty if it can't be read.
func (s sysfs) read(name ...string) string {
	data, err := os.ReadFile(filepath.Join(append([]string{string(s)}, name...)...))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// list returns the names in a directory, sorted; none if it can't be read.
func (s sysfs) list(directory ...string) (names []string) {
	entries, _ := os.ReadDir(filepath.Join(append([]string{string(s)}, directory...)...))
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

// adapter is an adapter with its place on the PCI bus.
type adapter struct {
	gpu.Adapter
	pciDevice
}

const (
	classAdapters = "class/infiniband"
	classVerbs    = "class/infiniband_verbs"
	// portActive begins the file state of a port that has a link: "4: ACTIVE".
	portActive = "4:"
)

// adapters returns the RDMA adapters that containers can share, sorted by name: PCI devices with a character device, except virtual functions,
// which others give to single containers. Scalable functions, which are meant for that too, aren't PCI devices.
func (s sysfs) adapters() (found []adapter) {
	devices := map[string]string{}
	for _, device := range s.list(classVerbs) {
		devices[s.read(classVerbs, device, "ibdev")] = device
	}
	for _, name := range s.list(classAdapters) {
		if _, err := os.Lstat(filepath.Join(string(s), classAdapters, name, "device", "physfn")); err == nil || devices[name] == "" {
			continue
		}
		a := adapter{gpu.Adapter{Name: name, Device: devices[name]}, s.device(classAdapters, name, "device")}
		if a.address == "" {
			continue
		}
		a.PCIAddress, a.NUMANode = a.address, a.numaNode
		for _, port := range s.list(classAdapters, name, "ports") {
			a.LinkLayer = cmp.Or(a.LinkLayer, s.read(classAdapters, name, "ports", port, "link_layer"))
			if n, err := strconv.Atoi(port); err == nil && strings.HasPrefix(s.read(classAdapters, name, "ports", port, "state"), portActive) {
				a.ActivePorts = append(a.ActivePorts, n)
			}
		}
		slices.Sort(a.ActivePorts)
		found = append(found, a)
	}
	return found
}

// near returns the active ports of the adapters that are nearest to the card, see gpu.Card. Adapters are nearer the more bridges they share
// with the card: below one root port, two devices are behind one switch, or behind the same switch of several.
func (card pciDevice) near(adapters []adapter) string {
	var ports []string
	most := 0
	for _, a := range adapters {
		shared := 0
		for shared < min(len(card.bridges), len(a.bridges)) && card.bridges[shared] == a.bridges[shared] {
			shared++
		}
		if len(a.ActivePorts) == 0 || shared < most || shared == 0 && (card.numaNode == gpu.NoNUMANode || card.numaNode != a.numaNode) {
			continue
		}
		if shared > most {
			most, ports = shared, nil
		}
		for _, port := range a.ActivePorts {
			ports = append(ports, fmt.Sprintf("%s:%d", a.Name, port))
		}
	}
	return strings.Join(ports, ",")
}

// adapterReader reads the adapters. The kernel asks an adapter's firmware for the state of a port, which can take a minute: then the adapters
// of the last read count, and none before the first.
type adapterReader struct {
	// reading receives the adapters from the read in progress; nil if there is none.
	reading <-chan []adapter
	last    []adapter
}

// adapterPatience is the longest time that a step waits for the adapters.
const adapterPatience = time.Second

// adapters returns the adapters that read finds, or an earlier call of it that has ended since. If it takes longer than adapterPatience, those of the
// last read count. No two reads overlap.
func (r *adapterReader) adapters(ctx context.Context, read func() []adapter) []adapter {
	started := r.reading == nil
	if started {
		r.reading = beside(read)
	}
	if found, answered := await(ctx, r.reading, adapterPatience); answered {
		r.last, r.reading = found, nil
	} else if started && ctx.Err() == nil {
		klog.FromContext(ctx).Info("Reading the state of the RDMA adapters takes long; until it ends, what was read before counts", "adapters", len(r.last))
	}
	return r.last
}

// connect sets the ports near each of the cards, and returns all adapters.
func (s sysfs) connect(devices []device, adapters []adapter) (all []gpu.Adapter) {
	for i := range devices {
		if address := devices[i].pciAddress; address != "" {
			devices[i].rdmaPorts = s.device("bus/pci/devices", address).near(adapters)
		}
	}
	for _, a := range adapters {
		all = append(all, a.Adapter)
	}
	return all
}
