package scheduling

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// job is what a user submits: pods, and the controller that creates them.
type job struct {
	w    *world
	name string
	// controller creates and deletes the pods.
	controller controller
	// specs are the pod templates: one for each member, or for each role.
	specs []podSpec
	// pods are those that exist, in the order of their creation.
	pods []*apiPod
	// stopped is true once the user has deleted it: its controller does nothing more.
	stopped bool
	// resized is true if the group's number was changed.
	resized bool
	// part is the ingredient to which it belongs, see simulation_ingredients_test.go.
	part string
	// submitted is when it began.
	submitted time.Duration
	outlook

	serial int
	// queued is true while the controller will reconcile, writes counts its writes that are under way.
	queued bool
	writes int
}

// controller is the controller of one job. It embeds the job.
type controller interface {
	// reconcile compares the pods with what should exist, and creates and deletes pods. It is called after each change of the job or of
	// its pods, late, as informers report changes late.
	reconcile()
	// change is what users do to such a job: a rollout, a restart, another number of pods.
	change()
	// over reports whether it has ended: it creates no further pod, and none runs.
	over() bool
}

// outlook is what the owner of a job knows about its future.
type outlook struct {
	// impossible is true if the job can never run, whatever else runs: at rest none of its groups can be whole.
	impossible bool
	// failing is true if its pods fail soon after they were bound, again and again.
	failing bool
	// failed is when a pod failed first; 0 if none has.
	failed time.Duration
}

// broken reports whether the job will never do its work, and since when that can be seen from its pods.
func (j *job) broken() (since time.Duration, broken bool) {
	switch {
	case j.impossible:
		return j.submitted, true
	case j.failing && j.failed > 0:
		return j.failed, true
	}
	return 0, false
}

// submit starts the job of a controller.
func (w *world) submit(c controller, j *job) {
	j.w, j.controller, j.submitted, j.part = w, c, w.now, w.part
	for i := range j.specs {
		if j.specs[i].scheduler == "" {
			j.specs[i].scheduler = schedulerName
		}
	}
	w.jobs = append(w.jobs, j)
	j.changed()
}

// changed lets the controller reconcile. It waits for its own writes, as controllers do: until their informers have reported these,
// they would decide on what is known to be outdated.
func (j *job) changed() {
	if j.queued || j.writes > 0 || j.stopped {
		return
	}
	j.queued = true
	lag := j.w.between(5*time.Millisecond, 50*time.Millisecond)
	if j.w.chance(0.3) { // The controller is busy.
		lag = j.w.between(50*time.Millisecond, 2*time.Second)
	}
	j.w.after(lag, func() {
		if j.queued = false; !j.stopped && j.writes == 0 {
			j.controller.reconcile()
		}
	})
}

// changedAfter lets the controller reconcile after a time.
func (j *job) changedAfter(d time.Duration) { j.w.after(d, j.changed) }

// write makes a write of the controller after its latency: what it decided can be outdated by then.
func (j *job) write(what func()) {
	j.writes++
	j.w.after(j.w.between(0, 50*time.Millisecond), func() {
		j.writes--
		if !j.stopped {
			what()
		}
		j.changed()
	})
}

// podChanged is called when a pod starts, ends, or is deleted.
func (j *job) podChanged(p *apiPod) {
	if p.object.Status.Phase == corev1.PodFailed && j.failed == 0 {
		j.failed = j.w.now
	}
	if !p.exists {
		j.pods = slices.DeleteFunc(j.pods, func(o *apiPod) bool { return o == p })
	}
	j.changed()
}

// owner is the object that controls pods.
type owner struct {
	kind, name string
	// uid distinguishes objects of one name; empty if the name does.
	uid string
	// generation distinguishes the runs of a group: pods of one generation belong together.
	generation int
	// replica is the replica of a LeaderWorkerSet that the pods belong to, and replicaSize its number of pods; empty for others.
	replica     string
	replicaSize int
}

// create creates a pod.
func (j *job) create(name string, spec podSpec, by owner, member int) *apiPod {
	p := j.w.api.create(name, spec, by, j, member)
	j.pods = append(j.pods, p)
	return p
}

// unique returns a name that no other pod has had.
func (j *job) unique(name string) string {
	j.serial++
	return fmt.Sprintf("%s-%d", name, j.serial)
}

// delete deletes a pod if it still exists.
func (j *job) delete(p *apiPod) { j.write(func() { j.w.api.delete(p) }) }

// stop deletes all pods.
func (j *job) stop() {
	j.stopped = true
	j.w.jobs = slices.DeleteFunc(j.w.jobs, func(o *job) bool { return o == j })
	for _, p := range slices.Clone(j.pods) {
		j.w.api.delete(p)
	}
}

// idle reports whether all pods have ended or are gone.
func (j *job) idle() bool {
	return !slices.ContainsFunc(j.pods, func(p *apiPod) bool { return p.exists && !p.info.Ended })
}

// memberSet is a controller of pods that differ: a group, or a single pod.
type memberSet struct {
	*job
	// controllers are the kinds of the members' controllers: members of one kind have the same controller. It is empty for bare pods.
	controllers []string
	// replace is true if members that fail or are deleted are created again, early if that happens while the old pod still
	// terminates, stable if the new pod has the old one's name.
	replace, early, stable bool
	generation             int
	// current are the latest pods of the members; nil for those that this generation hasn't created.
	current []*apiPod
}

// newMemberSet returns a controller of a member for each spec, with one controller of each kind.
func newMemberSet(name string, specs []podSpec, controllers []string) *memberSet {
	return &memberSet{job: &job{name: name, specs: specs}, controllers: controllers}
}

// submitMemberSet starts the members.
func (w *world) submitMemberSet(m *memberSet) *memberSet {
	w.submit(m, m.job)
	return m
}

// single starts one pod without a group.
func (w *world) single(name string, spec podSpec) *memberSet {
	return w.submitMemberSet(newMemberSet(name, []podSpec{spec}, []string{""}))
}

// array starts pods without a group at the same time.
func (w *world) array(name string, size int, spec podSpec) *memberSet {
	return w.submitMemberSet(newMemberSet(name, slices.Repeat([]podSpec{spec}, size), slices.Repeat([]string{"a"}, size)))
}

// group starts a group of size equal pods.
func (w *world) group(name string, size int, spec podSpec) *memberSet {
	spec.group, spec.size = name, size
	m := newMemberSet(name, slices.Repeat([]podSpec{spec}, size), slices.Repeat([]string{"a"}, size))
	m.replace = true
	return w.submitMemberSet(m)
}

// reconcile implements controller.
func (m *memberSet) reconcile() {
	for i := range m.specs {
		if !m.has(i) {
			generation := m.generation
			m.write(func() {
				if m.generation == generation {
					m.createMember(i)
				}
			})
		}
	}
}

// has reports whether the member needs no further pod.
func (m *memberSet) has(i int) bool {
	if i >= len(m.current) || m.current[i] == nil {
		return false
	}
	p := m.current[i]
	lost := !p.exists || p.object.Status.Phase == corev1.PodFailed || m.early && p.info.Leaving
	return !m.replace || p.object.Status.Phase == corev1.PodSucceeded || !lost
}

func (m *memberSet) createMember(i int) {
	name := fmt.Sprintf("%s-%d", m.name, i)
	if !m.stable || m.early || m.generation > 0 || m.w.api.pods[name] != nil {
		name = m.unique(name)
	}
	by := owner{generation: m.generation}
	if m.controllers[i] != "" {
		by.kind, by.name = "Job", fmt.Sprintf("%s-%s-%d", m.name, m.controllers[i], m.generation)
	}
	for len(m.current) <= i {
		m.current = append(m.current, nil)
	}
	m.current[i] = m.create(name, m.specs[i], by, i)
}

// change implements controller.
func (m *memberSet) change() {
	switch {
	case len(m.specs) == 1, m.specs[0].group == "":
	case m.w.chance(0.75):
		m.restart()
	default:
		m.resize(max(1, m.specs[0].size+m.w.random.IntN(3)-1))
	}
}

// restart creates all pods again with new controllers, while the old ones still terminate.
func (m *memberSet) restart() {
	m.w.trace("job %s restarts", m.name)
	m.generation++
	m.current = nil
	for _, p := range m.pods {
		m.w.after(m.w.between(0, 10*time.Second), func() { m.w.api.delete(p) })
	}
	m.changed()
}

// resize changes the size of a group in all of its pods.
func (m *memberSet) resize(size int) {
	m.w.trace("job %s has size %d", m.name, size)
	m.resized = true
	for i := range m.specs {
		m.specs[i].size = size
	}
	m.impossible = m.impossible || size > len(m.specs)
	for _, p := range m.pods {
		if p.exists {
			p.size = size
			if p.run != nil {
				p.run.resized = true
			}
			m.w.api.edit(p, func(object *corev1.Pod) { object.Annotations[protocol.AnnotationGroupSize] = strconv.Itoa(size) })
		}
	}
}

// over implements controller.
func (m *memberSet) over() bool {
	for i := range m.specs {
		if !m.has(i) {
			return false
		}
	}
	return m.idle()
}

// randomNodes creates nodes.
func (w *world) randomNodes() {
	count := 2 + w.random.IntN(4)
	if w.chance(0.1) || w.brisk {
		count = 10
	}
	for i := range count {
		cards := make([]int64, 1+w.random.IntN(3))
		if w.brisk {
			cards = make([]int64, 3)
		}
		for c := range cards {
			cards[c] = 16
		}
		w.randomMode(w.api.addNode(fmt.Sprintf("n%d", i), []string{"a", "b"}[w.random.IntN(2)], 3+int64(w.random.IntN(10)), cards...))
	}
}

var simMemory = []int64{4, 8, 16, 16, 6, 12}

// randomSpec returns a pod.
func (w *world) randomSpec() podSpec {
	spec := podSpec{
		memory: simMemory[w.random.IntN(len(simMemory))], cpu: int64(w.random.IntN(3)), scheduler: schedulerName,
		grace: w.between(0, 10*time.Second), lasts: w.between(2*time.Second, 2*time.Minute),
	}
	w.randomTenant(&spec)
	w.randomBudget(&spec)
	if w.chance(0.1) {
		spec.priority = []int32{-10, 100, 1000}[w.random.IntN(3)]
	}
	if w.chance(0.1) {
		spec.zone = "a"
	}
	if w.chance(0.05) {
		spec.grace = time.Minute
	}
	if w.chance(0.15) || w.fair.reclaimAfter > 0 && w.chance(0.3) {
		spec.lasts = 0
	}
	if w.brisk {
		// Cards are left with some memory each, so that kube-scheduler, which counts by node, offers full nodes.
		spec.memory = []int64{6, 10, 12, 10}[w.random.IntN(4)]
		spec.cpu, spec.grace, spec.lasts = 0, w.between(0, time.Second), w.between(time.Second, 10*time.Second)
	}
	return spec
}

// newName returns a name for a job.
func (w *world) newName() string {
	w.api.serial++
	return fmt.Sprintf("j%d", w.api.serial)
}

// randomJob starts a group or a single pod.
func (w *world) randomJob() {
	name, spec := w.newName(), w.randomSpec()
	if w.chance(0.4) || w.brisk && w.chance(0.8) {
		switch {
		case w.chance(0.15):
			spec.memory, spec.cpu = 0, 1+int64(w.random.IntN(4))
		case w.chance(0.3):
			spec.memory = 1 + int64(w.random.IntN(16))
		case spec.memory%2 == 0:
			spec.twoCards = w.chance(0.2)
		}
		w.randomDemand(&spec)
		if w.brisk {
			w.array(name, 1+w.random.IntN(40), spec)
		} else {
			w.single(name, spec)
		}
		return
	}
	j := newMemberSet(name, nil, nil)
	j.replace, j.early, j.stable = w.chance(0.7), w.chance(0.3), w.chance(0.3)
	size := 1 + w.random.IntN(6)
	count := size
	if w.chance(0.1) {
		count += w.random.IntN(3)
	}
	spec.group, spec.size = name, size
	spec.twoCards = w.chance(0.2) // All members alike, as their memory is: the oldest members are planned, whether or not others would fit.
	w.randomDemand(&spec)
	for i := range count {
		member, controller := spec, "a"
		j.specs, j.controllers = append(j.specs, member), append(j.controllers, controller)
		if i > 0 && w.chance(0.05) {
			j.specs[i].cpu++ // Another template.
		}
	}
	if size > 1 {
		w.vary(j)
	}
	w.submitMemberSet(j)
}

// vary changes some members.
func (w *world) vary(j *memberSet) {
	last := len(j.specs) - 1
	switch w.random.IntN(32) {
	case 0: // A leader and workers.
		j.specs[0].cpu, j.controllers[0] = 3, "leader"
	case 1: // Bare pods.
		for i := range j.controllers {
			j.controllers[i] = ""
		}
	case 2:
		j.specs[last].cpu, j.impossible = 1000, len(j.specs) == j.specs[0].size
	case 3:
		for i := range j.specs {
			j.specs[i].cpu = 1000
		}
		j.impossible = true
	case 4:
		j.specs[last].scheduler, j.impossible = absentScheduler, len(j.specs) == j.specs[0].size
	case 5:
		for i := range j.specs {
			j.specs[i].scheduler = absentScheduler
		}
		j.impossible = true
	case 6:
		j.specs[last].gated, j.impossible = true, len(j.specs) == j.specs[0].size
	case 7: // Members are missing.
		j.specs, j.controllers = j.specs[:last], j.controllers[:last]
		j.impossible = len(j.specs) < j.specs[0].size
	case 8:
		j.specs[last].priority = 2000
	case 9:
		j.specs[0].size++ // They disagree.
		j.impossible = true
	case 10: // A launcher.
		j.specs[0].memory = 0
		j.impossible = last < j.specs[0].size
	case 11:
		j.specs[last].zone = "b"
	case 12: // Each needs a node of its own, which the extender doesn't know.
		for i := range j.specs {
			j.specs[i].port = 80
		}
		j.impossible = j.specs[0].size > len(w.api.nodes)
	case 15: // Another profile of the same kube-scheduler.
		j.specs[last].scheduler = otherProfile
	case 16:
		for i := range j.specs {
			j.specs[i].scheduler = otherProfile
		}
	case 13, 14: // The API server refuses to bind a member for a while.
		j.specs[last].refused = w.now + w.between(10*time.Second, 3*time.Minute)
	}
}
