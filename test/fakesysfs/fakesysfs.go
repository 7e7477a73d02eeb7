// Package fakesysfs writes the part of sysfs that shows PCI devices and RDMA adapters, with the links and the text that the kernel's files have.
package fakesysfs

import (
	"os"
	"path/filepath"
	"strconv"
)

// Machine is a directory with the files of a machine.
type Machine struct{ Root string }

// Adapter is an RDMA adapter.
type Adapter struct {
	// Name and Device are as "mlx5_0" and "uverbs0". Without a Device it has no character device.
	Name, Device string
	// Path is its place on the PCI bus, as "pci0000:00/0000:00:01.0/0000:02:00.0"; of a virtual device it is "virtual/net/lo".
	Path string
	// NUMANode is -1 if the machine has no NUMA nodes.
	NUMANode int
	// States are the states of its ports, as "ACTIVE" or "DOWN". The first one is port 1.
	States []string
	// VirtualFunction is true for a virtual function of another device.
	VirtualFunction bool
}

// states are the numbers that the kernel writes before the names of states.
var states = map[string]string{"DOWN": "1", "INIT": "2", "ARMED": "3", "ACTIVE": "4"}

// AddDevice adds a PCI device.
func (m Machine) AddDevice(path string, numaNode int) error {
	if err := m.write(strconv.Itoa(numaNode), "devices", path, "numa_node"); err != nil {
		return err
	}
	return m.link(filepath.Join("devices", path), "bus/pci/devices", filepath.Base(path))
}

// AddAdapter adds an adapter.
func (m Machine) AddAdapter(a Adapter) error {
	if err := m.AddDevice(a.Path, a.NUMANode); err != nil {
		return err
	}
	at := filepath.Join("devices", a.Path, "infiniband", a.Name)
	for i, state := range a.States {
		if err := m.SetPort(a, i+1, state); err != nil {
			return err
		}
		if err := m.write("InfiniBand", at, "ports", strconv.Itoa(i+1), "link_layer"); err != nil {
			return err
		}
	}
	if err := m.link(filepath.Join("devices", a.Path), at, "device"); err != nil {
		return err
	}
	if a.VirtualFunction {
		if err := m.link(filepath.Join("devices", a.Path), "devices", a.Path, "physfn"); err != nil {
			return err
		}
	}
	if a.Device != "" {
		if err := m.write(a.Name, "class/infiniband_verbs", a.Device, "ibdev"); err != nil {
			return err
		}
	}
	return m.link(at, "class/infiniband", a.Name)
}

// SetPort changes the state of one of the adapter's ports.
func (m Machine) SetPort(a Adapter, port int, state string) error {
	return m.write(states[state]+": "+state, "devices", a.Path, "infiniband", a.Name, "ports", strconv.Itoa(port), "state")
}

func (m Machine) write(text string, name ...string) error {
	path := filepath.Join(append([]string{m.Root}, name...)...)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(text+"\n"), 0o600)
}

// link makes a relative link, as sysfs has.
func (m Machine) link(target string, name ...string) error {
	path := filepath.Join(append([]string{m.Root}, name...)...)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	relative, err := filepath.Rel(filepath.Dir(path), filepath.Join(m.Root, target))
	if err != nil {
		return err
	}
	return os.Symlink(relative, path)
}
