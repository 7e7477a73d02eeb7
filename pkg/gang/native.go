package gang

import (
	"fmt"
	"slices"
	"time"
)

// A native group is a PodGroup of Kubernetes. kube-scheduler tries its pods in one cycle (k8s.io/kubernetes
// pkg/scheduler/schedule_one_podgroup.go, podGroupSchedulingDefaultAlgorithm): it calls filter member by member, each as if the
// ones before were bound, stops when too few can follow, and only then binds. It counts the sum of a node's memory, not its cards.
// A call doesn't show that the cycle has failed, or that it is a trial in which the victims of a preemption count as gone. And it retries the
// group by itself, after a back-off that no event of the cluster shortens (pkg/scheduler/backend/queue/scheduling_queue.go,
// AddAttemptedPodGroupIfNeeded).
//
// So the plan for all members is made in the first filter call of a cycle: if that call finds no node, kube-scheduler may give up the
// cycle, and never call for the others. It has offered nodes only for the template of this call; for the others, the candidate nodes
// follow from their specs (offerEligible). No plan is made between two cycles, since no call would follow soon. A plan that no bind
// follows ends nativePatience after the latest call.

// PodGroup is what a PodGroup says about its pods.
type PodGroup struct {
	// Size is how many of them must be bound together; 0 if Alone is true or Problem isn't empty.
	Size int
	// Alone is true if they are placed like pods without a group (the policy basic).
	Alone bool
	// Problem is why they can't be placed; empty if they can.
	Problem string
}

// nativePatience is how long the plan of a native group lasts after a filter call if no bind follows. In one cycle
// the next call comes within milliseconds.
const nativePatience = 2 * time.Second

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

func (mgr *Manager) resolve(m *Member) (problem string) { return Resolve(m, mgr.podGroups) }

// Resolve sets the size of a member of a native group, and returns what is wrong with the group. podGroups is nil if native groups are
// off.
func Resolve(m *Member, podGroups map[Key]PodGroup) (problem string) {
	if m.PodGroup == "" || podGroups == nil {
		return ""
	}
	if !m.Gang.Native {
		m.Size = 0
		return twoGroups
	}
	podGroup, known := podGroups[m.Gang]
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
			r.add(m, -1)
			m.groupProblem = mgr.resolve(&m.Member)
			m.counted = mgr.countAs(m)
			r.add(m, 1)
		}
	}
	for _, r := range slices.Clone(g.runs) {
		if r.phase == PhaseRunning || len(r.members) == 0 {
			continue
		}
		mgr.forgive(r)
		mgr.changed(r, r.ordered()[0], now)
	}
}

// placesAlone reports whether the pods of the group are placed like pods without a group.
func (mgr *Manager) placesAlone(key Key) bool { return mgr.podGroups[key].Alone }

// offerEligible gives the members of a native group candidate nodes by their specs, except for templates that have some from this
// cycle: that for which filter is being called, and those of earlier calls that made no plan. If kube-scheduler rejects the node of a
// member's place for other reasons, the place moves when filter is called for the member.
func (mgr *Manager) offerEligible(r *run, n *needs, now time.Time) {
	eligible := map[string]*candidates{}
	for _, m := range n.members {
		if o := r.offers[m.Template]; m.Request == 0 || o != nil && o.nodes != nil && now.Sub(o.at) < noRoomMin {
			continue
		}
		nodes, known := eligible[m.shape()]
		if !known {
			names := mgr.EligibleNodes(m.UID)
			nodes = mgr.intern(fingerprintOf(mgr.seed, names), names)
			eligible[m.shape()] = nodes
		}
		mgr.offer(r, m, nodes, now)
	}
}
