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

// pluginMemoryKB is what a device plugin may keep resident, as the kernel counts it: its own memory and what is mapped
// of its binary.
const pluginMemoryKB = 40_000

// A node of eight cards in GiB: what its device plugin costs, idle and with a hundred pods, and how long they wait for it.
// `go test -v -run TestDevicePluginCost ./test/e2e` tells the figures.
func TestDevicePluginCost(t *testing.T) {
	bed := framework.StartForTest(t, framework.Options{MemoryUnit: "GiB"})
	node := addMachine(t, bed, framework.NodeSpec{Name: "node", Cards: slices.Repeat([]uint64{81920}, 8)})
	playOn(t, bed, node, "eight cards", func(s *scene) {
		s.staysBelow(node, "idle")
		s.createAll(60, func(i int) (string, int64) { return fmt.Sprintf("first-%02d", i), int64(1 + i%7) }, on(node.Name))
		before := len(node.calls.of(simkubelet.CallAllocate))
		s.createAll(40, func(i int) (string, int64) { return fmt.Sprintf("then-%02d", i), 6 }, on(node.Name))
		s.tellSpeed(node, before)
		s.staysBelow(node, "with a hundred pods")
	})
	playOn(t, bed, node, "eight cards, bound while the kubelet was away", func(s *scene) {
		before := len(node.calls.of(simkubelet.CallAllocate))
		s.inOneBatch(node, func() {
			for i := range 40 {
				s.place(fmt.Sprintf("pod-%02d", i), 6, on(node.Name))
			}
		})
		for i := range 40 {
			s.assigned(fmt.Sprintf("pod-%02d", i))
		}
		s.tellSpeed(node, before)
	})
}

// createAll makes pods as fast as may be, and waits until all of them have their cards.
func (s *scene) createAll(n int, describe func(i int) (name string, memory int64), edits ...edit) {
	s.Helper()
	for i := range n {
		name, memory := describe(i)
		s.create(name, memory, edits...)
	}
	for i := range n {
		name, _ := describe(i)
		s.assigned(name)
	}
}

// tellSpeed tells how long the kubelet has waited for the plugin with each container since then, in both of its calls,
// and how often it was asked back. It is told, not checked: whatever else this machine does is in it.
func (s *scene) tellSpeed(node machine, before int) {
	s.Helper()
	allocations := node.calls.of(simkubelet.CallAllocate)[before:]
	took := map[types.UID]time.Duration{}
	var allocate []time.Duration
	for _, call := range allocations {
		took[call.PodUID] += call.End.Sub(call.Start)
		allocate = append(allocate, call.End.Sub(call.Start))
	}
	for _, call := range node.calls.of(simkubelet.CallGetPreferredAllocation) {
		if _, ok := took[call.PodUID]; ok {
			took[call.PodUID] += call.End.Sub(call.Start)
		}
	}
	asked := 0
	for _, call := range node.calls.of(simkubelet.CallPodResourcesGet) {
		if call.End.After(allocations[0].Start) {
			asked++
		}
	}
	both := slices.Collect(maps.Values(took))
	at := func(durations []time.Duration, percent int) time.Duration {
		slices.Sort(durations)
		return durations[(len(durations)-1)*percent/100].Round(100 * time.Microsecond)
	}
	s.Logf("%d containers: Allocate p50 %v, p99 %v; with GetPreferredAllocation p50 %v, p99 %v; PodResources asked %d times",
		len(allocations), at(allocate, 50), at(allocate, 99), at(both, 50), at(both, 99), asked)
}

// staysBelow checks the highest that the process has come to so far, and tells it and what it is at now.
func (s *scene) staysBelow(node machine, when string) {
	s.Helper()
	var status map[string]int
	eventually(s, "the plugin's memory can be read", func(context.Context) error {
		var err error
		status, err = residentOf(node.Plugin.Pid())
		return err
	})
	s.Logf("device plugin, %s: VmRSS %d kB (RssAnon %d, RssFile %d), VmHWM %d", when,
		status["VmRSS"], status["RssAnon"], status["RssFile"], status["VmHWM"])
	if status["VmHWM"] >= pluginMemoryKB {
		s.Errorf("%s it has come to %d kB, and may take %d", when, status["VmHWM"], pluginMemoryKB)
	}
}

// residentOf reads the lines of a process's status that are amounts of memory, in kB.
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
