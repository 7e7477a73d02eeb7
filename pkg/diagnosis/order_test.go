package diagnosis

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
)

// TestPositions: ahead of a pod are the pods and groups that wait for memory, can use the same nodes, and have a higher priority or are older.
func TestPositions(t *testing.T) {
	aged := func(name string, memory int64, priority int32, seconds int, changes ...func(*corev1.Pod)) *Pod {
		full := condition(corev1.PodReasonUnschedulable, "0/2 nodes are available: 2 Insufficient aliyun.com/gpu-mem.")
		return pod(memory, append([]func(*corev1.Pod){full, func(p *corev1.Pod) {
			p.Name, p.UID, p.Spec.Priority = name, types.UID(name), &priority
			p.CreationTimestamp.Time = now.Add(-time.Duration(seconds) * time.Second)
		}}, changes...)...)
	}
	rejected := func(message string) func(*corev1.Pod) { return condition(corev1.PodReasonUnschedulable, message) }
	onB := func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"name": "b"} }
	pods := []*Pod{
		aged("young", 9, 0, 1), aged("twin", 9, 0, 1), aged("old", 9, 0, 9), aged("important", 9, 5, 2), aged("on-b", 9, 0, 9, onB),
		aged("lacks-cpu", 1, 0, 99, rejected("0/2 nodes are available: 2 Insufficient cpu.")),
		aged("lacks-volume", 1, 9, 99, rejected(`persistentvolumeclaim "data" not found. not found`)),
		aged("gated", 9, 9, 99, gated), aged("turn", 9, 9, 99, gated), aged("too-large", 99, 9, 99),
		aged("group-0", 9, 7, 3), aged("group-1", 9, 0, 5), aged("broken-0", 9, -1, 1), aged("few-0", 9, 9, 99), aged("recent-0", 9, -2, 1),
	}
	wait := func(i int) *GroupWait {
		group, _, member := strings.Cut(pods[i].Name, "-")
		reason, known := map[string]reasons.Group{
			"group": reasons.GroupNoRoom, "broken": reasons.GroupBroken(1, 2), "few": reasons.GroupIncomplete(1, 2), "recent": reasons.GroupNoRoom,
		}[group]
		if !member || !known {
			return nil
		}
		if group == "recent" {
			return &GroupWait{Group: "default/" + group, Reason: reason} // A standby doesn't know more.
		}
		return &GroupWait{Group: "default/" + group, Reason: reason, Since: now.Add(-time.Second)}
	}
	nodes := []Node{node("a", gpu.GiB, card(0, 16, 9)), node("b", gpu.GiB, card(0, 16, 16))}
	d := NewDiagnoser(nodes, pods, now)
	d.Turns = map[gpu.PodUID]reasons.Turn{"turn": {Tenant: "t", Before: 2}}
	d.Awaited = map[gpu.PodUID]string{"important": "a"}
	why := d.DiagnoseAll(pods, wait)
	if words := "1 pod or group is ahead of it; cards of a are reserved for it, and it gets them when pods there have ended"; !strings.HasSuffix(why[3].Message, words) {
		t.Errorf("of reserved cards: %q", why[3].Message)
	}
	got, want := map[string]int{}, map[string]int{
		"broken-0": 0, "important": 1, "lacks-cpu": 2, "old": 3, "group-0": 4, "group-1": 4, "twin": 5, "young": 6, "recent-0": 7, "on-b": 0,
	}
	for i := range why {
		position := why[i].Position
		if position.Queued {
			got[pods[i].Name] = position.Ahead
		}
		if strings.Contains(why[i].Message, "ahead of it") != (position.Queued && position.Ahead > 0 || pods[i].Name == "turn") {
			t.Errorf("%s: %q", pods[i].Name, why[i].Message)
		}
		since := pods[i].Created
		if w := wait(i); w != nil {
			since = w.Since
		}
		if !position.Since.Equal(since) {
			t.Errorf("%s waits since %v, want %v", pods[i].Name, position.Since, since)
		}
	}
	check.Equal(t, "ahead", want, got)
	if text := (Position{Queued: true, Ahead: 1}).String(); text != "1 pod or group is ahead of it" {
		t.Error(text)
	}
	d.podsOnly = true
	if d.DiagnoseAll(pods, wait)[0].Position.Queued {
		t.Error("the pods of other namespaces aren't known")
	}
}
