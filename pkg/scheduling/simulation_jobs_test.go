package scheduling

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// job is a group, or a single pod, with the controllers that create its pods.
type job struct {
	w    *world
	name string
	// specs are the members, and controllers the kinds of their controllers: members of one kind have the same controller.
	specs       []podSpec
	controllers []string
	// replace is true if members that fail or are deleted are created again, early if that happens while the old pod still
	// terminates, stable if the new pod has the old one's name.
	replace, early, stable bool
	// impossible is true if the job can never run.
	impossible bool
	// resized is true if the group's number was changed.
	resized    bool
	generation int
	serial     int
	pods       []*apiPod
	stopped    bool
}

// submit starts the job.
func (w *world) submit(j *job) *job {
	j.w = w
	w.jobs = append(w.jobs, j)
	for i := range j.specs {
		w.after(w.between(0, 50*time.Millisecond), func() { j.create(i) })
	}
	return j
}

// single starts one pod without a group.
func (w *world) single(name string, spec podSpec) *job {
	if spec.scheduler == "" {
		spec.scheduler = schedulerName
	}
	return w.submit(&job{name: name, specs: []podSpec{spec}, controllers: []string{""}})
}

// group starts a group of size equal pods.
func (w *world) group(name string, size int, spec podSpec) *job {
	j := &job{name: name, replace: true}
	if spec.scheduler == "" {
		spec.scheduler = schedulerName
	}
	spec.group, spec.size = name, size
	for range size {
		j.specs, j.controllers = append(j.specs, spec), append(j.controllers, "a")
	}
	return w.submit(j)
}

func (j *job) create(i int) {
	if j.stopped {
		return
	}
	name := fmt.Sprintf("%s-%d", j.name, i)
	if !j.stable || j.early || j.generation > 0 || j.w.api.pods[name] != nil {
		j.serial++
		name += fmt.Sprintf("-%d", j.serial)
	}
	controller := ""
	if j.controllers[i] != "" {
		controller = fmt.Sprintf("%s-%s-%d", j.name, j.controllers[i], j.generation)
	}
	p := j.w.api.create(name, j.specs[i], controller, j, i)
	p.generation = j.generation
	j.pods = append(j.pods, p)
}

// lost replaces a pod that is gone or has failed.
func (j *job) lost(p *apiPod) {
	j.pods = slices.DeleteFunc(j.pods, func(o *apiPod) bool { return o == p && !p.exists })
	j.replacePod(p)
}

// terminating is called when the deletion of a pod begins.
func (j *job) terminating(p *apiPod) {
	if j.early {
		j.replacePod(p)
	}
}

func (j *job) replacePod(p *apiPod) {
	if j.stopped || !j.replace || p.replaced || p.object.Status.Phase == corev1.PodSucceeded {
		return
	}
	p.replaced = true
	generation := j.generation
	j.w.after(j.w.between(50*time.Millisecond, 2*time.Second), func() {
		if j.generation == generation {
			j.create(p.member)
		}
	})
}

// restart creates all pods again with new controllers, while the old ones still terminate.
func (j *job) restart() {
	old := slices.Clone(j.pods)
	j.generation++
	j.w.trace("job %s restarts", j.name)
	for _, p := range old {
		p.replaced = true
	}
	for i := range j.specs {
		j.w.after(j.w.between(0, 100*time.Millisecond), func() { j.create(i) })
	}
	for _, p := range old {
		j.w.after(j.w.between(0, 10*time.Second), func() { j.w.api.delete(p) })
	}
}

// stop deletes all pods.
func (j *job) stop() {
	j.stopped = true
	j.w.jobs = slices.DeleteFunc(j.w.jobs, func(o *job) bool { return o == j })
	for _, p := range slices.Clone(j.pods) {
		j.w.api.delete(p)
	}
}

// over reports whether all pods have succeeded or are gone.
func (j *job) over() bool {
	return !slices.ContainsFunc(j.pods, func(p *apiPod) bool { return p.exists && !p.info.Ended })
}

// randomNodes creates nodes.
func (w *world) randomNodes() {
	count := 2 + w.random.IntN(4)
	if w.chance(0.1) {
		count = 10
	}
	for i := range count {
		cards := make([]int64, 1+w.random.IntN(3))
		for c := range cards {
			cards[c] = 16
		}
		w.randomMode(w.api.addNode(fmt.Sprintf("n%d", i), []string{"a", "b"}[w.random.IntN(2)], 3+int64(w.random.IntN(10)), cards...))
	}
}

var simMemory = []int64{4, 8, 16, 16, 6, 12}

// randomJob starts a group or a single pod.
func (w *world) randomJob() {
	w.api.serial++
	name := fmt.Sprintf("j%d", w.api.serial)
	spec := podSpec{
		memory: simMemory[w.random.IntN(len(simMemory))], cpu: int64(w.random.IntN(3)), scheduler: schedulerName,
		grace: w.between(0, 10*time.Second), lasts: w.between(2*time.Second, 2*time.Minute),
	}
	if w.chance(0.1) {
		spec.priority = []int32{-10, 100, 1000}[w.random.IntN(3)]
	}
	if w.chance(0.1) {
		spec.zone = "a"
	}
	if w.chance(0.05) {
		spec.grace = time.Minute
	}
	if w.chance(0.15) {
		spec.lasts = 0
	}
	if w.chance(0.4) {
		switch {
		case w.chance(0.15):
			spec.memory, spec.cpu = 0, 1+int64(w.random.IntN(4))
		case w.chance(0.3):
			spec.memory = 1 + int64(w.random.IntN(16))
		case spec.memory%2 == 0:
			spec.twoCards = w.chance(0.2)
		}
		w.randomDemand(&spec)
		w.single(name, spec)
		return
	}
	j := &job{name: name, replace: w.chance(0.7), early: w.chance(0.3), stable: w.chance(0.3)}
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
	w.submit(j)
}

// vary changes some members.
func (w *world) vary(j *job) {
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
