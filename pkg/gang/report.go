package gang

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Report is the state of a run.
type Report struct {
	Group Key
	// ID is the value of the annotation gpushare.aliyun.com/group-run of its bound members; empty if they have none.
	ID    string
	Phase Phase
	// Size is how many members must be bound together; 0 if unknown.
	Size int
	// Counted is the number of members that count towards Size: those that are bound, to be bound, or have succeeded.
	Counted int
	// Cardless is the number of the group's pods if none of them asks for cards. Such a group has no run, and is reported as incomplete.
	Cardless int
	// Bound and Pending are the names of the members with and without a node that exist, the oldest first. Pending includes
	// members that don't count.
	Bound, Pending []string
	// Memory is what these members request in all.
	Memory gpu.Memory
	// Reason is why members are pending; none if the run is running, unless kube-scheduler tries none of a PodGroup's. Problem is the name of
	// the oldest of those that can't be placed even if all memory is free, and what is wrong with it; empty if there are none.
	Reason  reasons.Group
	Problem string
	// WaitsSince is since when members wait, see Status.Since. Since is the same, else when the run began to run or to be evicted; zero if unknown.
	WaitsSince, Since time.Time
}

// NewSnapshot returns a Manager that starts to lead with these members, as the API server alone shows them. Of the phases, it knows incomplete,
// pending, running and broken. Members that ask for no cards belong to no run, and those with the gate of fair sharing wait for their turn. podGroups is
// nil if native groups are off.
func NewSnapshot(members []Member, podGroups map[Key]PodGroup, now time.Time) *Manager {
	mgr := New(Options{Observer: discard{}, Failures: &queue.Failures{}})
	mgr.AwaitsTurn = func(pod gpu.Pod) bool { return mgr.members[pod.UID].Gated }
	if podGroups != nil {
		mgr.ServePodGroups()
	}
	for key, podGroup := range podGroups {
		mgr.SetPodGroup(key, podGroup, now)
	}
	for i := range members {
		mgr.SetMember(members[i], now)
	}
	mgr.StartLeading(now)
	return mgr
}

// Reports returns the runs of all groups, also those whose members have all ended; false while this process doesn't lead. They are ordered by group,
// and of one group those that are running come first.
func (mgr *Manager) Reports() (out []Report, leads bool) {
	mgr.mu.Lock()
	for _, g := range mgr.groups {
		for _, r := range g.runs {
			out = append(out, mgr.report(r))
		}
		if len(g.runs) == 0 && g.cardless > 0 {
			out = append(out, Report{Group: g.key, Cardless: g.cardless, Reason: reasons.GroupCardless(g.cardless)})
		}
	}
	leads = mgr.leading
	mgr.mu.Unlock()
	slices.SortFunc(out, func(a, b Report) int {
		return cmp.Or(a.Group.Compare(b.Group), gpu.TrueFirst(a.Phase == PhaseRunning, b.Phase == PhaseRunning),
			a.Since.Compare(b.Since), strings.Compare(a.ID, b.ID))
	})
	return out, leads
}

func (mgr *Manager) report(r *run) Report {
	waitsSince := r.needed().since
	report := Report{
		Group: r.key, ID: r.id, Phase: r.shownPhase(), Size: r.size(), Counted: r.existing(),
		Reason: mgr.reason(r, nil), WaitsSince: waitsSince, Since: cmp.Or(waitsSince, r.since),
		Bound: make([]string, 0, r.counts[bound]), Pending: make([]string, 0, r.unbound()),
	}
	for _, m := range r.ordered() {
		switch m.counted {
		case bound:
			report.Bound = append(report.Bound, m.Name)
		case pending, ineligible:
			report.Pending = append(report.Pending, m.Name)
		default:
			continue
		}
		report.Memory = report.Memory.Add(m.Request)
		if problem := m.problem(); problem != "" && report.Problem == "" && m.counted == ineligible && r.phase != PhaseRunning {
			report.Problem = m.Name + ": " + problem
		}
	}
	return report
}

// discard is an Observer that does nothing.
type discard struct{}

func (discard) BarrierOpened(time.Duration) {}
func (discard) GangBound()                  {}
func (discard) GangFailed(reasons.Group)    {}
func (discard) GangEvicted()                {}
