package diagnosis

import (
	"testing"
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// The pods that come before a pod are those that can use the same nodes, with a higher priority or an earlier creation.
func TestAhead(t *testing.T) {
	begin := time.Unix(1_000_000, 0)
	pod := func(name gpu.PodUID, priority int32, age int, constraints string, gates ...string) *Pod {
		return &Pod{
			Pod: gpu.Pod{UID: name, Request: 1, Priority: priority}, Created: begin.Add(-time.Duration(age) * time.Second),
			Constraints: unique.Make(constraints), Gates: gates,
		}
	}
	pods := []*Pod{
		pod("young", 0, 1, ""), pod("important", 5, 2, ""), pod("old", 0, 9, ""), pod("elsewhere", 9, 9, "pool=b"), pod("gated", 9, 9, "", "gate"), pod("twin", 0, 1, ""),
	}
	pods = append(pods, &Pod{Pod: gpu.Pod{UID: "odd", Priority: 9}, RequestError: "too large"})
	d := NewDiagnoser(nil, pods, begin)
	want := map[gpu.PodUID]int{"important": 0, "old": 1, "twin": 2, "young": 3, "elsewhere": 0}
	for _, p := range pods {
		ahead, ok := d.Ahead(p)
		if n, queues := want[p.UID]; ok != queues || ahead != n {
			t.Errorf("%s: %d, %v", p.UID, ahead, ok)
		}
	}
	d.podsOnly = true
	if _, ok := d.Ahead(pods[0]); ok {
		t.Error("known from the pods of one namespace")
	}
}
