package gang

import (
	"maps"
	"slices"

	"github.com/gpushare/gpushare/pkg/reasons"
)

// incomplete returns the reason for members of a run that has too few: how many members exist, and why other pods don't count.
func (r *run) incomplete() reasons.Group {
	if r.size() == 0 {
		return r.disagree()
	}
	reason := reasons.GroupIncomplete(r.existing(), r.size())
	if n := r.counts[ineligible]; n > 0 {
		reason = reason.Ineligible(n, r.firstName(func(m *member) bool { return m.counted == ineligible }))
	}
	if r.stalled && r.counts[ineligible]+r.counts[foreign] == 0 {
		reason = reason.Stalled(r.kind())
	}
	schedulers := map[string]int{}
	if r.counts[foreign] > 0 {
		for _, m := range r.members {
			if m.counted == foreign {
				schedulers[m.Scheduler]++
			}
		}
	}
	names := slices.Sorted(maps.Keys(schedulers))
	for _, name := range names[:min(len(names), 3)] {
		reason = reason.Foreign(schedulers[name], name)
	}
	return reason
}

// kind returns the kind of the workload that all pending members are of; empty if there is none.
func (r *run) kind() string {
	kinds := map[string]bool{}
	for _, m := range r.members {
		switch {
		case m.counted != pending:
		case m.LeaderWorkerSet:
			kinds["LeaderWorkerSet"] = true
		default:
			kinds[m.Kind] = true
		}
	}
	if len(kinds) != 1 {
		return ""
	}
	return slices.Collect(maps.Keys(kinds))[0]
}

// firstName returns the name that sorts first of the members that pass.
func (r *run) firstName(pass func(*member) bool) (first string) {
	for _, m := range r.members {
		if pass(m) && (first == "" || m.Name < first) {
			first = m.Name
		}
	}
	return first
}

// arriving returns the reason for members of a run that has a plan.
func (r *run) arriving() reasons.Group {
	return reasons.GroupArriving(r.plan.held, len(r.plan.members))
}

// broken returns the reason for the missing members of a partially bound run. why is the reason why they can't be placed.
func (r *run) broken(why reasons.Group) reasons.Group {
	return reasons.GroupBroken(r.counts[bound]+r.finished, r.size()).Because(why)
}

// disagree returns the reason of members that say different sizes, with the first pod of each size, for three sizes at most.
func (r *run) disagree() reasons.Group {
	sizes := slices.Sorted(maps.Keys(r.sizes))
	sizes = sizes[:min(len(sizes), 3)]
	var pods []string
	for _, size := range sizes {
		pods = append(pods, r.firstName(func(m *member) bool { return m.counted != other && m.counted != succeeded && m.Size == size }))
	}
	if len(pods) < 2 {
		return reasons.GroupDisagrees
	}
	return reasons.GroupDisagrees.Says(pods, sizes)
}
