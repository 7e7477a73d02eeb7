package inspect

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// groupRun is one all-or-nothing start of a group, as far as the API server shows it.
type groupRun struct {
	key gang.Key
	// id is the annotation protocol.AnnotationGroupRun of the bound members; empty if they have none.
	id string
	// started is true if members have been bound.
	started bool
	// size is the number of members that must be bound together, 0 if unknown.
	size int
	// problem is why the run can't be placed, however much memory is free.
	problem string
	// bound and pending are the members that use a node or wait for one. ineligible wait and don't count.
	bound, pending, ineligible []*corev1.Pod
	// cardless is the number of pods that ask for no cards, succeeded that of members that have succeeded.
	cardless, succeeded int
	// marked is true if a bound member marks the run as whole.
	marked bool
	// controllers are those of the members that have been bound. The value is true if one of them runs, or if the pod has a
	// controller and has succeeded.
	controllers map[types.UID]bool
}

// groupRuns returns the runs of all groups, sorted by group and then by ID; that of the members that are to be bound next is
// the last one. It follows gang.Manager, which finds the runs in the same way when it starts to lead.
func groupRuns(pods []*corev1.Pod) []*groupRun {
	groups := map[gang.Key][]*corev1.Pod{}
	for _, pod := range pods {
		if protocol.InGroup(pod) {
			group, _ := protocol.GroupOf(pod)
			key := gang.Key{Namespace: pod.Namespace, Name: group.Name}
			groups[key] = append(groups[key], pod)
		}
	}
	byKey := func(a, b gang.Key) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	}
	var runs []*groupRun
	for _, key := range slices.SortedFunc(maps.Keys(groups), byKey) {
		runs = append(runs, runsOf(key, groups[key])...)
	}
	return runs
}

// runsOf returns the runs of one group.
func runsOf(key gang.Key, pods []*corev1.Pod) []*groupRun {
	byID := map[string]*groupRun{}
	var waiting []*corev1.Pod
	for _, pod := range pods {
		if pod.Spec.NodeName == "" && !protocol.Terminal(pod) {
			waiting = append(waiting, pod)
			continue
		}
		id := pod.Annotations[protocol.AnnotationGroupRun]
		if byID[id] == nil {
			byID[id] = &groupRun{key: key, id: id, started: true, controllers: map[types.UID]bool{}}
		}
		byID[id].add(pod)
	}
	runs := slices.SortedFunc(maps.Values(byID), func(a, b *groupRun) int { return cmp.Compare(a.id, b.id) })
	next := &groupRun{key: key}
	for _, run := range runs {
		if len(run.bound) > 0 && !run.running(waiting) {
			next = run
		}
	}
	for _, pod := range waiting {
		joined := next
		for _, run := range runs {
			if run != next && run.joinedBy(pod) {
				joined = run
			}
		}
		joined.add(pod)
	}
	if !next.started && !next.over() {
		runs = append(runs, next)
	}
	return withoutOver(runs)
}

// withoutOver removes the runs that are over, unless all are: then it leaves one.
func withoutOver(runs []*groupRun) []*groupRun {
	if all := slices.DeleteFunc(slices.Clone(runs), (*groupRun).over); len(all) > 0 {
		return all
	}
	return runs[:min(len(runs), 1)]
}

func (r *groupRun) add(pod *corev1.Pod) {
	if r.started && pod.Spec.NodeName != "" && protocol.RequestsCards(pod) {
		id := controllerOf(pod)
		runs := !protocol.Terminal(pod) && pod.DeletionTimestamp == nil
		r.controllers[id] = r.controllers[id] || runs || id != "" && pod.Status.Phase == corev1.PodSucceeded
	}
	group, err := protocol.GroupOf(pod)
	switch {
	case pod.Status.Phase == corev1.PodSucceeded:
		r.succeeded++
		return
	case protocol.Terminal(pod), pod.DeletionTimestamp != nil:
		return
	case err != nil:
		r.problem, r.ineligible = err.Error(), append(r.ineligible, pod)
		return
	case r.size != 0 && r.size != group.Size:
		r.problem = "the members disagree on the group's size"
	}
	r.size = max(r.size, group.Size)
	switch {
	case !protocol.RequestsCards(pod):
		r.cardless++
	case pod.Spec.NodeName != "":
		r.bound = append(r.bound, pod)
		r.marked = r.marked || pod.Annotations[protocol.AnnotationGroupWhole] == "true"
	case slices.ContainsFunc(pod.Spec.SchedulingGates, func(gate corev1.PodSchedulingGate) bool { return gate.Name != protocol.GateFairShare }):
		r.ineligible = append(r.ineligible, pod)
	default:
		r.pending = append(r.pending, pod)
	}
}

// controllerOf returns the UID of the pod's controller; empty if it has none.
func controllerOf(pod *corev1.Pod) types.UID {
	if owner := metav1.GetControllerOfNoCopy(pod); owner != nil {
		return owner.UID
	}
	return ""
}

// running reports whether all members have been bound: one marks the run, enough are bound or have succeeded, or so few of
// the members that existed at the latest bind are left that others have been deleted since. waiting are the pods of the
// group without a node.
func (r *groupRun) running(waiting []*corev1.Pod) bool {
	existed := len(r.bound) + r.succeeded
	if !r.started || r.marked || existed >= r.size {
		return r.started
	}
	var latest time.Time
	for _, pod := range r.bound {
		at := boundAt(pod)
		if at.IsZero() {
			return len(waiting) == 0
		}
		if at.After(latest) {
			latest = at
		}
	}
	for _, pod := range waiting {
		if !pod.CreationTimestamp.After(latest) {
			existed++
		}
	}
	return existed < r.size
}

// boundAt returns when the pod was bound; zero if unknown.
func boundAt(pod *corev1.Pod) time.Time {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionTrue {
			return condition.LastTransitionTime.Time
		}
	}
	return time.Time{}
}

// joinedBy reports whether the pod, which has no node, belongs to this run, which is running: its controller has members in
// the run, and one of them has succeeded or any member still runs.
func (r *groupRun) joinedBy(pod *corev1.Pod) bool {
	id := controllerOf(pod)
	alive, known := r.controllers[id]
	return alive || known && id != "" && len(r.bound) > 0
}

// over reports whether no member is left that runs or waits.
func (r *groupRun) over() bool {
	return len(r.bound)+len(r.pending)+len(r.ineligible)+r.cardless == 0
}

// exist returns how many of the needed members exist.
func (r *groupRun) exist() int { return len(r.bound) + len(r.pending) + r.succeeded }

// state returns the run's state, and why members of it are pending.
func (r *groupRun) state() (state, reason string) {
	switch {
	case r.over():
		return GroupEnded, ""
	case r.problem != "":
		return GroupInvalid, r.problem
	case r.running(r.pending):
		return GroupRunning, r.message()
	case len(r.bound) > 0:
		return GroupBroken, cmp.Or(r.reported(), r.message())
	case r.exist() < r.size:
		return GroupIncomplete, r.missing()
	}
	return GroupPending, cmp.Or(r.reported(), r.message())
}

// reported returns the reason that the extender gave for most of the pending members; empty if it gave none.
func (r *groupRun) reported() (reason string) {
	counts := map[string]int{}
	for _, pod := range r.pending {
		text, ok := diagnosis.GroupReason(diagnosis.NewPod(pod).Message)
		if !ok || "gang: "+text == gang.Surplus.Text {
			continue
		}
		if counts[text]++; counts[text] > counts[reason] || counts[text] == counts[reason] && text < reason {
			reason = text
		}
	}
	return reason
}

// message returns kube-scheduler's message about a pending member; empty if there is none.
func (r *groupRun) message() string {
	for _, pod := range r.pending {
		for _, condition := range pod.Status.Conditions {
			if condition.Type == corev1.PodScheduled && condition.Message != "" {
				return condition.Message
			}
		}
	}
	return ""
}

// missing explains why the run is incomplete.
func (r *groupRun) missing() string {
	text := fmt.Sprintf("%d of %d members exist", r.exist(), r.size)
	if reported := r.reported(); strings.HasPrefix(reported, text) {
		return reported // It can have more details.
	}
	if r.cardless > 0 && r.exist()+len(r.ineligible)+r.cardless >= r.size {
		text += fmt.Sprintf(", and %d that ask for no cards don't count", r.cardless)
	}
	return text
}

// since returns since when the run waits: the creation time of the last member that it needs, or of its oldest member if
// members are missing. It is zero if no member waits.
func (r *groupRun) since() time.Time {
	if len(r.pending) == 0 {
		return time.Time{}
	}
	byAge := slices.SortedFunc(slices.Values(r.pending), func(a, b *corev1.Pod) int {
		return a.CreationTimestamp.Compare(b.CreationTimestamp.Time)
	})
	if need := r.size - len(r.bound) - r.succeeded; need >= 1 && need <= len(byAge) {
		return byAge[need-1].CreationTimestamp.Time
	}
	return byAge[0].CreationTimestamp.Time
}

// groupWaits returns what the pending pods wait for that belong to a run that isn't running, by UID.
func groupWaits(pods []*corev1.Pod) map[types.UID]*diagnosis.GroupWait {
	waits := map[types.UID]*diagnosis.GroupWait{}
	for _, run := range groupRuns(pods) {
		if run.running(run.pending) {
			continue
		}
		common := cmp.Or(run.reported(), gang.AwaitsOthers.Text)
		if run.exist() < run.size {
			common = run.missing()
		}
		for _, pod := range slices.Concat(run.pending, run.ineligible) {
			reason, reported := diagnosis.GroupReason(diagnosis.NewPod(pod).Message)
			if !reported {
				reason = common
			}
			waits[pod.UID] = &diagnosis.GroupWait{Group: run.key.String(), Reason: reason, Since: run.since()}
		}
	}
	return waits
}
