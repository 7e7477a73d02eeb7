package gang

import (
	"cmp"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Report is the state of a run as the leader knows it.
type Report struct {
	Group Key
	Phase Phase
	// Size is how many members must be bound together; 0 if unknown.
	Size int
	// Counted is the number of members that count towards Size: those that are bound, to be bound, or have succeeded.
	Counted int
	// Bound and Pending are the names of the members with and without a node that exist, the oldest first. Pending includes
	// members that don't count.
	Bound, Pending []string
	// Memory is what these members request in all.
	Memory gpu.Memory
	// Reason is why members are pending, without its prefix; empty if the run is running.
	Reason string
	// Since is since when it waits, see Status, else when it began to run or to be evicted; zero if unknown.
	Since time.Time
}

// Reports returns the runs of all groups that have a member which exists, ordered by group; false while this process doesn't
// lead. A group whose pods all ask for no cards has no run, and is reported as incomplete.
func (mgr *Manager) Reports() (reports []Report, leads bool) {
	reports, leads = mgr.reports()
	slices.SortFunc(reports, func(a, b Report) int {
		return cmp.Or(a.Group.Compare(b.Group), a.Since.Compare(b.Since), cmp.Compare(a.Phase, b.Phase))
	})
	return reports, leads
}

func (mgr *Manager) reports() (out []Report, leads bool) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	for _, g := range mgr.groups {
		for _, r := range g.runs {
			if report := r.report(); len(report.Bound)+len(report.Pending) > 0 {
				out = append(out, report)
			}
		}
		if len(g.runs) == 0 && g.cardless > 0 {
			out = append(out, Report{Group: g.key, Reason: reasons.GroupCardless(g.cardless).Words})
		}
	}
	return out, mgr.leading
}

func (r *run) report() Report {
	report := Report{
		Group: r.key, Phase: r.phase, Size: r.size(), Counted: r.existing(), Since: cmp.Or(r.needed().since, r.since),
		Bound: make([]string, 0, r.counts[bound]), Pending: make([]string, 0, r.unbound()),
	}
	for _, m := range r.ordered() {
		switch m.counted {
		case bound:
			report.Bound = append(report.Bound, m.Name)
		case pending, ineligible, foreign:
			report.Pending = append(report.Pending, m.Name)
		default:
			continue
		}
		report.Memory = report.Memory.Add(m.Request)
	}
	if r.phase != PhaseRunning {
		report.Reason = r.common().Words
	}
	return report
}

// common returns why the members of a run that isn't running are pending: what makes the group invalid, else the reason of those
// that have a place in the plan, if there is one.
func (r *run) common() reasons.Group {
	if r.counts[ineligible] > 0 {
		for _, m := range r.ordered() {
			if m.counted == ineligible && m.problem() != "" {
				return reasons.GroupInvalid(m.problem())
			}
		}
	}
	if r.phase == PhasePlanned || r.phase == PhasePermitting {
		return r.arriving()
	}
	return r.reason(&member{})
}
