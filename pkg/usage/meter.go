package usage

import (
	"cmp"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// DefaultInterval is the default time between two measurements.
const DefaultInterval = 10 * time.Second

// Driver is what the meter asks the driver; inventory.Session implements it.
type Driver interface {
	Cards() []string
	Memory(uuid string) (used, free uint64, err error)
	Processes(uuid string) ([]inventory.Process, error)
	Limits() bool
	Limit(uuid, cgroup string) (inventory.MemoryLimit, error)
}

// Options configure a Meter. Node, Cards and Containers are required.
type Options struct {
	Node string
	// Interval is the time between two measurements, for the report only.
	Interval time.Duration
	// Cards returns the node's cards, and Containers its running containers.
	Cards      func() []gpu.Card
	Containers func() []Container
	// Servers returns the processes of a card's MPS server, which belong to no container's use. It can be nil.
	Servers func(uuid string) []int
	// Proc is the mounted proc file system, /proc by default. Cgroups is the mounted hierarchy of cgroup v2, /sys/fs/cgroup by
	// default; the figures of cgroups are omitted if it isn't one, or shows only the caller's own cgroup.
	Proc, Cgroups string
}

// Meter measures the use of the node's cards. mu guards the last report; what Report returns doesn't change. Only one goroutine
// may call Measure at a time.
type Meter struct {
	options Options
	cgroups cgroupTree

	mu   sync.Mutex
	last protocol.Usage
}

// NewMeter returns a meter without a measurement.
func NewMeter(o Options) *Meter {
	o.Proc, o.Cgroups = cmp.Or(o.Proc, "/proc"), cmp.Or(o.Cgroups, "/sys/fs/cgroup")
	m := &Meter{options: o, cgroups: cgroupTree{root: o.Cgroups}}
	m.last = build(reading{node: o.Node, interval: o.Interval, problems: []string{"the driver has not been read yet"}})
	return m
}

// Report returns the last measurement. If the driver no longer answers, the report is old, as its Time shows.
func (m *Meter) Report() protocol.Usage {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.last
}

// Measure reads the driver and the processes that it lists.
func (m *Meter) Measure(driver Driver) {
	report := build(m.read(driver))
	m.mu.Lock()
	defer m.mu.Unlock()
	m.last = report
}

func (m *Meter) read(driver Driver) reading {
	r := reading{at: time.Now(), interval: m.options.Interval, node: m.options.Node, containers: m.options.Containers()}
	index := map[string]int{}
	for _, card := range m.options.Cards() {
		index[card.UUID] = card.Index
	}
	for _, uuid := range driver.Cards() {
		i, ok := index[uuid]
		if !ok {
			continue // The card was just found. The next measurement has it.
		}
		card := m.readCard(driver, uuid)
		card.index = i
		r.cards = append(r.cards, card)
	}
	m.readLimits(driver, &r)
	if problem := unresolved(r.cards, m.seesHost()); problem != "" {
		r.problems = append(r.problems, problem)
	}
	return r
}

// seesHost reports whether the processes in Proc can be the machine's. A container without hostPID has a namespace of its own, in
// which its first process is number 1.
func (m *Meter) seesHost() bool { return m.options.Proc != "/proc" || os.Getpid() != 1 }

// readCard reads what the driver says about a card, and the owners of its processes.
func (m *Meter) readCard(driver Driver, uuid string) cardReading {
	card := cardReading{uuid: uuid}
	used, free, err := driver.Memory(uuid)
	card.used = used
	if err == nil {
		card.free = &free
	} else if !errors.Is(err, inventory.ErrUnsupported) {
		card.problem = err
		return card
	}
	listed, err := driver.Processes(uuid)
	if err != nil {
		card.problem = err
		return card
	}
	var servers []int
	if m.options.Servers != nil {
		servers = m.options.Servers(uuid)
	}
	for _, p := range listed {
		if slices.Contains(servers, p.PID) {
			card.mps += knownBytes(p.Bytes)
			continue
		}
		cgroup, err := os.ReadFile(filepath.Join(m.options.Proc, strconv.Itoa(p.PID), "cgroup"))
		card.processes = append(card.processes, process{p, ParseCgroup(string(cgroup)), err})
	}
	return card
}

// readLimits reads what the driver says about the cgroups of the containers: of each on the cards that it was given, and on
// those that its processes use.
func (m *Meter) readLimits(driver Driver, r *reading) {
	if !driver.Limits() || !m.cgroups.Available() {
		return
	}
	all := map[string]bool{}
	for i := range r.cards {
		card := &r.cards[i]
		card.limits = map[string]limitReading{}
		for _, c := range r.containers {
			if slices.Contains(c.Cards, card.index) {
				card.limits[c.ID] = limitReading{}
			}
		}
		for _, p := range card.processes {
			if p.owner.Container != "" {
				card.limits[p.owner.Container] = limitReading{}
			}
		}
		for id := range card.limits {
			all[id] = true
		}
	}
	paths := m.cgroups.Find(slices.Sorted(maps.Keys(all)))
	for _, card := range r.cards {
		for id := range card.limits {
			path, ok := paths[id]
			if !ok { // The container has ended, or its cgroup isn't visible here.
				delete(card.limits, id)
				continue
			}
			limit, err := driver.Limit(card.uuid, path)
			card.limits[id] = limitReading{limit, err}
		}
	}
}
