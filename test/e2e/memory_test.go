package e2e

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/test/framework"
)

// pluginMemoryKB bounds the resident memory of a device plugin, as the kernel counts it: its own memory and the mapped part
// of its binary.
const pluginMemoryKB = 40_000

// TestDevicePluginMemory checks the device plugin's memory on a node with eight cards in GiB, with a hundred pods.
func TestDevicePluginMemory(t *testing.T) {
	c := shared.Start(t)
	m := addMachine(t, c, framework.NodeSpec{Name: "node", MemoryUnit: "GiB", Cards: slices.Repeat([]uint64{81920}, 8)})
	playOn(t, c, m, "with a hundred pods", func(s *scene) {
		for i := range 100 {
			s.Create(s.Pod(fmt.Sprint("pod-", i), int64(1+i%7)).OnNode(m.Name))
		}
		for i := range 100 {
			s.WaitAssigned(fmt.Sprint("pod-", i))
		}
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.Plugin.Pid()))
		must(s, err)
		peak := 0
		for line := range strings.Lines(string(status)) {
			if amount, ok := strings.CutPrefix(line, "VmHWM:"); ok {
				_, err = fmt.Sscan(amount, &peak)
				must(s, err)
			}
		}
		s.Logf("the device plugin used at most %d kB", peak)
		if peak == 0 || peak >= pluginMemoryKB {
			s.Errorf("it used %d kB, want less than %d", peak, pluginMemoryKB)
		}
	})
}
