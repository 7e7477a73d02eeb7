package dispatch

import (
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// TestAllocatedPods adds, replaces and removes pods. A snapshot stays as it is.
func TestAllocatedPods(t *testing.T) {
	pods := allocatedPods{at: map[gpu.PodUID]int{}}
	set := func(uid gpu.PodUID, counted gpu.Memory) {
		pods.set(&allocatedPod{Pod: &Pod{Pod: gpu.Pod{UID: uid}, Node: "n"}, counted: counted})
	}
	present := func(list []*allocatedPod) map[gpu.PodUID]gpu.Memory {
		out := map[gpu.PodUID]gpu.Memory{}
		for _, p := range list {
			out[p.UID] = p.counted
		}
		return out
	}
	set("a", 1)
	set("b", 2)
	set("c", 3)
	before := pods.snapshot()
	set("a", 4)
	pods.remove("b")
	pods.remove("b")
	set("c", 5)
	want(t, "before", map[gpu.PodUID]gpu.Memory{"a": 1, "b": 2, "c": 3}, present(before))
	want(t, "present", map[gpu.PodUID]gpu.Memory{"a": 4, "c": 5}, present(pods.snapshot()))
	want(t, "listed", 2, len(pods.list))
	pods.remove("a")
	pods.remove("c")
	want(t, "listed at the end", 0, len(pods.list)+len(pods.at))
}
