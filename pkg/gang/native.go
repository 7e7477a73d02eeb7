package gang

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// A native group is a PodGroup of Kubernetes. kube-scheduler tries its pods in one group cycle (k8s.io/kubernetes
// pkg/scheduler/schedule_one_podgroup.go, podGroupSchedulingDefaultAlgorithm). It calls filter for one member after the other, each time as
// if the members before were bound. It ends the cycle when too few members are left. It binds only after all filter calls. It counts
// the sum of a node's memory, not its cards.
//
// A filter call doesn't show if the cycle has failed, or if it is a trial in which the victims of a preemption count as gone. kube-scheduler
// retries the group by itself, after a back-off that no event of the cluster shortens (pkg/scheduler/backend/queue/scheduling_queue.go,
// AddAttemptedPodGroupIfNeeded).
//
// So the plan for all members is made in the first filter call of a cycle: if this call finds no node, kube-scheduler may end the
// cycle without a call for the other members. The call has candidate nodes only for its member's template. For other templates, the
// candidate nodes are derived from the specs (offerEligible). No plan is made between two cycles, because no filter call would follow soon. If
// no bind follows, the plan ends ledger.TentativeLifetime after the latest filter call.

// PodGroup holds the fields of a PodGroup that a Manager uses.
type PodGroup struct {
	// Size is how many of them must be bound together; 0 if Alone is true or Problem isn't empty.
	Size int
	// Alone is true if they are placed like pods without a group (the policy basic).
	Alone bool
	// Problem is why they can't be placed; empty if they can.
	Problem string
	// Priority is what counts instead of the priority of its pods if others preempt them. Together is true if they may only be disrupted together.
	Priority int32
	Together bool
}

// PodGroupOf returns the PodGroup that the pod's spec names; false if there is none, or native groups are off.
func (mgr *Manager) PodGroupOf(uid gpu.PodUID) (podGroup PodGroup, known bool) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	if m := mgr.members[uid]; m != nil && m.PodGroup != "" {
		podGroup, known = mgr.podGroups[Key{Namespace: m.Namespace, Name: m.PodGroup, Native: true}]
	}
	return podGroup, known
}

// twoGroups is the problem of a pod with a native group and another one.
const twoGroups = "the pod has spec.schedulingGroup and also annotations or labels of a group: only one of both can count"

// ServePodGroups turns native groups on. Before, members must not belong to any, and Member.PodGroup has no effect.
func (mgr *Manager) ServePodGroups() {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	mgr.podGroups = map[Key]PodGroup{}
}

// SetPodGroup records what a PodGroup says about its pods.
func (mgr *Manager) SetPodGroup(key Key, podGroup PodGroup, now time.Time) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	if known, ok := mgr.podGroups[key]; !ok || known != podGroup {
		mgr.podGroups[key] = podGroup
		mgr.resolveAll(key, now)
	}
}

// RemovePodGroup records that a PodGroup was deleted.
func (mgr *Manager) RemovePodGroup(key Key, now time.Time) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	delete(mgr.podGroups, key)
	mgr.resolveAll(key, now)
}

// resolve sets the size of a member of a native group, and returns what is wrong with the group.
func (mgr *Manager) resolve(m *Member) (problem string) {
	if m.PodGroup == "" || mgr.podGroups == nil {
		return ""
	}
	if !m.Gang.Native {
		m.Size = 0
		return twoGroups
	}
	podGroup, known := mgr.podGroups[m.Gang]
	m.Size = podGroup.Size
	if !known {
		return fmt.Sprintf("PodGroup %s doesn't exist", m.PodGroup)
	}
	return podGroup.Problem
}

// resolveAll applies a change of a PodGroup to the members. Its runs continue once all members agree on the size.
func (mgr *Manager) resolveAll(key Key, now time.Time) {
	g := mgr.groups[key]
	if g == nil {
		return // StartLeading resolves the members.
	}
	for _, r := range g.runs {
		for _, m := range r.members {
			m.recount(func() { m.groupProblem = mgr.resolve(&m.Member) })
		}
	}
	for _, r := range slices.Clone(g.runs) {
		if r.phase == PhaseRunning || len(r.members) == 0 {
			continue
		}
		mgr.continueRun(r, r.ordered()[0], now)
	}
}

// placesAlone reports whether the pods of the group are placed like pods without a group.
func (mgr *Manager) placesAlone(key Key) bool { return mgr.podGroups[key].Alone }

// belowMinCount returns why kube-scheduler tries no pending member of a run of a native group, although the run is running: fewer pods of the
// PodGroup than its minCount haven't ended (k8s.io/kubernetes pkg/scheduler/framework/plugins/gangscheduling, PreEnqueue). It is zero if there are
// enough.
func (g *group) belowMinCount(r *run) reasons.Group {
	if !g.key.Native || r.unbound() == 0 || r.unbound()+r.counts[bound] >= r.size() {
		return reasons.Group{}
	}
	unfinished := g.cardless
	for _, o := range g.runs {
		for _, m := range o.members {
			if !m.Ended {
				unfinished++
			}
		}
	}
	if unfinished >= r.size() {
		return reasons.Group{}
	}
	return reasons.GroupIncomplete(unfinished, r.size()).Unfinished()
}

// offerEligible sets the candidate nodes of a native group's templates according to the specs of their members. It omits templates that have
// candidate nodes from a filter call of this cycle: the present call, and earlier calls that made no plan. If kube-scheduler rejects the node
// of a member's place for another reason, the member moves when filter is called for it.
func (mgr *Manager) offerEligible(r *run, n *needs, now time.Time) {
	eligible := map[string]*candidates{}
	for _, m := range n.members {
		if o := r.offers[m.Template]; m.Request == 0 || o.nodes != nil && now.Sub(o.at) < noRoomMin {
			continue
		}
		nodes, known := eligible[m.Shape]
		if !known {
			names := mgr.EligibleNodes(m.UID)
			nodes = mgr.intern(fingerprint(mgr.seed, names), names)
			eligible[m.Shape] = nodes
		}
		mgr.offer(r, m, nodes, now)
	}
}
