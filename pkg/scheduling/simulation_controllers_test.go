package scheduling

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// podSet are the pods of one object that controls pods: a Job, a ReplicaSet, or a StatefulSet. A job has one of them, or several.
type podSet struct {
	*job
	by owner
	// spec is the index of the pod template.
	spec int
	// own are the pods that the object has created and that its controller still looks at.
	own []*apiPod
	// revision counts the changes of the template, for a StatefulSet.
	revision int
}

// add creates a pod, late, unless its name is taken.
func (s *podSet) add(name string, member int) {
	s.write(func() {
		if s.w.api.pods[name] == nil {
			p := s.create(name, s.specs[s.spec], s.by, member)
			p.revision = s.revision
			s.own = append(s.own, p)
		}
	})
}

// active returns the pods that have not ended and aren't deleted.
func (s *podSet) active() (pods []*apiPod) {
	for _, p := range s.own {
		if p.active() {
			pods = append(pods, p)
		}
	}
	return pods
}

// ready counts the ready pods.
func (s *podSet) ready() (n int) {
	for _, p := range s.own {
		if p.ready() {
			n++
		}
	}
	return n
}

// gone reports whether none of the pods exists, and forgets those that don't.
func (s *podSet) gone() bool {
	s.own = slices.DeleteFunc(s.own, func(p *apiPod) bool { return !p.exists })
	return len(s.own) == 0
}

// deleteAll deletes all pods.
func (s *podSet) deleteAll() {
	for _, p := range s.own {
		if p.exists && !p.info.Leaving {
			s.delete(p)
		}
	}
}

// remove deletes n of the active pods, and returns them: first those that aren't bound, then those that aren't ready, then the youngest, as
// controllers do (k8s.io/kubernetes pkg/controller/controller_utils.go, ActivePods).
func (s *podSet) remove(n int) []*apiPod {
	pods := s.active()
	rank := func(p *apiPod) int {
		switch {
		case !p.bound():
			return 0
		case !p.ready():
			return 1
		}
		return 2
	}
	slices.SortStableFunc(pods, func(a, b *apiPod) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(b.created, a.created))
	})
	pods = pods[:min(n, len(pods))]
	for _, p := range pods {
		s.delete(p)
	}
	return pods
}

// active reports whether the pod has not ended and isn't deleted.
func (p *apiPod) active() bool { return p.exists && !p.info.Ended && !p.info.Leaving }

// ready reports whether the pod runs and is healthy.
func (p *apiPod) ready() bool {
	return p.active() && p.object.Status.Phase == corev1.PodRunning && !p.unhealthy
}

func (p *apiPod) succeeded() bool { return p.object.Status.Phase == corev1.PodSucceeded }
func (p *apiPod) failed() bool    { return p.object.Status.Phase == corev1.PodFailed }

// jobSpec are the fields of a Job.
type jobSpec struct {
	// completions is how many pods must succeed; 0 if not given: the first that succeeds ends the work.
	completions, parallelism, backoffLimit int
	indexed                                bool
	// onlyFailed is podReplacementPolicy Failed: a pod is replaced once it has failed, and not already while it terminates.
	onlyFailed bool
}

// most is how many pods the Job has at the same time.
func (s jobSpec) most() int {
	if s.completions > 0 {
		return min(s.completions, s.parallelism)
	}
	return s.parallelism
}

// batchJob is a Job (k8s.io/kubernetes pkg/controller/job/job_controller.go, syncJob and manageJob).
type batchJob struct {
	podSet
	jobSpec
	succeeded, failures int
	// done has the indexes that have succeeded, counted the pods that have finished.
	done    map[int]bool
	counted map[*apiPod]bool
	// sinceSuccess counts the failures since the last success, lastFailure is when the last one was: they determine the back-off.
	sinceSuccess int
	lastFailure  time.Duration
	// complete and failed are its end.
	complete, lost bool
}

const (
	jobBackoff    = 10 * time.Second
	jobMaxBackoff = 10 * time.Minute
)

func (b *batchJob) ended() bool { return b.complete || b.lost }

// sync counts the pods that have finished, and creates or deletes pods.
func (b *batchJob) sync() {
	if b.ended() {
		return
	}
	b.count()
	switch {
	case b.failures > b.backoffLimit:
		b.lost = true
		b.deleteAll()
	case b.completions > 0 && b.succeeded >= b.completions, b.completions == 0 && b.succeeded > 0 && len(b.active()) == 0:
		b.complete = true
		b.deleteAll()
	default:
		b.manage()
	}
}

// count counts the pods that have finished. A deleted pod counts as failed, so that its place isn't lost.
func (b *batchJob) count() {
	for _, p := range b.own {
		switch {
		case b.counted[p]:
			continue
		case p.succeeded():
			if !b.indexed || !b.done[p.member] {
				b.succeeded++
			}
			b.done[p.member] = true
			b.sinceSuccess = 0
		case p.failed(), !p.exists, p.info.Leaving && !b.onlyFailed:
			b.failures++
			b.sinceSuccess++
			b.lastFailure = b.w.now
		default:
			continue
		}
		b.counted[p] = true
	}
	b.gone()
	maps.DeleteFunc(b.counted, func(p *apiPod, _ bool) bool { return !p.exists })
}

// unfinished reports whether the pod runs or will run, or terminates and isn't counted.
func (b *batchJob) unfinished(p *apiPod) bool { return p.exists && !b.counted[p] }

// manage adjusts the number of active pods.
func (b *batchJob) manage() {
	active := b.active()
	want := b.parallelism
	switch {
	case b.completions > 0:
		want = min(b.completions-b.succeeded, b.parallelism)
	case b.succeeded > 0:
		want = min(len(active), b.parallelism)
	}
	if len(active) > want {
		for _, p := range b.remove(len(active) - want) {
			b.counted[p] = true // They aren't failures.
		}
		return
	}
	missing := want - len(active)
	if b.onlyFailed {
		for _, p := range b.own { // Those that terminate count.
			if b.unfinished(p) && !p.active() {
				missing--
			}
		}
	}
	if missing <= 0 {
		return
	}
	if b.sinceSuccess > 0 {
		if left := b.lastFailure + min(jobBackoff<<min(b.sinceSuccess-1, 10), jobMaxBackoff) - b.w.now; left > 0 {
			b.changedAfter(left)
			return
		}
	}
	for index := 0; missing > 0; index++ {
		if b.indexed {
			if b.done[index] || slices.ContainsFunc(b.own, func(p *apiPod) bool { return p.member == index && b.unfinished(p) }) {
				continue
			}
			if index >= b.completions {
				return
			}
		}
		missing--
		b.add(b.unique(fmt.Sprint(b.by.name, "-", index)), index)
	}
}

// soleJob is a Job of its own.
type soleJob struct {
	*batchJob
	// shrunk is true if its parallelism is too small for its group.
	shrunk bool
}

// newBatchJob returns a Job of another job.
func newBatchJob(j *job, spec int, by owner, s jobSpec) *batchJob {
	by.kind = "Job"
	return &batchJob{podSet: podSet{job: j, by: by, spec: spec}, jobSpec: s, done: map[int]bool{}, counted: map[*apiPod]bool{}}
}

// batchJob starts a Job.
func (w *world) batchJob(name string, s jobSpec, spec podSpec) *soleJob {
	j := &job{name: name, specs: []podSpec{spec}}
	b := &soleJob{batchJob: newBatchJob(j, 0, owner{name: name}, s)}
	w.submit(b, j)
	return b
}

// reconcile implements controller.
func (b *soleJob) reconcile() { b.sync() }

// over implements controller.
func (b *soleJob) over() bool { return b.ended() && b.idle() }

// change implements controller: another parallelism.
func (b *soleJob) change() {
	b.parallelism = 1 + b.w.random.IntN(b.parallelism+2)
	b.w.trace("Job %s has parallelism %d", b.name, b.parallelism)
	if !b.impossible || b.shrunk {
		b.shrunk = b.specs[0].size > b.most()
		b.impossible = b.shrunk
	}
	b.changed()
}

// replicaSet is a ReplicaSet (k8s.io/kubernetes pkg/controller/replicaset/replica_set.go, manageReplicas).
type replicaSet struct {
	podSet
	replicas int
}

func (r *replicaSet) sync() {
	r.gone()
	active := len(r.active())
	if active > r.replicas {
		r.remove(active - r.replicas)
	}
	for range r.replicas - active {
		r.add(r.unique(r.by.name), 0)
	}
}

// rollout are the fields of a Deployment.
type rollout struct {
	replicas, maxSurge, maxUnavailable int
	// recreate deletes all old pods before new ones are created.
	recreate bool
}

// deployment is a Deployment (k8s.io/kubernetes pkg/controller/deployment, rolling.go and recreate.go).
type deployment struct {
	*job
	rollout
	// sets are the ReplicaSets. The last is the one of the present template.
	sets []*replicaSet
}

// deployment starts a Deployment.
func (w *world) deployment(name string, r rollout, spec podSpec) *deployment {
	d := &deployment{job: &job{name: name, specs: []podSpec{spec}}, rollout: r}
	d.roll()
	w.submit(d, d.job)
	return d
}

// roll begins a rollout: the template has changed.
func (d *deployment) roll() {
	by := owner{kind: "ReplicaSet", name: fmt.Sprintf("%s-%d", d.name, len(d.sets)), generation: len(d.sets)}
	d.sets = append(d.sets, &replicaSet{podSet: podSet{job: d.job, by: by}})
}

// restart begins a rollout, as kubectl rollout restart does.
func (d *deployment) restart() {
	d.w.trace("Deployment %s is rolled", d.name)
	d.roll()
	d.changed()
}

// rolled reports whether a rollout is complete.
func (d *deployment) rolled() bool {
	now := d.sets[len(d.sets)-1]
	return now.ready() == d.replicas && !slices.ContainsFunc(d.pods, func(p *apiPod) bool { return p.exists && p.generation != now.by.generation })
}

// reconcile implements controller.
func (d *deployment) reconcile() {
	last := len(d.sets) - 1
	if old := d.sets[:last]; d.recreate {
		d.recreateAll(old, d.sets[last])
	} else {
		d.rollOn(old, d.sets[last])
	}
	for _, s := range d.sets {
		s.sync()
	}
}

func (d *deployment) recreateAll(old []*replicaSet, now *replicaSet) {
	ended := true
	for _, s := range old {
		s.replicas = 0
		ended = ended && !slices.ContainsFunc(s.own, func(p *apiPod) bool { return p.exists && !p.info.Ended })
	}
	if ended {
		now.replicas = d.replicas
	}
}

// rollOn makes one step of a rolling update: the new ReplicaSet grows, or the old ones shrink.
func (d *deployment) rollOn(old []*replicaSet, now *replicaSet) {
	all, available := 0, 0
	for _, s := range d.sets {
		all, available = all+s.replicas, available+s.ready()
	}
	if now.replicas != d.replicas {
		grown := min(d.replicas, now.replicas+max(0, d.replicas+d.maxSurge-all))
		if grown != now.replicas {
			now.replicas = grown
			d.changed() // It shrinks the others in a further step.
			return
		}
	}
	least := d.replicas - d.maxUnavailable
	clean := all - least - max(0, now.replicas-now.ready())
	if clean <= 0 {
		return
	}
	shrunk := false
	for _, s := range old { // First the pods that don't run.
		n := max(0, min(clean, s.replicas-s.ready()))
		s.replicas, clean, shrunk = s.replicas-n, clean-n, shrunk || n > 0
	}
	spare := available - least
	for _, s := range old {
		n := max(0, min(spare, s.replicas))
		s.replicas, spare, shrunk = s.replicas-n, spare-n, shrunk || n > 0
	}
	if shrunk {
		d.changed()
	}
}

// change implements controller: a rollout, or another number of pods.
func (d *deployment) change() {
	if d.w.chance(0.6) {
		d.restart()
		return
	}
	d.replicas = max(d.specs[0].size, d.replicas+d.w.random.IntN(3)-1, 1)
	d.w.trace("Deployment %s has %d replicas", d.name, d.replicas)
	d.changed()
}

// over implements controller.
func (d *deployment) over() bool { return false }

// statefulSet is a StatefulSet (k8s.io/kubernetes pkg/controller/statefulset/stateful_set_control.go, updateStatefulSet).
type statefulSet struct {
	podSet
	replicas int
	// first is the first ordinal.
	first int
	// parallel is podManagementPolicy Parallel: else each pod waits until the one before it is ready.
	parallel bool
}

// pod returns the pod with the ordinal; nil if none exists.
func (s *statefulSet) pod(ordinal int) *apiPod {
	for _, p := range s.own {
		if p.exists && p.member == ordinal {
			return p
		}
	}
	return nil
}

func (s *statefulSet) sync() {
	s.gone()
	if s.scaled() {
		s.roll()
	}
}

// scaled creates and deletes pods, and reports whether a rollout may go on.
func (s *statefulSet) scaled() bool {
	for ordinal := s.first; ordinal < s.first+s.replicas; ordinal++ {
		p := s.pod(ordinal)
		switch {
		case p == nil:
			s.add(fmt.Sprint(s.by.name, "-", ordinal), ordinal)
		case p.info.Ended && !p.info.Leaving: // It is created again once it is gone.
			s.delete(p)
		}
		if !s.parallel && (p == nil || !p.ready()) {
			return false
		}
	}
	for _, p := range slices.Backward(s.own) {
		if p.member >= s.first+s.replicas {
			if !p.info.Leaving {
				s.delete(p)
			}
			if !s.parallel {
				return false
			}
		}
	}
	return true
}

// roll deletes the last pod of an old revision once those behind it are ready.
func (s *statefulSet) roll() {
	for ordinal := s.first + s.replicas - 1; ordinal >= s.first; ordinal-- {
		p := s.pod(ordinal)
		switch {
		case p == nil:
			return
		case p.revision < s.revision && !p.info.Leaving:
			s.delete(p)
			return
		case !p.ready():
			return
		}
	}
}
