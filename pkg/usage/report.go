package usage

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// Container is a running container of the node, as the API server shows it.
type Container struct {
	Namespace, Pod string
	UID            gpu.PodUID
	Name           string
	// ID is the container's ID without the runtime's scheme.
	ID string
	// Cards are the indexes of the cards that the container was given, and Requested what it requests of each of them, in bytes.
	Cards     []int
	Requested uint64
	// Limit is the limit in bytes that the container was given on each of its cards; 0 if its share isn't enforced.
	Limit uint64
	// Allowed is how much of each of its cards the container may use, in bytes, if that is more than it requests; else 0.
	Allowed uint64
}

// reading is what was read at one time. It is the complete input of build.
type reading struct {
	at       time.Time
	interval time.Duration
	node     string
	problems []string
	// cards are the node's cards, containers its running containers.
	cards      []cardReading
	containers []Container
}

// cardReading is what was read of one card.
type cardReading struct {
	index int
	uuid  string
	used  uint64
	free  *uint64
	// problem is why the card could not be read.
	problem   error
	processes []process
	// mps is the memory that the driver attributes to the card's MPS server.
	mps uint64
	// limits are what the driver says about the cgroups of containers, by container ID.
	limits map[string]limitReading
}

type limitReading struct {
	inventory.MemoryLimit
	err error
}

type process struct {
	inventory.Process
	owner Owner
	// problem is why the owner is not known: mostly the process has ended.
	problem error
}

// build makes the report of a reading.
func build(r reading) protocol.Usage {
	report := protocol.Usage{
		APIVersion: protocol.UsageAPIVersion, Kind: protocol.UsageKind, Node: r.node,
		Time: r.at, IntervalSeconds: r.interval.Seconds(),
		Problems: append([]string{}, r.problems...), Cards: []protocol.CardUsage{}, Containers: []protocol.ContainerUsage{},
	}
	known := index(r.containers)
	for _, card := range r.cards {
		sum := protocol.CardUsage{Index: card.index, UUID: card.uuid, Used: card.used, Free: card.free, MPS: card.mps}
		if card.problem != nil {
			sum.Problem = card.problem.Error()
		}
		rows := known.rows(card)
		for _, p := range card.processes {
			bytes := knownBytes(p.Bytes)
			switch row := rows.of(p.owner); {
			case p.problem != nil:
				sum.Unresolved, sum.Incomplete = sum.Unresolved+bytes, true
			case row == nil:
				sum.Host += bytes
			default:
				row.Processes++
				row.Used += bytes
				row.Incomplete = row.Incomplete || p.Bytes == inventory.UnknownBytes
				sum.Incomplete = sum.Incomplete || row.Incomplete
			}
		}
		for _, row := range rows.list {
			limit, ok := card.limits[row.id]
			if !ok {
				limit.err = errNotRead
			}
			row.read(limit)
			sum.Pods += row.Used
			if row.Processes > 0 || row.Used > 0 || row.Requested > 0 || row.Limit != nil {
				report.Containers = append(report.Containers, row.ContainerUsage)
			}
		}
		report.Cards = append(report.Cards, sum)
	}
	slices.SortFunc(report.Cards, func(a, b protocol.CardUsage) int { return cmp.Compare(a.Index, b.Index) })
	slices.SortFunc(report.Containers, func(a, b protocol.ContainerUsage) int {
		return cmp.Or(cmp.Compare(a.Card, b.Card), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod),
			cmp.Compare(a.UID, b.UID), cmp.Compare(a.Container, b.Container))
	})
	return report
}

// knownBytes returns the memory of a process, 0 if the driver reports none.
func knownBytes(bytes uint64) uint64 {
	if bytes == inventory.UnknownBytes {
		return 0
	}
	return bytes
}

// pods finds containers by their ID, and pods by the UID under which the kubelet knows them.
type pods struct {
	containers []Container
	byID       map[string]*Container
	byUID      map[gpu.PodUID]*Container
}

func index(containers []Container) pods {
	p := pods{containers: containers, byID: map[string]*Container{}, byUID: map[gpu.PodUID]*Container{}}
	for i := range containers {
		p.byID[containers[i].ID] = &containers[i]
		p.byUID[containers[i].UID] = &containers[i]
	}
	return p
}

// rows are the rows of one card's containers.
type rows struct {
	pods pods
	card cardReading
	list []*row
	by   map[Owner]*row
}

type row struct {
	protocol.ContainerUsage
	id string
}

// read adds what the driver says about the container's cgroup.
func (r *row) read(limit limitReading) {
	if limit.err == nil {
		r.Used = max(r.Used, limit.Used)
		if limit.Hard != inventory.NoLimit {
			r.Limit = &limit.Hard
		}
	}
	switch {
	case r.Given == nil || limit.err == nil && limit.Hard == *r.Given:
	case limit.err != nil:
		r.NotInForce, r.NotRead = limit.err.Error(), errors.Is(limit.err, errNotRead)
	case limit.Hard == inventory.NoLimit:
		r.NotInForce = "its cgroup has no limit"
	default:
		r.NotInForce = fmt.Sprintf("the limit of its cgroup is %d bytes, not %d", limit.Hard, *r.Given)
	}
}

// errNotRead means that a cgroup was not read. That matters only to a container that was given a limit.
var errNotRead = errors.New("the limit of its cgroup could not be read: the driver limits no memory, or its cgroup was not found")

// rows returns a row for each container.
func (p pods) rows(card cardReading) *rows {
	r := &rows{pods: p, card: card, by: map[Owner]*row{}}
	for i := range p.containers {
		r.add(&p.containers[i])
	}
	return r
}

func (r *rows) add(c *Container) *row {
	row := &row{id: c.ID, ContainerUsage: protocol.ContainerUsage{
		Namespace: c.Namespace, Pod: c.Pod, UID: string(c.UID), Container: c.Name, Card: r.card.index,
	}}
	if slices.Contains(c.Cards, r.card.index) {
		row.Requested, row.Allowed = c.Requested, c.Allowed
		if c.Limit > 0 {
			row.Given = &c.Limit
		}
	}
	r.list = append(r.list, row)
	r.by[Owner{c.UID, c.Name}] = row
	return row
}

// of returns the row of a process's container; nil for a process that belongs to no pod. The container's ID alone decides if the
// API server shows it: a static pod has another UID there. A container that it doesn't show gets a row of its pod without a
// container's name: it has just started, or is the pod's sandbox.
func (r *rows) of(owner Owner) *row {
	if c := r.pods.byID[owner.Container]; c != nil && owner.Container != "" {
		return r.by[Owner{c.UID, c.Name}]
	}
	if owner.Pod == "" {
		return nil
	}
	if row := r.by[Owner{owner.Pod, ""}]; row != nil {
		return row
	}
	unknown := Container{UID: owner.Pod}
	if c := r.pods.byUID[owner.Pod]; c != nil {
		unknown.Namespace, unknown.Pod = c.Namespace, c.Pod
	}
	return r.add(&unknown)
}

// unresolved describes in words why processes could not be resolved; empty if all were. hostPID is true if the processes that the
// meter sees can be the machine's.
func unresolved(cards []cardReading, hostPID bool) string {
	total, missing := 0, 0
	for _, card := range cards {
		for _, p := range card.processes {
			total++
			if p.problem != nil {
				missing++
			}
		}
	}
	switch {
	case !hostPID:
		return "the plugin doesn't see the machine's processes (hostPID), so it can't tell which pod uses the memory"
	case missing > 0 && missing == total:
		return fmt.Sprintf("none of the %d processes that the driver lists exists on this machine: its PID namespace isn't the driver's", total)
	}
	return ""
}
