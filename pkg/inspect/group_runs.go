package inspect

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// groupRun is a run of a group as the API server shows it.
type groupRun struct {
	gang.Report
	// bound, pending and ineligible are the members that have a node, wait for one, or wait and don't count. Members that end
	// or have ended are in none.
	bound, pending, ineligible []gang.Member
	// cardless is the number of pods that name the group and ask for no cards; of a group's runs, only the last one has it.
	cardless int
	// messages are kube-scheduler's messages about pods, by UID.
	messages map[gpu.PodUID]string
}

// groupRuns returns the runs of all groups. Runs that have ended are left out, unless nothing else is left of the group.
// Pods of a PodGroup that places them one by one are in none.
func groupRuns(pods []*corev1.Pod, podGroups map[gang.Key]gang.PodGroup, now time.Time) []groupRun {
	var members []gang.Member
	byName, messages := map[types.NamespacedName]gang.Member{}, map[gpu.PodUID]string{}
	groups := map[gang.Key][]groupRun{}
	cardless := map[gang.Key][]gang.Member{}
	for _, pod := range pods {
		if !protocol.InGroup(pod) && (podGroups == nil || protocol.PodGroupName(pod) == "") {
			continue
		}
		m := clustercache.NewPodInfo(pod).Member
		if podGroups[m.Gang].Alone {
			continue
		}
		m.Problem = cmp.Or(gang.Resolve(m, podGroups), m.Problem)
		if m.Gang.Name == "" { // Pods of one controller were meant to be a group.
			m.Gang.Name = unnamed + m.Controller
		}
		switch {
		case !m.Cardless:
			members, messages[m.UID] = append(members, *m), schedulerMessage(pod)
			byName[types.NamespacedName{Namespace: m.Namespace, Name: m.Name}] = *m
		case !m.Ended && !m.Leaving:
			members, cardless[m.Gang] = append(members, *m), append(cardless[m.Gang], *m)
		}
	}
	reports, _ := gang.NewSnapshot(members, now).Reports()
	for _, report := range reports {
		if report.Cardless > 0 { // None of its pods asks for cards.
			first := cardless[report.Group][0]
			report.Size = first.Size
			if first.Problem != "" {
				report.Reason = reasons.GroupInvalid(first.Name + ": " + first.Problem)
			}
		}
		run := groupRun{Report: report, messages: messages}
		for _, name := range slices.Concat(report.Bound, report.Pending) {
			run.add(byName[types.NamespacedName{Namespace: report.Group.Namespace, Name: name}])
		}
		if run.Phase == gang.PhaseRunning && run.reportedBroken() {
			run.Phase = gang.PhaseBroken
		}
		groups[run.Group] = append(groups[run.Group], run)
	}
	for key, pods := range cardless {
		groups[key][len(groups[key])-1].cardless = len(pods)
	}
	var out []groupRun
	for _, key := range slices.SortedFunc(maps.Keys(groups), gang.Key.Compare) {
		live := slices.DeleteFunc(slices.Clone(groups[key]), func(r groupRun) bool { return r.over() })
		if len(live) == 0 {
			live = groups[key][:1]
		}
		for _, run := range live {
			if strings.HasPrefix(run.Group.Name, unnamed) {
				run.Group.Name = ""
			}
			out = append(out, run)
		}
	}
	return out
}

// unnamed is the beginning of the names under which groupRuns distinguishes groups without a name. No valid name has it.
const unnamed = "\x00"

// schedulerMessage returns kube-scheduler's message about the pod; empty if there is none.
func schedulerMessage(pod *corev1.Pod) string {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled {
			return condition.Message
		}
	}
	return ""
}

func (r *groupRun) add(m gang.Member) {
	switch {
	case m.Node != "":
		r.bound = append(r.bound, m)
	case m.Problem != "", m.GatedOtherwise:
		r.ineligible = append(r.ineligible, m)
	default:
		r.pending = append(r.pending, m)
	}
}

// podNames returns the sorted names of the members that run or wait.
func (r *groupRun) podNames() (names []string) {
	for _, m := range slices.Concat(r.bound, r.pending, r.ineligible) {
		names = append(names, m.Name)
	}
	slices.Sort(names)
	return names
}

// over reports whether no member is left that runs or waits.
func (r *groupRun) over() bool {
	return len(r.bound)+len(r.pending)+len(r.ineligible)+r.cardless == 0
}

// state returns the run's state, and why members of it are pending.
func (r *groupRun) state() (state, reason string) {
	invalid := r.invalidMember()
	switch {
	case r.over():
		return GroupEnded, ""
	case r.Phase == gang.PhaseRunning:
		return GroupRunning, cmp.Or(invalid, r.message(), r.Reason.Words)
	case invalid != "":
		return GroupInvalid, invalid
	case r.severalSchedulers() != "":
		return GroupInvalid, r.severalSchedulers()
	case r.Size == 0:
		return GroupInvalid, r.disagreement()
	case r.Phase == gang.PhaseBroken:
		return GroupBroken, r.reason(r.reported()).Words
	case r.Phase == gang.PhaseIncomplete:
		return GroupIncomplete, r.reason(r.reported()).Words
	}
	reported := r.reported()
	if message := r.message(); message != "" && (reported == reasons.Group{} || reported == reasons.GroupAwaitsOthers) {
		return GroupPending, message // That is why kube-scheduler hasn't tried all others.
	}
	return GroupPending, r.reason(reported).Words
}

// invalidMember returns what is wrong with a pending member; empty if there is nothing.
func (r *groupRun) invalidMember() string {
	for _, m := range r.ineligible {
		if m.Problem != "" {
			return m.Name + ": " + m.Problem
		}
	}
	return ""
}

// severalSchedulers returns what is wrong if the pods of a PodGroup name different schedulers: kube-scheduler places none of them (k8s.io/kubernetes
// pkg/scheduler/schedule_one_podgroup.go, validatePodGroup), and no scheduler has enough of them. It is empty if they don't.
func (r *groupRun) severalSchedulers() string {
	if !r.Group.Native || r.Phase == gang.PhaseRunning {
		return ""
	}
	names := map[string]bool{}
	for _, m := range slices.Concat(r.bound, r.pending, r.ineligible) {
		names[cmp.Or(m.Scheduler, corev1.DefaultSchedulerName)] = true
	}
	if len(names) < 2 {
		return ""
	}
	return "its pods name different schedulers, " + diagnosis.FirstOf(slices.Sorted(maps.Keys(names))) + ": all pods of a PodGroup need the same schedulerName"
}

// disagreement returns how the members contradict each other. The state says that the group is invalid.
func (r *groupRun) disagreement() string {
	if r.Reason.Invalid() {
		return r.Reason.Problem()
	}
	return reasons.GroupDisagrees.Problem()
}

// reason returns why the run isn't running. reported is the reason that the extender gave last; zero if it gave none. Numbers of members in
// it can be outdated, and are taken from the API server's objects.
func (r *groupRun) reason(reported reasons.Group) reasons.Group {
	reason := r.Reason
	count, _, _ := strings.Cut(reason.Words, ",")
	switch {
	case r.Phase == gang.PhasePending:
		return cmp.Or(reported, reason)
	case strings.HasPrefix(reported.Words, count):
		reason = reported
	case r.Phase == gang.PhaseBroken && !reported.Broken():
		reason = reason.Because(reported)
	}
	return reason
}

// reported returns the reason that the extender gave for most of the pending members; zero if it gave none.
func (r *groupRun) reported() (most reasons.Group) {
	counts := map[reasons.Group]int{}
	for _, m := range r.pending {
		reason, ok := reasons.ParseGroup(r.messages[m.UID])
		if !ok || reason == reasons.GroupSurplus {
			continue
		}
		counts[reason]++
		if counts[reason] > counts[most] || counts[reason] == counts[most] && reason.Words < most.Words {
			most = reason
		}
	}
	return most
}

// reportedBroken reports whether the extender says that the run is broken. The API server's objects don't show it if members were deleted before all
// were bound.
func (r *groupRun) reportedBroken() bool {
	reported := r.reported()
	return reported.Broken() || reported == reasons.GroupEvicting
}

// message returns kube-scheduler's message about a pending member if it isn't about the group; empty if there is none.
func (r *groupRun) message() (first string) {
	for _, m := range r.pending {
		if _, ofGroup := reasons.ParseGroup(r.messages[m.UID]); !ofGroup {
			first = cmp.Or(first, r.messages[m.UID])
		}
	}
	return first
}

// groupWaits returns what pods wait for that belong to a run that isn't running, or that kube-scheduler doesn't try, by UID: the reason that the
// extender gave for the pod, else for others of its run, else what the API server's objects show. podGroups is nil if they aren't known.
func groupWaits(pods []*corev1.Pod, podGroups map[gang.Key]gang.PodGroup, now time.Time) map[types.UID]*diagnosis.GroupWait {
	waits := map[types.UID]*diagnosis.GroupWait{}
	for _, run := range groupRuns(pods, podGroups, now) {
		if run.Phase == gang.PhaseRunning && run.Reason == (reasons.Group{}) {
			continue
		}
		for _, m := range slices.Concat(run.ineligible, run.pending) {
			message := run.messages[m.UID]
			reported, ok := reasons.ParseGroup(message)
			several := run.severalSchedulers()
			if m.PodGroup != "" && message != "" && !ok && several == "" {
				continue // kube-scheduler has tried it. Whether the extender treats PodGroups as groups isn't known.
			}
			reason := run.reason(cmp.Or(reported, run.reported()))
			switch {
			case several != "":
				reason = reasons.GroupInvalid(several)
			case m.PodGroup != "" && ok:
				reason = reported
			case m.Problem != "":
				reason = reasons.GroupInvalid(m.Problem)
			case m.GatedOtherwise:
				reason = run.reason(reasons.Group{})
			}
			waits[types.UID(m.UID)] = &diagnosis.GroupWait{Group: run.Group.String(), Native: run.Group.Native, Reason: reason, Since: run.WaitsSince}
		}
	}
	return waits
}
