package usage

import (
	"io/fs"
	"strings"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
)

// at returns a process of a container.
func at(bytes uint64, pod gpu.PodUID, container string) process {
	return process{inventory.Process{Bytes: bytes}, Owner{pod, container}, nil}
}

func TestBuild(t *testing.T) {
	unknown := uint64(inventory.UnknownBytes)
	// Two containers of pod a, of which one has card 0, the container of pod b, without a card, and one whose ID isn't known.
	running := []Container{
		{"team", "a", "uid-a", "main", "id-main", []int{0}, 100, 0, 0},
		{"team", "a", "uid-a", "helper", "id-helper", nil, 0, 0, 0},
		{"other", "b", "uid-b", "c", "id-c", nil, 0, 0, 0},
		{"other", "c", "uid-c", "c", "", nil, 0, 0, 0},
	}
	limit := func(n uint64) *uint64 { return &n }
	usageOf := func(c Container, used uint64, processes int) protocol.ContainerUsage {
		row := protocol.ContainerUsage{
			Namespace: c.Namespace, Pod: c.Pod, UID: string(c.UID), Container: c.Name, Processes: processes, Used: used,
		}
		if len(c.Cards) > 0 {
			row.Requested = c.Requested
		}
		return row
	}
	for name, test := range map[string]struct {
		processes []process
		limits    map[string]limitReading
		want      []protocol.ContainerUsage
		card      protocol.CardUsage
	}{
		"a container that uses nothing is listed if it has the card": {
			want: []protocol.ContainerUsage{usageOf(running[0], 0, 0)},
		},
		"several processes of a container": {
			processes: []process{at(30, "uid-a", "id-main"), at(12, "uid-a", "id-main")},
			want:      []protocol.ContainerUsage{usageOf(running[0], 42, 2)},
			card:      protocol.CardUsage{Pods: 42},
		},
		"a container that has no card": {
			processes: []process{at(7, "uid-b", "id-c"), at(1, "uid-a", "id-helper")},
			want:      []protocol.ContainerUsage{usageOf(running[2], 7, 1), usageOf(running[1], 1, 1), usageOf(running[0], 0, 0)},
			card:      protocol.CardUsage{Pods: 8},
		},
		"the container's ID decides: a static pod has two UIDs": {
			processes: []process{at(5, "kubelets-uid", "id-c")},
			want:      []protocol.ContainerUsage{usageOf(running[2], 5, 1), usageOf(running[0], 0, 0)},
			card:      protocol.CardUsage{Pods: 5},
		},
		"a container that the API server doesn't show yet": {
			processes: []process{at(5, "uid-b", "id-new"), at(6, "uid-b", "id-newer")},
			want: []protocol.ContainerUsage{
				{Namespace: "other", Pod: "b", UID: "uid-b", Processes: 2, Used: 11}, usageOf(running[0], 0, 0)},
			card: protocol.CardUsage{Pods: 11},
		},
		"a pod that the API server doesn't show": {
			processes: []process{at(5, "uid-x", "id-x")},
			want:      []protocol.ContainerUsage{{UID: "uid-x", Processes: 1, Used: 5}, usageOf(running[0], 0, 0)},
			card:      protocol.CardUsage{Pods: 5},
		},
		"processes of the host, and of a container without a pod": {
			processes: []process{at(3, "", ""), at(4, "", "id-docker")},
			want:      []protocol.ContainerUsage{usageOf(running[0], 0, 0)},
			card:      protocol.CardUsage{Host: 7},
		},
		"a process that has ended": {
			processes: []process{{inventory.Process{Bytes: 9}, Owner{}, fs.ErrNotExist}},
			want:      []protocol.ContainerUsage{usageOf(running[0], 0, 0)},
			card:      protocol.CardUsage{Unresolved: 9, Incomplete: true},
		},
		"a process whose memory the driver doesn't report": {
			processes: []process{at(unknown, "uid-a", "id-main"), at(2, "uid-a", "id-main"), at(unknown, "", "")},
			want: []protocol.ContainerUsage{{
				Namespace: "team", Pod: "a", UID: "uid-a", Container: "main", Processes: 2, Used: 2, Requested: 100, Incomplete: true}},
			card: protocol.CardUsage{Pods: 2, Incomplete: true},
		},
		"the driver counts more for the cgroup than its processes show": {
			processes: []process{at(30, "uid-a", "id-main")},
			limits:    map[string]limitReading{"id-main": {inventory.MemoryLimit{Hard: 100, Used: 33}, nil}},
			want: []protocol.ContainerUsage{{
				Namespace: "team", Pod: "a", UID: "uid-a", Container: "main", Processes: 1, Used: 33, Requested: 100, Limit: limit(100)}},
			card: protocol.CardUsage{Pods: 33},
		},
		"a cgroup without a limit": {
			processes: []process{at(30, "uid-b", "id-c")},
			limits:    map[string]limitReading{"id-c": {inventory.MemoryLimit{Hard: inventory.NoLimit, Used: 1}, nil}},
			want:      []protocol.ContainerUsage{usageOf(running[2], 30, 1), usageOf(running[0], 0, 0)},
			card:      protocol.CardUsage{Pods: 30},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := build(reading{
				at: time.Unix(1, 0), interval: time.Second, node: "n", containers: running,
				cards: []cardReading{{index: 0, uuid: "GPU-0", used: 50, processes: test.processes, limits: test.limits}},
			})
			test.card.UUID, test.card.Used = "GPU-0", 50
			want := protocol.Usage{
				APIVersion: protocol.UsageAPIVersion, Kind: protocol.UsageKind, Node: "n", Time: time.Unix(1, 0), IntervalSeconds: 1,
				Problems: []string{}, Cards: []protocol.CardUsage{test.card}, Containers: test.want,
			}
			check.Equal(t, "the result", want, got)
		})
	}
}

// TestBuildSeveralCards: use, request and limit of a container are those of each of its cards.
func TestBuildSeveralCards(t *testing.T) {
	limit := uint64(100)
	report := build(reading{
		containers: []Container{{Pod: "a", UID: "u", Name: "c", ID: "id", Cards: []int{0, 2}, Requested: 100, Limit: limit}},
		cards: []cardReading{
			{index: 0, processes: []process{at(30, "u", "id")}, limits: map[string]limitReading{"id": {inventory.MemoryLimit{Hard: limit}, nil}}},
			{index: 1}, {index: 2, processes: []process{at(120, "u", "id")}, limits: map[string]limitReading{"id": {inventory.MemoryLimit{Hard: inventory.NoLimit}, nil}}},
		},
	})
	row := protocol.ContainerUsage{Pod: "a", UID: "u", Container: "c", Processes: 1, Used: 30, Requested: 100, Given: &limit, Limit: &limit}
	over := row
	over.Card, over.Used, over.Limit, over.NotInForce = 2, 120, nil, "its cgroup has no limit"
	check.Equal(t, "the result", []protocol.ContainerUsage{row, over}, report.Containers)
}

func TestUnresolved(t *testing.T) {
	gone := process{problem: fs.ErrNotExist}
	for name, test := range map[string]struct {
		processes []process
		hostPID   bool
		want      string
	}{
		"no process":                         {nil, true, ""},
		"one of two has ended":               {[]process{gone, at(1, "", "")}, true, ""},
		"the driver's namespace is another":  {[]process{gone, gone}, true, "none of the 2 processes"},
		"the plugin has its own namespace":   {nil, false, "(hostPID)"},
		"its own namespace, with processes":  {[]process{gone}, false, "(hostPID)"},
		"all processes belong to containers": {[]process{at(1, "u", "i")}, true, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got := unresolved([]cardReading{{processes: test.processes}}, test.hostPID)
			if got != test.want && (test.want == "" || !strings.Contains(got, test.want)) {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

// TestNotInForce: a limit that a container was given is compared with the driver's.
func TestNotInForce(t *testing.T) {
	for name, test := range map[string]struct {
		given  uint64
		limits map[string]limitReading
		want   string
	}{
		"in force":             {100, map[string]limitReading{"id": {inventory.MemoryLimit{Hard: 100}, nil}}, ""},
		"none was given":       {0, map[string]limitReading{"id": {inventory.MemoryLimit{Hard: inventory.NoLimit}, nil}}, ""},
		"none was set":         {100, map[string]limitReading{"id": {inventory.MemoryLimit{Hard: inventory.NoLimit}, nil}}, "its cgroup has no limit"},
		"another one":          {100, map[string]limitReading{"id": {inventory.MemoryLimit{Hard: 200}, nil}}, "the limit of its cgroup is 200 bytes, not 100"},
		"the driver's failure": {100, map[string]limitReading{"id": {err: fs.ErrNotExist}}, fs.ErrNotExist.Error()},
		"no cgroup":            {100, nil, errNotRead.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			report := build(reading{
				containers: []Container{{Pod: "a", UID: "u", Name: "c", ID: "id", Cards: []int{0}, Requested: 100, Limit: test.given}},
				cards:      []cardReading{{index: 0, limits: test.limits}, {index: 1}},
			})
			if len(report.Containers) != 1 || report.Containers[0].NotInForce != test.want || (report.Containers[0].Given != nil) != (test.given > 0) {
				t.Errorf("got %+v, want %q", report.Containers, test.want)
			}
		})
	}
}
