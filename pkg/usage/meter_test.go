package usage

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
)

const mib = 1 << 20

// stubDriver is a driver with these processes on its cards, and a limit for cgroups.
type stubDriver struct {
	processes map[string][]inventory.Process
	limit     inventory.MemoryLimit
}

func (d stubDriver) Cards() []string                              { return []string{"GPU-0", "GPU-1", "GPU-new"} }
func (d stubDriver) Memory(string) (used, free uint64, err error) { return 1000 * mib, 24 * mib, nil }
func (d stubDriver) Processes(uuid string) ([]inventory.Process, error) {
	return d.processes[uuid], nil
}
func (d stubDriver) Limits() bool { return true }
func (d stubDriver) Limit(string, string) (inventory.MemoryLimit, error) {
	return d.limit, nil
}

// TestMeasure: the processes that the driver lists are those of containers, by the names of their cgroups. The tests on a real node measure real ones.
func TestMeasure(t *testing.T) {
	proc, cgroups := t.TempDir(), t.TempDir()
	inA, inB := "kubepods-pod"+underscored+".slice/cri-containerd-"+idA+".scope", "pod"+string(hash)+"/"+idB
	check.Must(t, os.WriteFile(filepath.Join(cgroups, "cgroup.controllers"), nil, 0o600))
	check.Must(t, os.MkdirAll(filepath.Join(cgroups, inA), 0o755))
	for pid, cgroup := range map[int]string{1: inA, 2: inA, 3: inB, 4: "system.slice", 5: inA} {
		dir := filepath.Join(proc, strconv.Itoa(pid))
		check.Must(t, os.Mkdir(dir, 0o755))
		check.Must(t, os.WriteFile(filepath.Join(dir, "cgroup"), []byte("0::/"+cgroup+"\n"), 0o600))
	}
	meter := NewMeter(Options{
		Node: "n", Interval: time.Millisecond, Proc: proc, Cgroups: cgroups, Servers: func(string) []int { return []int{5} },
		Cards: func() []gpu.Card { return []gpu.Card{{Index: 3, UUID: "GPU-1"}, {Index: 0, UUID: "GPU-0"}} },
		Containers: func() []Container {
			return []Container{{"team", "a", uidA, "main", idA, []int{0}, 256 * mib, 0, 0}, {"team", "b", "mirror-pod", "main", idB, []int{3}, 64 * mib, 0, 0}}
		},
	})
	if got := meter.Report(); len(got.Problems) != 1 || !got.Time.IsZero() {
		t.Errorf("before the first measurement: %+v", got)
	}
	meter.Measure(stubDriver{map[string][]inventory.Process{
		"GPU-0": {{PID: 1, Bytes: 300 * mib}, {PID: 2, Bytes: 30 * mib}, {PID: 5, Bytes: 8 * mib}},
		"GPU-1": {{PID: 3, Bytes: 40 * mib}, {PID: 1, Bytes: 5 * mib}, {PID: 4, Bytes: 6 * mib}, {PID: 99, Bytes: 7 * mib}}, // The last one has ended.
	}, inventory.MemoryLimit{Hard: 256 * mib}})
	got, limit, free := meter.Report(), new(uint64(256*mib)), new(uint64(24*mib))
	want := protocol.Usage{
		APIVersion: protocol.UsageAPIVersion, Kind: protocol.UsageKind, Node: "n", Time: got.Time, IntervalSeconds: .001, Problems: []string{},
		Cards: []protocol.CardUsage{
			{Index: 0, UUID: "GPU-0", Used: 1000 * mib, Free: free, Pods: 330 * mib, MPS: 8 * mib},
			{Index: 3, UUID: "GPU-1", Used: 1000 * mib, Free: free, Pods: 45 * mib, Host: 6 * mib, Unresolved: 7 * mib, Incomplete: true},
		},
		Containers: []protocol.ContainerUsage{
			{Namespace: "team", Pod: "a", UID: string(uidA), Container: "main", Card: 0, Processes: 2, Used: 330 * mib, Requested: 256 * mib, Limit: limit},
			{Namespace: "team", Pod: "a", UID: string(uidA), Container: "main", Card: 3, Processes: 1, Used: 5 * mib, Limit: limit},
			{Namespace: "team", Pod: "b", UID: "mirror-pod", Container: "main", Card: 3, Processes: 1, Used: 40 * mib, Requested: 64 * mib},
		},
	}
	check.Equal(t, "the result", want, got)
	checkAgreement(t, got)
}

// checkAgreement compares what programs receive of a report: JSON, which /usage serves and kubectl reads, and metrics.
func checkAgreement(t *testing.T, report protocol.Usage) {
	t.Helper()
	text, err := json.Marshal(report)
	check.Must(t, err)
	var read protocol.Usage
	check.Must(t, json.Unmarshal(text, &read))
	if diff := cmp.Diff(report, read); diff != "" {
		t.Errorf("JSON: -report +read:\n%s", diff)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(NewCollector(func() protocol.Usage { return report }, true))
	families, err := registry.Gather()
	check.Must(t, err)
	got := map[string]float64{}
	for _, family := range families {
		for _, metric := range family.Metric {
			var labels []string
			for _, label := range metric.Label {
				labels = append(labels, label.GetValue())
			}
			got[strings.TrimPrefix(family.GetName(), "gpushare_device_plugin_")+" "+strings.Join(labels, " ")] = metric.Gauge.GetValue()
		}
	}
	want := map[string]float64{"usage_timestamp_seconds ": float64(report.Time.UnixMilli()) / 1000}
	for _, card := range report.Cards {
		for by, bytes := range map[string]uint64{
			"pods": card.Pods, "host": card.Host, "mps": card.MPS, "unresolved": card.Unresolved,
			"driver": card.Used - card.Pods - card.Host - card.MPS - card.Unresolved,
		} {
			want[fmt.Sprintf("card_memory_used_bytes %s %d", by, card.Index)] = float64(bytes)
		}
	}
	for _, c := range report.Containers {
		labels := fmt.Sprintf(" %d %s %s %s", c.Card, c.Container, c.Namespace, c.Pod)
		want["container_memory_used_bytes"+labels], want["container_memory_requested_bytes"+labels] = float64(c.Used), float64(c.Requested)
		want["container_memory_allowed_bytes"+labels], want["container_memory_borrowed_bytes"+labels] = float64(max(c.Requested, c.Allowed)), float64(c.Borrowed())
		if c.Limit != nil {
			want["container_memory_limit_bytes"+labels] = float64(*c.Limit)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("metrics: -report +metrics:\n%s", diff)
	}
}
