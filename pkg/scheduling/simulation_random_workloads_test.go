package scheduling

import "time"

// randomWorkload starts one of the workloads that people use, with random parameters, from a pod. Its user deletes it after some minutes.
func (w *world) randomWorkload(name string, spec podSpec) *job {
	workload := workloads[w.random.IntN(len(workloads))]
	j := workload(w, name, spec)
	w.after(w.between(time.Minute, 8*time.Minute), func() {
		if !j.stopped {
			j.stop()
		}
	})
	return j
}

// service makes a pod that runs until it is deleted.
func (s podSpec) service() podSpec {
	s.lasts = 0
	return s
}

// in makes a pod a member of a group.
func (s podSpec) in(group string, size int) podSpec {
	s.group, s.size = group, size
	return s
}

// randomRollout returns parameters of a Deployment.
func (w *world) randomRollout() rollout {
	r := rollout{replicas: 1 + w.random.IntN(4), maxSurge: w.random.IntN(3), maxUnavailable: w.random.IntN(2), recreate: w.chance(0.2)}
	if r.maxSurge == 0 && r.maxUnavailable == 0 { // The API server allows no other.
		r.maxSurge = 1
	}
	return r
}

// randomJobSpec returns parameters of a Job of up to five pods.
func (w *world) randomJobSpec() jobSpec {
	s := jobSpec{parallelism: 1 + w.random.IntN(5), backoffLimit: w.random.IntN(7), onlyFailed: w.chance(0.3)}
	switch w.random.IntN(3) {
	case 0:
		s.completions = s.parallelism
	case 1:
		s.completions = 1 + w.random.IntN(10)
	}
	s.indexed = s.completions > 0 && w.chance(0.5)
	return s
}

// workloads are the workloads, each with a function that draws its parameters.
var workloads = []func(w *world, name string, spec podSpec) *job{
	func(w *world, name string, spec podSpec) *job { return w.batchJob(name, w.randomJobSpec(), spec).job },
	func(w *world, name string, spec podSpec) *job { // A group; now and then it has more pods than the group's number.
		s := w.randomJobSpec()
		return w.batchJob(name, s, spec.in(name, max(1, s.most()-w.random.IntN(2)))).job
	},
	func(w *world, name string, spec podSpec) *job { // Broken for good.
		s := w.randomJobSpec()
		spec.lasts, spec.fails = w.between(time.Second, 20*time.Second), true
		if w.chance(0.5) {
			spec = spec.in(name, s.most())
		}
		b := w.batchJob(name, s, spec)
		b.failing = true
		return b.job
	},
	func(w *world, name string, spec podSpec) *job { // Never bindable.
		s := w.randomJobSpec()
		if w.chance(0.5) {
			spec.volume = "missing"
		} else {
			s.completions, s.parallelism, s.indexed = 0, len(w.api.nodes)+1, false
			spec.apart = name
		}
		b := w.batchJob(name, s, spec.in(name, s.most()))
		b.impossible = true
		return b.job
	},
	func(w *world, name string, spec podSpec) *job {
		s := w.randomJobSpec()
		if w.chance(0.6) {
			spec = spec.in(name, s.most())
		}
		return w.cronJob(name, w.between(20*time.Second, 3*time.Minute), concurrency(w.random.IntN(3)), s, spec).job
	},
	func(w *world, name string, spec podSpec) *job {
		r := w.randomRollout()
		if w.chance(0.3) {
			spec.apart = name
		}
		return w.deployment(name, r, spec.service()).job
	},
	func(w *world, name string, spec podSpec) *job {
		r := w.randomRollout()
		return w.deployment(name, r, spec.in(name, r.replicas).service()).job
	},
	func(w *world, name string, spec podSpec) *job {
		replicas, parallel := 1+w.random.IntN(4), w.chance(0.5)
		if parallel && w.chance(0.6) || w.chance(0.1) {
			spec = spec.in(name, replicas)
		}
		return w.statefulSet(name, replicas, parallel, spec.service()).job
	},
	func(w *world, name string, spec podSpec) *job {
		replicas, size := 1+w.random.IntN(3), 1+w.random.IntN(3)
		leader, worker := spec.in(name, size).service(), spec.in(name, size).service()
		if w.chance(0.3) {
			leader.cpu++
		}
		return w.leaderWorkerSet(name, replicas, size, w.chance(0.1), w.chance(0.8), leader, worker).job
	},
	func(w *world, name string, spec podSpec) *job {
		var roles []replicatedJob
		most := 0
		for range 1 + w.random.IntN(2) {
			s := jobSpec{completions: 1 + w.random.IntN(2), indexed: true}
			s.parallelism = s.completions
			r := replicatedJob{1 + w.random.IntN(2), s}
			roles, most = append(roles, r), most+r.replicas*r.most()
		}
		var specs []podSpec
		for range roles {
			specs = append(specs, spec.in(name, most))
		}
		return w.jobSet(name, w.random.IntN(3), roles, specs).job
	},
	func(w *world, name string, spec podSpec) *job { // Small groups, or groups of number 1.
		return w.stream(name, streamSpec{size: 1 + w.random.IntN(2), width: 1 + w.random.IntN(3), every: 10 * time.Second, jitter: true}, spec).job
	},
	func(w *world, name string, spec podSpec) *job { // Pods that follow each other.
		return w.stream(name, streamSpec{width: 1 + w.random.IntN(3), every: 5 * time.Second, jitter: true}, spec).job
	},
	func(w *world, name string, spec podSpec) *job { // A tiny pod now and then.
		spec.memory, spec.lasts = 1+w.random.Int64N(2), 2*time.Second
		return w.stream(name, streamSpec{width: 1, every: w.between(30*time.Second, 4*time.Minute)}, spec).job
	},
	func(w *world, name string, spec podSpec) *job { // Pods that take CPU and memory.
		spec.memory, spec.cpu, spec.ram, spec.fairGate = 0, 1+w.random.Int64N(4), w.random.Int64N(16), false
		return w.stream(name, streamSpec{width: 1 + w.random.IntN(2), every: 20 * time.Second, jitter: true}, spec).job
	},
}
