package gang

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
)

// TestSnapshot checks the order of runs, and that those which wait have a reason.
func TestSnapshot(t *testing.T) {
	now := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	train, other := Key{Namespace: "a", Name: "train"}, Key{Namespace: "a", Name: "other"}
	member := func(uid gpu.PodUID, key Key, run, controller string) Member {
		m := Member{Pod: gpu.Pod{UID: uid, Name: string(uid), Request: 1}, Gang: key, Size: 2, Run: run, Controller: controller, Created: now}
		if run != "" {
			m.Node, m.BoundAt = "n", now
		}
		return m
	}
	ended := member("e", train, "2", "job-2")
	ended.Ended, ended.Succeeded = true, true
	cardless := member("x", other, "", "")
	cardless.Cardless = true
	got, _ := NewSnapshot([]Member{
		member("f", train, "", "job-3"), member("b", train, "1", "job-1"), member("a", train, "1", "job-1"),
		member("d", train, "2", "job-2"), ended, member("c", other, "9", "job-9"), member("g", other, "", "job-9"), cardless,
	}, nil, now).Reports()
	want := []Report{
		{
			Group: other, ID: "9", Phase: PhaseBroken, Size: 2, Counted: 2, Bound: []string{"c"}, Pending: []string{"g"}, Memory: 2, WaitsSince: now, Since: now,
			Reason: reasons.GroupBroken(1, 2),
		},
		{Group: train, ID: "1", Phase: PhaseRunning, Size: 2, Counted: 2, Bound: []string{"b", "a"}, Memory: 2, Since: now},
		{Group: train, ID: "2", Phase: PhaseRunning, Size: 2, Counted: 2, Bound: []string{"d"}, Memory: 1, Since: now},
		{
			Group: train, Phase: PhaseIncomplete, Size: 2, Counted: 1, Pending: []string{"f"}, Memory: 1, WaitsSince: now, Since: now,
			Reason: reasons.GroupIncomplete(1, 2),
		},
	}
	check.Equal(t, "the result", want, got, cmpopts.EquateEmpty())
}
