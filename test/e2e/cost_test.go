package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/test/framework"
	"github.com/gpushare/gpushare/test/simkubelet"
)

// pluginMemoryKB bounds the resident memory of a device plugin, as the kernel counts it: its own memory and the mapped part
// of its binary.
const pluginMemoryKB = 40_000

// TestDevicePluginCost checks the device plugin's memory on a node with eight cards in GiB, idle and with a hundred pods, and
// logs how long the kubelet waited for it: `go test -v -run TestDevicePluginCost ./test/e2e`.
func TestDevicePluginCost(t *testing.T) {
	c := shared.Start(t)
	m := addMachine(t, c, framework.NodeSpec{Name: "node", MemoryUnit: "GiB", Cards: slices.Repeat([]uint64{81920}, 8)})
	playOn(t, c, m, "with a hundred pods", func(s *scene) {
		s.checkMemory(m, "idle")
		create := func(from, to int, memory func(i int) int64) {
			var names []string
			for i := from; i < to; i++ {
				names = append(names, fmt.Sprintf("pod-%03d", i))
				s.Create(s.Pod(names[len(names)-1], memory(i)).OnNode(m.Name))
			}
			for _, name := range names {
				s.WaitAssigned(name)
			}
		}
		create(0, 60, func(i int) int64 { return int64(1 + i%7) })
		before := len(m.calls.of(simkubelet.CallAllocate))
		create(60, 100, func(int) int64 { return 6 })
		s.logWaits(m, before)
		s.checkMemory(m, "with a hundred pods")
	})
}

// logWaits logs how long the kubelet has waited for the plugin, by container since then, in Allocate and in both of its
// calls. The figures depend on the machine, so they aren't checked.
func (s *scene) logWaits(m machine, before int) {
	s.Helper()
	allocations := m.calls.of(simkubelet.CallAllocate)[before:]
	took := map[types.UID]time.Duration{}
	var allocate []time.Duration
	for _, call := range allocations {
		took[call.PodUID] += call.End.Sub(call.Start)
		allocate = append(allocate, call.End.Sub(call.Start))
	}
	for _, call := range m.calls.of(simkubelet.CallGetPreferredAllocation) {
		if _, ok := took[call.PodUID]; ok {
			took[call.PodUID] += call.End.Sub(call.Start)
		}
	}
	both := slices.Collect(maps.Values(took))
	percentile := func(durations []time.Duration, percent int) time.Duration {
		slices.Sort(durations)
		return durations[(len(durations)-1)*percent/100].Round(100 * time.Microsecond)
	}
	s.Logf("%d containers: Allocate p50 %v, p99 %v; with GetPreferredAllocation p50 %v, p99 %v",
		len(allocations), percentile(allocate, 50), percentile(allocate, 99), percentile(both, 50), percentile(both, 99))
}

// checkMemory fails the test if the plugin's memory has been above the bound.
func (s *scene) checkMemory(m machine, when string) {
	s.Helper()
	var status map[string]int
	s.Eventually("the plugin's memory can be read", func(context.Context) (err error) {
		status, err = residentOf(m.Plugin.Pid())
		return err
	})
	s.Logf("device plugin, %s: VmRSS %d kB (RssAnon %d, RssFile %d), VmHWM %d", when,
		status["VmRSS"], status["RssAnon"], status["RssFile"], status["VmHWM"])
	if status["VmHWM"] >= pluginMemoryKB {
		s.Errorf("%s it used %d kB, want less than %d", when, status["VmHWM"], pluginMemoryKB)
	}
}

// residentOf reads the amounts of memory in a process's status, in kB.
func residentOf(pid int) (map[string]int, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return nil, err
	}
	out := map[string]int{}
	for line := range strings.Lines(string(data)) {
		name, rest, _ := strings.Cut(line, ":")
		if amount, ok := strings.CutSuffix(strings.TrimSpace(rest), " kB"); ok {
			if out[name], err = strconv.Atoi(amount); err != nil {
				return nil, err
			}
		}
	}
	if out["VmRSS"] == 0 {
		return nil, errors.New("the process has none")
	}
	return out, nil
}
