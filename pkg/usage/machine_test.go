package usage

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fakenvml"
)

const mib = 1 << 20

// hierarchies returns the mounted hierarchies of cgroup v2 and v1 in which this process may make cgroups; v2 twice if there is none
// of v1. It skips the test if there is none of v2.
func hierarchies(t *testing.T) (v2, v1 string) {
	t.Helper()
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		if _, err := os.Stat(filepath.Join(root, "cgroup.controllers")); err == nil {
			v2 = root
		}
	}
	probe := filepath.Join(v2, "gpushare-probe")
	if err := os.Mkdir(probe, 0o755); v2 == "" || err != nil {
		t.Skipf("SKIPPED, not tested: no hierarchy of cgroup v2 can be changed: %v", err)
	}
	_ = os.Remove(probe)
	v1 = v2
	if _, err := os.Stat("/sys/fs/cgroup/memory/tasks"); err == nil {
		v1 = "/sys/fs/cgroup/memory"
	}
	return v2, v1
}

// cgroup makes a cgroup that ends with the test.
func cgroup(t *testing.T, path string) string {
	t.Helper()
	check.Must(t, os.MkdirAll(path, 0o755))
	t.Cleanup(func() { _ = os.Remove(path) })
	return path
}

// sleeper starts a process, in a cgroup if one is given, and returns its number and a function that ends it.
func sleeper(t *testing.T, cgroup string) (pid int, end func()) {
	t.Helper()
	command := exec.Command("sleep", "1000")
	check.Must(t, command.Start())
	end = func() {
		_ = command.Process.Kill()
		_ = command.Wait()
	}
	t.Cleanup(end)
	if cgroup != "" {
		check.Must(t, os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), fmt.Append(nil, command.Process.Pid), 0o600))
	}
	return command.Process.Pid, end
}

// TestRealProcesses measures real processes in real cgroups; only the driver is fake.
func TestRealProcesses(t *testing.T) {
	v2, v1 := hierarchies(t)
	library := fakenvml.BuildForTest(t)
	machine := fakenvml.NewMachine(filepath.Dir(library))
	for _, variable := range machine.Env() {
		name, value, _ := strings.Cut(variable, "=")
		t.Setenv(name, value)
	}
	check.Must(t, machine.SetCards(fakenvml.Card{UUID: "GPU-0", MiB: 16000}, fakenvml.Card{UUID: "GPU-1", MiB: 16000}))

	slice := cgroup(t, filepath.Join(v2, "kubepods-pod"+underscored+".slice"))
	first := cgroup(t, filepath.Join(slice, "cri-containerd-"+idA+".scope"))
	// The second pod's container is in a hierarchy of v1 where the machine has one.
	other := cgroup(t, filepath.Join(v1, "pod"+string(hash)))
	second := cgroup(t, filepath.Join(other, idB))
	pids := map[string]int{}
	var endFirst func()
	pids["a"], endFirst = sleeper(t, first)
	pids["a child"], _ = sleeper(t, first)
	pids["b"], _ = sleeper(t, second)
	pids["host"], _ = sleeper(t, "")
	ended, end := sleeper(t, first)
	end()
	if err := machine.SetProcesses(
		fakenvml.Process{Card: "GPU-0", PID: pids["a"], MiB: 300, Cgroup: first}, fakenvml.Process{Card: "GPU-0", PID: pids["a child"], MiB: 30},
		fakenvml.Process{Card: "GPU-1", PID: pids["b"], MiB: 40, Graphics: true}, fakenvml.Process{Card: "GPU-1", PID: pids["a"], MiB: 5},
		fakenvml.Process{Card: "GPU-1", PID: pids["host"], MiB: 6}, fakenvml.Process{Card: "GPU-1", PID: ended, MiB: 7},
	); err != nil {
		t.Fatal(err)
	}

	a, b := Container{"team", "a", uidA, "main", idA, []int{0}, 256 * mib, 0, 0}, Container{"team", "b", "mirror-pod", "main", idB, []int{3}, 64 * mib, 0, 0}
	var running atomic.Pointer[[]Container]
	running.Store(&[]Container{a, b})
	meter := NewMeter(Options{
		Node: "n", Interval: time.Millisecond, Cgroups: v2,
		Cards:      func() []gpu.Card { return []gpu.Card{{Index: 3, UUID: "GPU-1"}, {Index: 0, UUID: "GPU-0"}} },
		Containers: func() []Container { return *running.Load() },
	})
	if got := meter.Report(); len(got.Problems) != 1 || !got.Time.IsZero() {
		t.Errorf("before the first measurement: %+v", got)
	}
	monitor := inventory.New(inventory.Options{Library: library, Settings: inventory.Settings{Unit: gpu.MiB}, VisitInterval: time.Millisecond, Visit: func(s *inventory.Session) { meter.Measure(s) }})
	ctx, stop := context.WithCancel(t.Context())
	over := make(chan error, 1)
	go func() { over <- monitor.Run(ctx, func(inventory.State) {}) }()
	defer func() {
		stop()
		check.NoError(t, <-over)
	}()
	// measure waits for a measurement of which done is true.
	measure := func(done func(protocol.Usage) bool) protocol.Usage {
		t.Helper()
		before := time.Now()
		var got protocol.Usage
		await.True(t, "a measurement", func() bool { got = meter.Report(); return got.Time.After(before) && done(got) })
		return got
	}

	got := measure(func(u protocol.Usage) bool {
		return len(u.Cards) == 2 && u.Cards[0].Unresolved == 0 && u.Cards[1].Unresolved == 7*mib
	})
	want := protocol.Usage{
		APIVersion: protocol.UsageAPIVersion, Kind: protocol.UsageKind, Node: "n", Time: got.Time, IntervalSeconds: .001, Problems: []string{},
		Cards: []protocol.CardUsage{
			{Index: 0, UUID: "GPU-0", Used: 330 * mib, Free: new(uint64(15670 * mib)), Pods: 330 * mib},
			{Index: 3, UUID: "GPU-1", Used: 58 * mib, Free: new(uint64(15942 * mib)), Pods: 45 * mib, Host: 6 * mib, Unresolved: 7 * mib, Incomplete: true},
		},
		Containers: []protocol.ContainerUsage{
			{Namespace: "team", Pod: "a", UID: string(uidA), Container: "main", Card: 0, Processes: 2, Used: 330 * mib, Requested: 256 * mib},
			{Namespace: "team", Pod: "a", UID: string(uidA), Container: "main", Card: 3, Processes: 1, Used: 5 * mib},
			{Namespace: "team", Pod: "b", UID: "mirror-pod", Container: "main", Card: 3, Processes: 1, Used: 40 * mib, Requested: 64 * mib},
		},
	}
	check.Equal(t, "the result", want, got)

	checkAgreement(t, got)

	// The driver has a limit for the first container's cgroup on card 0, and the process on which it was measured has ended.
	driver := nvml.New(nvml.WithLibraryPath(library))
	handle, ret := driver.DeviceGetHandleByUUID("GPU-0")
	if ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	if ret := handle.SetMemoryLimits_v1(first, 0, 256*mib); ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	endFirst()
	got = measure(func(u protocol.Usage) bool { return u.Containers[0].Limit != nil && u.Containers[0].Processes == 1 })
	limit := uint64(256 * mib)
	row := protocol.ContainerUsage{
		Namespace: "team", Pod: "a", UID: string(uidA), Container: "main", Card: 0, Processes: 1, Used: 300 * mib, Requested: 256 * mib, Limit: &limit}
	check.Equal(t, "a limit", row, got.Containers[0])

	// The first container is started again, in a new cgroup. A process of the old one remains for a moment.
	again := cgroup(t, filepath.Join(slice, "cri-containerd-"+idC+".scope"))
	pids["a again"], _ = sleeper(t, again)
	a.ID = idC
	running.Store(&[]Container{a, b})
	if err := machine.SetProcesses(
		fakenvml.Process{Card: "GPU-0", PID: pids["a again"], MiB: 70}, fakenvml.Process{Card: "GPU-0", PID: pids["a child"], MiB: 30},
	); err != nil {
		t.Fatal(err)
	}
	got = measure(func(u protocol.Usage) bool { return u.Cards[0].Unresolved == 0 && u.Cards[0].Pods == 100*mib })
	want.Containers = []protocol.ContainerUsage{
		{Namespace: "team", Pod: "a", UID: string(uidA), Card: 0, Processes: 1, Used: 30 * mib},
		{Namespace: "team", Pod: "a", UID: string(uidA), Container: "main", Card: 0, Processes: 1, Used: 70 * mib, Requested: 256 * mib},
		{Namespace: "team", Pod: "b", UID: "mirror-pod", Container: "main", Card: 3, Requested: 64 * mib},
	}
	check.Equal(t, "a container that was started again", want.Containers, got.Containers, cmpopts.IgnoreFields(protocol.ContainerUsage{}, "Limit"))
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

// stubDriver is a driver with cards of which each has the same processes. It counts the memory of cgroups if limits is true.
type stubDriver struct {
	cards     []string
	processes []inventory.Process
	limits    bool
}

func (d stubDriver) Cards() []string                               { return d.cards }
func (d stubDriver) Memory(string) (used, free uint64, err error)  { return 1000, 24, nil }
func (d stubDriver) Processes(string) ([]inventory.Process, error) { return d.processes, nil }
func (d stubDriver) Limits() bool                                  { return d.limits }
func (d stubDriver) Limit(string, string) (inventory.MemoryLimit, error) {
	return inventory.MemoryLimit{}, nil
}

// BenchmarkMeasure measures 200 processes on 8 cards, of a node with 110 containers. At the default interval of 10 s, a millisecond
// is 0.01% of a core. The calls into the driver cost nothing here.
func BenchmarkMeasure(b *testing.B) {
	root := b.TempDir()
	check.Must(b, os.WriteFile(filepath.Join(root, "cgroup.controllers"), nil, 0o600))
	var driver stubDriver
	var cards []gpu.Card
	for i := range 8 {
		driver.cards = append(driver.cards, fmt.Sprintf("GPU-%d", i))
		cards = append(cards, gpu.Card{Index: i, UUID: driver.cards[i]})
	}
	for range 25 {
		driver.processes = append(driver.processes, inventory.Process{PID: os.Getpid(), Bytes: mib})
	}
	var containers []Container
	for i := range 110 {
		id := fmt.Sprintf("%064x", i)
		check.Must(b, os.MkdirAll(filepath.Join(root, "kubepods", fmt.Sprint("pod", i), id), 0o755))
		containers = append(containers, Container{Namespace: "n", Pod: fmt.Sprint("p", i), UID: gpu.PodUID(fmt.Sprint("u", i)), Name: "c", ID: id, Cards: []int{i % 8}, Requested: mib})
	}
	for _, driver.limits = range []bool{false, true} {
		b.Run(fmt.Sprintf("limits=%t", driver.limits), func(b *testing.B) {
			meter := NewMeter(Options{
				Node: "n", Cgroups: root, Cards: func() []gpu.Card { return cards }, Containers: func() []Container { return containers },
			})
			overuse := NewOveruse(OveruseOptions{Tolerance: DefaultTolerance, Grace: DefaultGrace})
			before := processorTime(b)
			for b.Loop() {
				meter.Measure(driver)
				overuse.Update(meter.Report(), Known{})
			}
			b.ReportMetric(float64((processorTime(b)-before).Microseconds())/float64(b.N), "cpu-µs/op")
		})
	}
}

// processorTime returns the time for which this process has used a core.
func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var used unix.Rusage
	check.Must(b, unix.Getrusage(unix.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
