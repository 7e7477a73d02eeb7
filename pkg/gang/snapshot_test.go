package gang

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// TestSnapshot checks the order of runs, and that those which wait have a reason.
func TestSnapshot(t *testing.T) {
	now := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	train, other := Key{Namespace: "a", Name: "train"}, Key{Namespace: "a", Name: "other"}
	member := func(uid gpu.PodUID, key Key, run, controller string) Member {
		m := Member{Pod: gpu.Pod{UID: uid, Request: 1}, Gang: key, Size: 2, Run: run, Controller: controller, Created: now}
		if run != "" {
			m.Node, m.BoundAt = "n", now
		}
		return m
	}
	ended := member("e", train, "2", "job-2")
	ended.Ended, ended.Succeeded = true, true
	cardless := member("x", other, "", "")
	cardless.Cardless = true
	got := Snapshot([]Member{
		member("f", train, "", "job-3"), member("b", train, "1", "job-1"), member("a", train, "1", "job-1"),
		member("d", train, "2", "job-2"), ended, member("c", other, "9", "job-9"), member("g", other, "", "job-9"), cardless,
	}, now)
	want := []RunStatus{
		{
			Group: other, ID: "9", Phase: PhaseBroken, Size: 2, Since: now, Members: []gpu.PodUID{"c", "g"},
			Reason: reasons.Group{Label: "broken", Words: "only 1 of 2 members are bound"},
		},
		{Group: train, ID: "1", Phase: PhaseRunning, Size: 2, Members: []gpu.PodUID{"a", "b"}},
		{Group: train, ID: "2", Phase: PhaseRunning, Size: 2, Members: []gpu.PodUID{"d", "e"}},
		{
			Group: train, Phase: PhaseIncomplete, Size: 2, Since: now, Members: []gpu.PodUID{"f"},
			Reason: reasons.Group{Label: "incomplete", Words: "1 of 2 members exist"},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
