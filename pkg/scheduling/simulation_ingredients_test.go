package scheduling

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// ingredient is something that a world can have in which items may starve. Worlds are drawn from several of them, so that they meet.
type ingredient struct {
	name string
	// needs reports whether the world can have it; nil if any can.
	needs func(w *world) bool
	add   func(c *crowd)
}

// crowd is a world that is made of ingredients: a small cluster that has more work than room.
type crowd struct {
	*world
	// lasts is how long the pods of streams run at most.
	lasts time.Duration
	// patient is the tenant of items that must get their turn, busy that of those that fill the cluster; equal without fair sharing.
	patient, busy string
	// waited are the items whose turn must come before the world ends.
	waited []*memberSet
	names  int
}

func sharing(w *world) bool    { return w.fair.on() }
func reclaiming(w *world) bool { return w.fair.reclaimAfter > 0 }

// pressures are what fills clusters, or disturbs how they are shared.
var pressures = []ingredient{
	{"stream of small groups", nil, func(c *crowd) {
		size := 1 + c.random.IntN(3)
		c.keepWaiting(1+c.random.IntN(3), func(name string) *memberSet {
			return c.group(name, size, c.spec(c.busy, []int64{8, 16}[c.random.IntN(2)]))
		})
	}},
	{"stream of pods", nil, func(c *crowd) {
		memory := []int64{1, 2, 4, 8, 16}[c.random.IntN(5)]
		c.keepWaiting(2+c.random.IntN(3), func(name string) *memberSet { return c.single(name, c.spec(c.busy, memory)) })
	}},
	{"services", reclaiming, func(c *crowd) {
		spec := c.spec(c.busy, []int64{1, 2, 4, 8, 16}[c.random.IntN(5)])
		spec.lasts = 0
		switch c.random.IntN(4) {
		case 0:
			c.has("a long grace period")
			spec.grace = []time.Duration{time.Hour, 24 * time.Hour, 30 * 24 * time.Hour}[c.random.IntN(3)]
		case 1:
			c.has("one group of number 1")
			spec.group, spec.size = c.unique("all"), 1
		case 2:
			c.groups(spec)
			return
		}
		n := int(c.memory() / spec.memory)
		m := newMemberSet(c.unique("service"), slices.Repeat([]podSpec{spec}, n), slices.Repeat([]string{"a"}, n))
		m.replace = true
		c.submitMemberSet(m)
	}},
	{"pods that take CPU", nil, func(c *crowd) {
		spec := c.spec(c.busy, 0)
		spec.cpu = 1 + int64(c.random.IntN(4))
		if c.chance(0.5) {
			spec.lasts = 0
		}
		c.keepWaiting(1+c.random.IntN(3), func(name string) *memberSet { return c.single(name, spec) })
	}},
	{"a broken job", nil, func(c *crowd) {
		size := 2 + c.random.IntN(3)
		every := c.between(2*time.Minute, 15*time.Minute)
		specs := slices.Repeat([]podSpec{c.spec(c.busy, 16)}, size)
		group := c.unique("broken")
		for i := range specs {
			specs[i].group, specs[i].size = group, size
		}
		specs[size-1].scheduler = absentScheduler
		c.again(every, func(name string) *memberSet {
			m := newMemberSet(name, specs, slices.Repeat([]string{"a"}, size))
			m.impossible = true
			return c.submitMemberSet(m)
		})
	}},
	{"pods that can't be bound", nil, func(c *crowd) {
		spec := c.spec(c.patient, []int64{4, 8, 16}[c.random.IntN(3)])
		if c.chance(0.5) {
			spec.volume = "missing"
		} else { // Pods of the same kind run on every node for ever.
			spec.apart = c.unique("apart")
			keeper := podSpec{cpu: 1}
			keeper.apart, keeper.tenant = spec.apart, spec.tenant
			for range c.api.nodes {
				c.single(c.unique("keeper"), keeper)
			}
		}
		make := func(name string) *memberSet {
			m := newMemberSet(name, []podSpec{spec}, []string{"a"})
			m.impossible = true
			return c.submitMemberSet(m)
		}
		if c.chance(0.5) {
			c.has("made again and again")
			c.again(c.between(5*time.Minute, 20*time.Minute), make)
		} else {
			make(c.unique("never"))
		}
	}},
	{"a tiny pod now and then", sharing, func(c *crowd) {
		spec := c.spec(c.fair.tenants[len(c.fair.tenants)-1].name, 2)
		spec.lasts = 2 * time.Second
		var again func()
		again = func() {
			m := c.single(c.unique("tiny"), spec)
			c.after(4*time.Second, m.stop)
			c.after(c.between(time.Minute, c.fair.reclaimAfter+time.Minute), again)
		}
		again()
	}},
	{"an autoscaled pool", sharing, func(c *crowd) {
		var pool []*apiNode
		cards := slices.Repeat([]int64{16}, 1+c.random.IntN(4))
		for i := range 1 + c.random.IntN(3) {
			pool = append(pool, newNode(fmt.Sprint("pool", i), "pool", 32, slices.Clone(cards)...))
		}
		c.boot = c.between(time.Minute, 5*time.Minute)
		c.autoscale(autoscaling{boot: c.boot, empty: 10 * time.Minute}, pool...)
		spec := c.spec(c.patient, 16)
		if c.chance(0.5) { // Only the pool's nodes have what it needs.
			spec.zone = "pool"
		}
		size := min(1+c.random.IntN(len(cards)*len(pool)), int(c.memory()/16)/len(c.fair.tenants))
		if c.chance(0.5) && size > 1 {
			c.has("a group for the pool")
			c.wait(func(name string) *memberSet { return c.group(name, size, spec) })
		} else {
			c.wait(func(name string) *memberSet { return c.single(name, spec) })
		}
	}},
	{"leaders die", func(w *world) bool { return w.worldOptions.replicas > 1 && reclaiming(w) }, func(c *crowd) {
		c.diesAtEviction = 0.3
		spec := c.spec(c.busy, []int64{4, 8, 16}[c.random.IntN(3)])
		spec.lasts = 0
		c.groups(spec)
	}},
}

// waiters are the items whose turn must come.
var waiters = []ingredient{
	{"a whole card", nil, func(c *crowd) {
		c.wait(func(name string) *memberSet { return c.single(name, c.spec(c.patient, 16)) })
	}},
	{"a large group", nil, func(c *crowd) {
		cards := int(c.memory() / 16)
		size := 2 + c.random.IntN(max(1, cards*3/4-1))
		if c.fair.on() {
			size = max(1, cards/(len(c.fair.tenants)+1))
		}
		c.wait(func(name string) *memberSet { return c.group(name, size, c.spec(c.patient, 16)) })
	}},
	{"a tenant's share", sharing, func(c *crowd) {
		memory := []int64{4, 8, 16}[c.random.IntN(3)]
		for range c.memory() / memory / int64(len(c.fair.tenants)+1) {
			c.wait(func(name string) *memberSet { return c.single(name, c.spec(c.patient, memory)) })
		}
	}},
	{"a job that loses members", nil, func(c *crowd) {
		size := min(2+c.random.IntN(3), int(c.memory()/32))
		spec := c.spec(c.patient, 16)
		spec.lasts = 0
		m := c.group(c.unique("group"), size, spec)
		var lose func()
		lose = func() {
			if n := len(m.pods); n > 0 && m.pods[n-1].live() {
				c.api.delete(m.pods[n-1])
			}
			c.after(c.between(10*time.Minute, time.Hour), lose)
		}
		c.after(10*time.Minute, lose)
		c.has("a backlog")
		c.keepWaiting(20, func(name string) *memberSet { return c.single(name, c.spec(c.patient, 16)) })
	}},
	{"a more important pod", nil, func(c *crowd) {
		c.wait(func(name string) *memberSet {
			spec := c.spec(c.patient, []int64{8, 16}[c.random.IntN(2)])
			spec.priority = 100
			return c.single(name, spec)
		})
	}},
	{"a LeaderWorkerSet of several replicas", nil, func(c *crowd) {
		size := 2 + c.random.IntN(2)
		spec := c.spec(c.patient, 16)
		spec.group, spec.size, spec.lasts = c.unique("lws"), size, 0
		l := c.leaderWorkerSet(spec.group, 2+c.random.IntN(2), size, false, true, spec, spec)
		var lose func()
		lose = func() {
			if p := l.groups[c.random.IntN(len(l.groups))].leader; p != nil && p.live() && c.chance(0.5) {
				c.api.end(p, corev1.PodFailed)
			}
			c.after(c.between(10*time.Minute, 30*time.Minute), lose)
		}
		c.after(10*time.Minute, lose)
	}},
	{"a Deployment of a group that is rolled", nil, func(c *crowd) {
		size := 2 + c.random.IntN(3)
		spec := c.spec(c.patient, []int64{4, 8}[c.random.IntN(2)])
		spec.group, spec.size, spec.lasts = c.unique("deployment"), size, 0
		d := c.deployment(spec.group, rollout{replicas: size, maxSurge: 1, maxUnavailable: c.random.IntN(2)}, spec)
		c.after(c.between(10*time.Minute, 30*time.Minute), d.restart)
	}},
	{"two jobs of one group name", nil, func(c *crowd) {
		size := max(2, int(c.memory()/16)/2)
		spec := c.spec(c.patient, 16)
		spec.group, spec.size, spec.lasts = c.unique("same"), size, 0
		c.wait(func(name string) *memberSet {
			late := c.batchJob(name+"-late", jobSpec{parallelism: size / 2, backoffLimit: 6}, spec) // A quota keeps it from creating all pods.
			late.impossible = false
			c.after(c.between(time.Minute, 20*time.Minute), func() {
				late.parallelism = size
				late.changed()
			})
			return c.submitMemberSet(newMemberSet(name, slices.Repeat([]podSpec{spec}, size), slices.Repeat([]string{"a"}, size)))
		})
	}},
}

// groups fills the cluster with groups that run for ever.
func (c *crowd) groups(spec podSpec) {
	c.has("services in groups")
	size := 2 + c.random.IntN(4)
	for range int(c.memory()/spec.memory) / size {
		c.group(c.unique("service"), size, spec)
	}
}

// has records an ingredient.
func (c *crowd) has(name string) { c.ingredients = append(c.ingredients, name) }

func (c *crowd) unique(name string) string {
	c.names++
	return fmt.Sprintf("%s-%d", name, c.names)
}

// memory returns the memory of all cards.
func (c *crowd) memory() (total int64) {
	for _, n := range c.api.nodes {
		for _, memory := range n.cards {
			total += memory
		}
	}
	return total
}

// spec returns a pod of the tenant.
func (c *crowd) spec(tenant string, memory int64) podSpec {
	return podSpec{
		memory: memory, cpu: int64(c.random.IntN(2)), tenant: tenant, fairGate: c.fair.on() && c.chance(0.5), lasts: c.between(c.lasts/4, c.lasts),
		grace: c.between(0, 20*time.Second),
	}
}

// keepWaiting keeps some jobs waiting for ever: there is always another one.
func (c *crowd) keepWaiting(waiting int, make func(name string) *memberSet) {
	name, part := c.unique("stream"), c.part
	var jobs []*memberSet
	var fill func()
	fill = func() {
		n := 0
		jobs = slices.DeleteFunc(jobs, func(m *memberSet) bool {
			over := len(m.pods) > 0 && m.over()
			if over {
				m.stop()
			} else if !m.runs() {
				n++
			}
			return over
		})
		for ; n < waiting; n++ {
			c.part = part
			jobs = append(jobs, make(c.unique(name)))
		}
		c.after(c.between(time.Second, 3*time.Second), fill)
	}
	fill()
}

// again makes a job, and replaces it again and again, as a CronJob does.
func (c *crowd) again(every time.Duration, make func(name string) *memberSet) {
	name, part := c.unique("cron"), c.part
	var last *memberSet
	var next func()
	next = func() {
		if last != nil {
			last.stop()
		}
		c.part = part
		last = make(c.unique(name))
		c.after(every, next)
	}
	next()
}

// wait submits a job, some time after the streams have filled the cluster, whose turn must come.
func (c *crowd) wait(make func(name string) *memberSet) {
	name, part := c.unique("waits"), c.part
	c.after(c.between(10*time.Minute, 20*time.Minute), func() {
		c.part = part
		c.waited = append(c.waited, make(name))
	})
}

// runs reports whether all pods of the job are bound, or have been.
func (m *memberSet) runs() bool {
	return len(m.current) == len(m.specs) && !slices.ContainsFunc(m.current, func(p *apiPod) bool { return p == nil || p.info.Node == "" })
}

// draw chooses one ingredient, and a few of the others.
func (c *crowd) draw(from []ingredient) (drawn []ingredient) {
	possible := slices.DeleteFunc(slices.Clone(from), func(i ingredient) bool { return i.needs != nil && !i.needs(c.world) })
	first := c.random.IntN(len(possible))
	for n, i := range possible {
		if n == first || c.chance(0.15) {
			drawn = append(drawn, i)
			c.has(i.name)
		}
	}
	return drawn
}

// wanted reports whether the world has the ingredients that GPUSHARE_SIM_WITH asks for, separated by commas.
func (c *crowd) wanted() bool {
	for name := range strings.SplitSeq(os.Getenv("GPUSHARE_SIM_WITH"), ",") {
		if name != "" && !slices.Contains(c.ingredients, name) {
			return false
		}
	}
	return true
}

// runCrowd runs a world of ingredients.
func runCrowd(seed uint64, tracing bool) *world {
	w := newWorld(seed, worldOptions{
		hold: 10 * time.Second, patience: 30 * time.Second, maxIdle: 0.02, maxAge: []time.Duration{10 * time.Minute, time.Hour}[seed%2], maxBackoff: 10 * time.Second,
	})
	defer w.close()
	w.tracing = tracing
	w.worldOptions.replicas = 1 + w.random.IntN(2)
	w.popFromBackoff = w.chance(0.5)
	w.fragmented = w.chance(0.5)
	c := &crowd{world: w, lasts: w.between(time.Minute, 6*time.Minute)}
	cards := slices.Repeat([]int64{16}, 1+w.random.IntN(4))
	cpu := []int64{2, 4, 32}[w.random.IntN(3)]
	for i := range max(2, 2+w.random.IntN(7)/len(cards)) {
		w.api.addNode(fmt.Sprint("n", i), "a", int64(len(cards))*cpu, slices.Clone(cards)...)
	}
	if w.chance(0.6) {
		w.randomSharing()
		w.fair.pause, w.fair.provisioning = tickInterval, 1
		if w.fair.reclaimAfter > 0 {
			w.fair.reclaimAfter, w.fair.minRuntime = w.between(time.Minute, 5*time.Minute), w.between(0, 10*time.Minute)
		}
		c.patient, c.busy = w.fair.tenants[0].name, w.fair.tenants[1].name
		c.has([]string{"dispatch", "reclaim"}[min(1, int(w.fair.reclaimAfter))])
	}
	drawn := append(c.draw(pressures), c.draw(waiters)...)
	if !c.wanted() {
		return w
	}
	w.lead()
	w.watchLiveness()
	for _, i := range drawn {
		c.part = i.name
		i.add(c)
	}
	w.runFor(25 * time.Minute)
	w.runUntilEvery(6*time.Hour, time.Minute, func() bool {
		return w.steps > 150_000 || w.now > 90*time.Minute && !slices.ContainsFunc(c.waited, func(m *memberSet) bool { return !m.stopped && !m.runs() })
	})
	if tracing {
		w.final = w.report()
	}
	return w
}
