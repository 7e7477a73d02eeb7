package gang

import (
	"cmp"
	"strings"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Key identifies a group.
type Key struct {
	Namespace string
	// Name contains a slash if a label completes the name that the template of its pods gives it.
	Name string
	// Native is true for a group by a PodGroup, false for one by annotations or labels. Two groups of both kinds can have the same
	// name.
	Native bool
}

// String returns namespace/name, for messages.
func (k Key) String() string { return k.Namespace + "/" + k.Name }

// ItemID identifies the group among the items of its namespace.
func (k Key) ItemID() string {
	if k.Native {
		return "native group " + k.String()
	}
	return "group " + k.String()
}

// Compare orders keys by namespace and name, and of two groups with one name the native one is last.
func (k Key) Compare(o Key) int {
	return cmp.Or(strings.Compare(k.Namespace, o.Namespace), strings.Compare(k.Name, o.Name), gpu.TrueFirst(o.Native, k.Native))
}

// Member is a pod of a group, as read from its object.
type Member struct {
	// Request is 0 for a pod that asks for whole cards. It is counted and waits like others, but only kube-scheduler
	// knows where it fits.
	gpu.Pod
	Gang Key
	// PodGroup is the PodGroup that the pod's spec names; empty if none. If Gang isn't native, the pod names two groups.
	PodGroup string
	// Run is the run that the pod was bound in, from its annotation gpushare.aliyun.com/group-run; empty if it has none.
	Run string
	// Size is the size of the group according to this pod. A Manager sets that of a native group.
	Size int
	// Problem is why the group or its size can't be read, or why no node can give the pod what it asks for; empty if there is no problem.
	Problem string
	// Created is truncated to seconds.
	Created time.Time
	// JobSet is the name of the JobSet that the pod is of; empty if it is of none. The pod's controller is one of the Jobs of it.
	JobSet string
	// Controller identifies the controller whose pods replace the pod; empty if it has none. Kind is the kind of its owner, or LeaderWorkerSet.
	Controller, Kind string
	// Template is equal for pods that get the same candidate nodes.
	Template string
	// Shape is equal for pods whose templates are equal apart from the names of their volumes.
	Shape string
	// Scheduler is the name of the scheduler that the pod is assigned to.
	Scheduler string
	// Node is the node that the pod is bound to; empty if it isn't bound.
	Node string
	// BoundAt is when the pod was bound, truncated to seconds; zero if unknown.
	BoundAt time.Time
	// MarkedWhole is true if the pod is bound and marks its run as whole: it was bound last, or later.
	MarkedWhole bool
	// Ended is true if the pod has succeeded or failed, Succeeded if it has succeeded.
	Ended, Succeeded bool
	// Gated is true if the pod has the scheduling gate of fair sharing, GatedOtherwise if it has others.
	Gated, GatedOtherwise bool
	// Cardless is true if the pod asks for no cards. kube-scheduler doesn't call the extender for it, and it doesn't
	// count.
	Cardless bool
	// ShortOfResources is true if kube-scheduler's message on the pod says that nodes lack GPU memory, CPU or other resources.
	ShortOfResources bool
}

// LeaderWorkerSet is the Kind of the pods of a LeaderWorkerSet, whatever their owner is.
const LeaderWorkerSet = "LeaderWorkerSet"

// takenByLiveRun reports whether the pod joins a run of its group while one of the run's members runs, whatever its controller is. This is so for any pod
// of a native group, since kube-scheduler counts all pods of a PodGroup together, and for any pod of a LeaderWorkerSet, whose workers have
// another controller after each restart of their leader.
func (m *Member) takenByLiveRun() bool { return m.Gang.Native || m.Kind == LeaderWorkerSet }

// category is what a member counts as.
type category uint8

const (
	// other members have ended without success, or are terminating.
	other category = iota
	// pending members are to be placed.
	pending
	// bound members are on a node, and neither ended nor terminating.
	bound
	succeeded
	// ineligible members exist, but can't be placed because of their gates or their problem.
	ineligible

	categories
)

// category returns what the member counts as.
func (m *member) category() category {
	switch {
	case m.Succeeded:
		return succeeded
	case m.Ended, m.Leaving:
		return other
	case m.Node != "":
		return bound
	case m.problem() != "", m.GatedOtherwise:
		return ineligible
	}
	return pending
}

// requirements are equal for members that ask for the same and can use the same nodes.
type requirements struct {
	demand gpu.Demand
	shape  string
}

func (m *Member) requirements() requirements { return requirements{m.Demand(), m.Shape} }

// merge returns next, but with what known has that next may lack: a pod that is bound, terminating or ended stays so. The watch can be behind
// the extender's own binds and live reads.
func merge(known, next Member) Member {
	if known.Node != "" && next.Node == "" {
		next.Node, next.Run, next.MarkedWhole, next.BoundAt = known.Node, known.Run, known.MarkedWhole, known.BoundAt
	}
	next.Ended, next.Succeeded = next.Ended || known.Ended, next.Succeeded || known.Succeeded
	next.Leaving = next.Leaving || known.Leaving
	return next
}

// member is a Member with the state that a Manager keeps of it.
type member struct {
	Member
	// serial orders the members as the watch reported them first.
	serial uint64
	// run is nil for a cardless member, and while the Manager doesn't lead.
	run *run
	// place is its part of the run's plan; nil if it has none.
	place *plannedMember
	// counted is what run's tally counts the member as.
	counted category
	// groupProblem is what is wrong with the member's native group, see Manager.resolve; empty if there is no problem.
	groupProblem string
	// ofWholeRun is true if another member marks the pod's run as whole. That one can be in another group: an earlier version of the extender
	// bound them as one group, before a label completed its name.
	ofWholeRun bool
	// readAt is when a live read last found the pod unbound.
	readAt time.Time
	// reportedProblem is the problem for which an Event was recorded.
	reportedProblem string
}

// marksWhole reports whether the member shows that its run was bound completely.
func (m *member) marksWhole() bool { return m.MarkedWhole || m.ofWholeRun }

// problem returns why the member can't be placed even if all memory is free; empty if it can.
func (m *member) problem() string { return cmp.Or(m.groupProblem, m.Problem) }

// awaitsBind reports whether the pod could still be bound.
func (m *member) awaitsBind() bool { return m.Node == "" && !m.Ended && !m.Leaving }
