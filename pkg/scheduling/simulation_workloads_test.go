package scheduling

import (
	"fmt"
	"slices"
	"time"
)

// soleSet is a StatefulSet of its own.
type soleSet struct{ *statefulSet }

// statefulSet starts a StatefulSet.
func (w *world) statefulSet(name string, replicas int, parallel bool, spec podSpec) soleSet {
	j := &job{name: name, specs: []podSpec{spec}}
	s := soleSet{&statefulSet{podSet: podSet{job: j, by: owner{kind: "StatefulSet", name: name}}, replicas: replicas, parallel: parallel}}
	// The second member isn't created before the first one is ready, which it is once the group is whole.
	j.impossible = spec.size > replicas || spec.size > 1 && !parallel
	w.submit(s, j)
	return s
}

// reconcile implements controller.
func (s soleSet) reconcile() { s.sync() }

// change implements controller: a rollout, or another number of pods.
func (s soleSet) change() {
	if s.w.chance(0.6) {
		s.restart()
		return
	}
	s.replicas = max(s.specs[0].size, s.replicas+s.w.random.IntN(3)-1, 1)
	s.changed()
}

// restart begins a rollout.
func (s soleSet) restart() {
	s.revision++
	s.changed()
}

// over implements controller.
func (s soleSet) over() bool { return false }

// leaderWorkerSet is a LeaderWorkerSet (sigs.k8s.io/lws pkg/controllers). All its replicas have the same two pod templates.
type leaderWorkerSet struct {
	*job // The templates are the leader's and the workers'.
	// size is the number of pods of a replica.
	replicas, size int
	// afterLeader is startupPolicy LeaderReady: a replica's workers are created once its leader is ready.
	afterLeader bool
	// recreate is restartPolicy RecreateGroupOnPodRestart: a replica of which a pod fails or is deleted is created again as a whole.
	recreate bool
	groups   []*leaderWorkerGroup
	revision int
}

// leaderWorkerGroup is a replica of a LeaderWorkerSet.
type leaderWorkerGroup struct {
	leader *apiPod
	// workers are those of the leader, or of the one before it until they are gone.
	workers  *statefulSet
	revision int
	// foreground is true if the leader was deleted in the foreground: its object then exists until its workers are gone.
	foreground bool
}

// leaderWorkerSet starts a LeaderWorkerSet. The number of the group in the pod templates is given by the specs.
func (w *world) leaderWorkerSet(name string, replicas, size int, afterLeader, recreate bool, leader, worker podSpec) *leaderWorkerSet {
	j := &job{name: name, specs: []podSpec{leader, worker}}
	inReplica := leader.size <= size
	j.impossible = leader.size > replicas*size || afterLeader && leader.memory > 0 && (inReplica && leader.size > 1 || leader.size > replicas)
	l := &leaderWorkerSet{job: j, replicas: replicas, size: size, afterLeader: afterLeader, recreate: recreate}
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
	l.roll()
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
	case g.workers == nil && l.size > 1 && (!l.afterLeader || g.leader.ready()):
		by := l.owner(name, fmt.Sprintf("%s-%s", name, g.leader.uid()), name, g.leader.generation)
		g.workers = &statefulSet{podSet: podSet{job: l.job, by: by, spec: 1}, replicas: l.size - 1, first: 1, parallel: true}
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
		g.revision, g.foreground = l.revision, false
	})
}

// lost reports whether a pod that the set has created has ended or is deleted.
func (s *statefulSet) lost() bool {
	return slices.ContainsFunc(s.own, func(p *apiPod) bool { return !p.active() })
}

// roll restarts the last replica of an old revision once those behind it are ready.
func (l *leaderWorkerSet) roll() {
	for i, g := range slices.Backward(l.groups) {
		if g.leader == nil || !g.leader.exists {
			return
		}
		if g.revision < l.revision {
			if !g.leader.info.Leaving {
				l.delete(g.leader)
			}
			return
		}
		if !l.ready(i) {
			return
		}
	}
}

// ready reports whether all pods of the replica run.
func (l *leaderWorkerSet) ready(i int) bool {
	g := l.groups[i]
	return g.leader != nil && g.leader.ready() && (l.size == 1 || g.workers != nil && g.workers.ready() == l.size-1)
}

// restart begins a rollout, replica by replica.
func (l *leaderWorkerSet) restart() {
	l.revision++
	l.changed()
}

// change implements controller.
func (l *leaderWorkerSet) change() { l.restart() }

// over implements controller.
func (l *leaderWorkerSet) over() bool { return false }

// jobSet is a JobSet (sigs.k8s.io/jobset pkg/controllers).
type jobSet struct {
	*job
	// roles are the replicated jobs: each has a pod template.
	roles []replicatedJob
	// restarts counts how often all Jobs were created again because one had failed, at most maxRestarts times.
	restarts, maxRestarts int
	jobs                  []*childJob
	lost                  bool
}

// replicatedJob are equal Jobs of a JobSet.
type replicatedJob struct {
	replicas int
	jobSpec
}

// childJob is a Job of a JobSet. It is created again, with the same name, once its pods are gone.
type childJob struct {
	role, index int
	*batchJob
	attempt int
}

// jobSet starts a JobSet. specs are the templates of the roles.
func (w *world) jobSet(name string, maxRestarts int, roles []replicatedJob, specs []podSpec) *jobSet {
	j := &jobSet{job: &job{name: name, specs: specs}, roles: roles, maxRestarts: maxRestarts}
	most := 0
	for role, r := range roles {
		for i := range r.replicas {
			j.jobs = append(j.jobs, &childJob{role: role, index: i, attempt: -1})
		}
		most += r.replicas * r.most()
	}
	j.impossible = specs[0].size > most
	w.submit(j, j.job)
	return j
}

// reconcile implements controller.
func (j *jobSet) reconcile() {
	for _, c := range j.jobs {
		if c.attempt == j.restarts {
			c.sync()
		}
		if c.attempt == j.restarts && c.lost && !j.lost {
			j.fail()
			break
		}
	}
	for _, c := range j.jobs {
		switch {
		case j.lost:
		case c.attempt == j.restarts:
		case c.batchJob == nil || c.gone():
			name := fmt.Sprintf("%s-%d-%d", j.name, c.role, c.index)
			by := owner{name: name, uid: fmt.Sprintf("%s-%d", name, j.restarts), generation: j.restarts}
			c.batchJob, c.attempt = newBatchJob(j.job, c.role, by, j.roles[c.role].jobSpec), j.restarts
			j.changed()
		}
	}
}

// fail handles a Job that has failed.
func (j *jobSet) fail() {
	if j.lost = j.restarts >= j.maxRestarts; !j.lost {
		j.restart()
		return
	}
	for _, c := range j.jobs {
		if c.batchJob != nil {
			c.deleteAll()
		}
	}
}

// restart creates all Jobs again.
func (j *jobSet) restart() {
	j.w.trace("JobSet %s restarts", j.name)
	j.restarts++
	for _, c := range j.jobs {
		if c.batchJob != nil {
			c.deleteAll()
		}
	}
	j.changed()
}

// change implements controller.
func (j *jobSet) change() {
	j.maxRestarts++
	j.restart()
}

// over implements controller.
func (j *jobSet) over() bool {
	return j.idle() && (j.lost || !slices.ContainsFunc(j.jobs, func(c *childJob) bool { return c.batchJob == nil || c.attempt != j.restarts || !c.complete }))
}

// concurrency is a concurrencyPolicy.
type concurrency int

const (
	allow concurrency = iota
	forbid
	replace
)

// cronJob is a CronJob (k8s.io/kubernetes pkg/controller/cronjob/cronjob_controllerv2.go). Its Jobs have one pod template.
type cronJob struct {
	*job
	jobSpec
	every  time.Duration
	policy concurrency
	jobs   []*batchJob
	begun  int
}

// cronJob starts a CronJob.
func (w *world) cronJob(name string, every time.Duration, policy concurrency, s jobSpec, spec podSpec) *cronJob {
	c := &cronJob{job: &job{name: name, specs: []podSpec{spec}}, jobSpec: s, every: every, policy: policy}
	c.impossible = spec.size > s.most()
	w.submit(c, c.job)
	w.after(w.between(0, every), c.begin)
	return c
}

// begin creates a Job, again and again.
func (c *cronJob) begin() {
	if c.stopped || c.w.calm {
		return
	}
	c.w.after(c.every, c.begin)
	for _, b := range c.jobs {
		if b.ended() {
			continue
		}
		switch c.policy {
		case forbid:
			return
		case replace: // The Job is deleted in the background: its pods can exist beside the new ones.
			b.lost = true
			b.deleteAll()
		}
	}
	c.begun++
	c.jobs = append(c.jobs, newBatchJob(c.job, 0, owner{name: fmt.Sprint(c.name, "-", c.begun), generation: c.begun}, c.jobSpec))
	c.changed()
}

// reconcile implements controller.
func (c *cronJob) reconcile() {
	for _, b := range c.jobs {
		b.sync()
	}
	c.jobs = slices.DeleteFunc(c.jobs, func(b *batchJob) bool { return b.ended() && b.gone() })
}

// change implements controller.
func (c *cronJob) change() {}

// over implements controller.
func (c *cronJob) over() bool { return false }

// stream submits equal items again and again: single pods, or groups that each have a name of their own.
type stream struct {
	*job
	streamSpec
	items [][]*apiPod
	begun int
}

// streamSpec are the parameters of a stream.
type streamSpec struct {
	// size is the number of pods of a group; 0 for single pods.
	size int
	// width is the largest number of items at the same time.
	width int
	// every is the time between two items; with jitter, a random time up to it.
	every  time.Duration
	jitter bool
}

// stream starts a stream.
func (w *world) stream(name string, s streamSpec, spec podSpec) *stream {
	t := &stream{job: &job{name: name, specs: []podSpec{spec}}, streamSpec: s}
	w.submit(t, t.job)
	w.after(0, t.begin)
	return t
}

// begin submits an item, again and again.
func (t *stream) begin() {
	if t.stopped || t.w.calm {
		return
	}
	pause := t.every
	if t.jitter {
		pause = t.w.between(0, t.every)
	}
	t.w.after(pause, t.begin)
	t.items = slices.DeleteFunc(t.items, func(pods []*apiPod) bool {
		return !slices.ContainsFunc(pods, func(p *apiPod) bool { return p.exists && !p.info.Ended })
	})
	if len(t.items) >= t.width {
		return
	}
	t.begun++
	spec, by := t.specs[0], owner{}
	name := fmt.Sprint(t.name, "-", t.begun)
	if t.size > 0 {
		spec.group, spec.size = name, t.size
		by = owner{kind: "Job", name: name}
	}
	var pods []*apiPod
	for i := range max(1, t.size) {
		pods = append(pods, t.create(fmt.Sprint(name, "-", i), spec, by, i))
	}
	t.items = append(t.items, pods)
}

// reconcile implements controller.
func (t *stream) reconcile() {}

// change implements controller.
func (t *stream) change() {}

// over implements controller.
func (t *stream) over() bool { return false }
