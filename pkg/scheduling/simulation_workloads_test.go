package scheduling

import (
	"fmt"
	"slices"
)

// leaderWorkerSet is a LeaderWorkerSet (sigs.k8s.io/lws pkg/controllers). All its replicas have the same two pod templates.
type leaderWorkerSet struct {
	*job // The templates are the leader's and the workers'.
	// size is the number of pods of a replica.
	replicas, size int
	// recreate is restartPolicy RecreateGroupOnPodRestart: a replica of which a pod fails or is deleted is created again as a whole.
	recreate bool
	groups   []*leaderWorkerGroup
}

// leaderWorkerGroup is a replica of a LeaderWorkerSet.
type leaderWorkerGroup struct {
	leader *apiPod
	// workers are those of the leader, or of the one before it until they are gone.
	workers *statefulSet
	// foreground is true if the leader was deleted in the foreground: its object then exists until its workers are gone.
	foreground bool
}

// leaderWorkerSet starts a LeaderWorkerSet. The number of the group in the pod templates is given by the specs.
func (w *world) leaderWorkerSet(name string, replicas, size int, recreate bool, leader, worker podSpec) *leaderWorkerSet {
	j := &job{name: name, specs: []podSpec{leader, worker}}
	j.impossible = leader.size > replicas*size
	l := &leaderWorkerSet{job: j, replicas: replicas, size: size, recreate: recreate}
	for range replicas {
		l.groups = append(l.groups, &leaderWorkerGroup{})
	}
	w.submit(l, j)
	return l
}

// reconcile implements controller.
func (l *leaderWorkerSet) reconcile() {
	for i, g := range l.groups {
		l.sync(i, g)
	}
}

// sync makes the next step of a replica.
func (l *leaderWorkerSet) sync(i int, g *leaderWorkerGroup) {
	name := fmt.Sprint(l.name, "-", i)
	deleted := g.workers != nil && g.workers.gone()
	switch {
	case g.leader == nil || !g.leader.exists:
		if g.workers != nil {
			g.workers.deleteAll() // Garbage.
		}
		if !g.foreground || g.workers == nil || deleted {
			l.createLeader(name, i, g)
		}
	case g.leader.info.Leaving:
		if g.workers != nil {
			g.workers.deleteAll()
		}
	case g.leader.info.Ended, l.recreate && g.workers != nil && g.workers.by.generation == g.leader.generation && g.workers.lost():
		l.w.trace("replica %s restarts", name)
		g.foreground = true
		l.delete(g.leader)
	case g.workers != nil && g.workers.by.generation != g.leader.generation:
		g.workers.deleteAll()
		if deleted {
			g.workers = nil
			l.changed()
		}
	case g.workers == nil && l.size > 1:
		by := l.owner(name, fmt.Sprintf("%s-%s", name, g.leader.uid()), name, g.leader.generation)
		g.workers = &statefulSet{podSet: podSet{job: l.job, by: by, spec: 1}, replicas: l.size - 1}
		l.changed()
	case g.workers != nil:
		g.workers.sync()
	}
}

// owner returns a StatefulSet that has pods of the replica.
func (l *leaderWorkerSet) owner(name, uid, replica string, generation int) owner {
	return owner{kind: "StatefulSet", name: name, uid: uid, generation: generation, replica: replica, replicaSize: l.size}
}

// createLeader creates the leader of a replica. Its controller is the StatefulSet of all leaders.
func (l *leaderWorkerSet) createLeader(name string, i int, g *leaderWorkerGroup) {
	l.write(func() {
		l.serial++
		g.leader = l.create(name, l.specs[0], l.owner(l.name, "", name, l.serial), i)
		g.foreground = false
	})
}

// lost reports whether a pod that the set has created has ended or is deleted.
func (s *statefulSet) lost() bool {
	return slices.ContainsFunc(s.own, func(p *apiPod) bool { return !p.active() })
}

// change implements controller: a replica is deleted, as in a rollout.
func (l *leaderWorkerSet) change() {
	if p := l.groups[l.w.random.IntN(l.replicas)].leader; p != nil && p.exists {
		l.delete(p)
	}
}

// over implements controller.
func (l *leaderWorkerSet) over() bool { return false }
