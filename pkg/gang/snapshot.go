package gang

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// RunStatus is the state of a run as the API server alone shows it.
type RunStatus struct {
	Group Key
	// ID is the value of the annotation gpushare.aliyun.com/group-run of its bound members; empty if they have none.
	ID string
	// Phase is incomplete, pending, running or broken. All others are known to the extender that leads.
	Phase Phase
	// Size is how many members must be bound together; 0 if the members disagree or none is left that exists.
	Size int
	// Reason is why members are pending; empty if the run is running. It is the one of a Manager that has just started.
	Reason reasons.Group
	// Since is since when it waits, see Status; zero if it waits for no member.
	Since time.Time
	// Members are all pods of the run, including those that have ended.
	Members []gpu.PodUID
}

// Snapshot divides members into runs, as a Manager does that starts to lead. Members that ask for no cards belong to none.
// The runs of a group are in the order of their IDs, and one that isn't running comes last.
func Snapshot(members []Member, now time.Time) []RunStatus {
	mgr := NewSnapshot(members, now)
	var out []RunStatus
	for _, g := range mgr.groups {
		for _, r := range g.runs {
			status := RunStatus{Group: r.key, ID: r.id, Phase: r.phase, Size: r.size(), Since: r.needed().since, Members: slices.Sorted(maps.Keys(r.members))}
			if r.phase != PhaseRunning {
				status.Reason = r.reason(&member{})
			}
			out = append(out, status)
		}
	}
	slices.SortFunc(out, compareStatus)
	return out
}

// NewSnapshot returns a Manager that starts to lead with these members.
func NewSnapshot(members []Member, now time.Time) *Manager {
	mgr := New(Options{Observer: discard{}, Failures: &queue.Failures{}})
	for i := range members {
		mgr.SetMember(members[i], now)
	}
	mgr.StartLeading(now)
	return mgr
}

func compareStatus(a, b RunStatus) int {
	open := func(s RunStatus) int {
		if s.Phase == PhaseRunning {
			return 0
		}
		return 1
	}
	return cmp.Or(a.Group.Compare(b.Group), cmp.Compare(open(a), open(b)), strings.Compare(a.ID, b.ID))
}

// discard is an Observer that does nothing.
type discard struct{}

func (discard) GangHeld(time.Duration)   {}
func (discard) GangBound()               {}
func (discard) GangFailed(reasons.Group) {}
func (discard) GangEvicted()             {}
