package scheduling

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// TestControllers plays scenes that show that the controllers of the simulation behave as the real ones, in a healthy cluster with room. Where
// the extender can't serve such a workload, today says what happens instead.
func TestControllers(t *testing.T) {
	minute := time.Minute
	card := podSpec{memory: 16, grace: 2 * time.Second}
	member := func(group string, size int) podSpec {
		spec := card
		spec.group, spec.size = group, size
		return spec
	}
	lasting := func(spec podSpec, d time.Duration) podSpec {
		spec.lasts = d
		return spec
	}
	for name, scene := range map[string]struct {
		// nodes is the number of nodes with four cards.
		nodes int
		play  func(w *world)
		fair  fairSharing
		// today is the failure that is known.
		today string
	}{
		"a Job completes": {nodes: 1, play: func(w *world) {
			b := w.batchJob("j", jobSpec{completions: 6, parallelism: 2, backoffLimit: 6}, lasting(card, 10*time.Second))
			w.runFor(20 * time.Second)
			w.want(b.active(), 2)
			w.until(2*minute, "the Job is complete", func() bool { return b.complete && b.failures == 0 })
		}},
		"a Job of a group completes": {nodes: 1, play: func(w *world) {
			b := w.batchJob("j", jobSpec{completions: 4, parallelism: 4, indexed: true}, lasting(member("j", 4), minute))
			w.until(2*minute, "the Job is complete", func() bool { return b.complete })
			w.wantStats("groups that were whole", w.stats.whole, 1)
		}},
		"a Job's failed pod is replaced after ten seconds": {nodes: 1, play: func(w *world) {
			b := w.batchJob("j", jobSpec{completions: 2, parallelism: 2, backoffLimit: 6, indexed: true}, card)
			w.until(minute, "both run", func() bool { return b.ready() == 2 })
			failed := b.active()[0]
			w.api.end(failed, corev1.PodFailed)
			w.runFor(8 * time.Second)
			w.want(b.active(), 1)
			w.until(12*time.Second, "both run again", func() bool {
				return b.ready() == 2 && slices.ContainsFunc(b.active(), func(p *apiPod) bool { return p.member == failed.member })
			})
		}},
		"a Job gives up after its back-off limit": {nodes: 1, play: func(w *world) {
			spec := lasting(card, 3*time.Second)
			spec.fails = true
			b := w.batchJob("j", jobSpec{completions: 2, parallelism: 2, backoffLimit: 3}, spec)
			w.until(5*minute, "the Job has failed", func() bool { return b.lost && b.over() })
		}},
		"a Job replaces a pod that terminates at once, or when it has failed": {nodes: 2, play: func(w *world) {
			spec := card
			spec.grace = minute
			early := w.batchJob("a", jobSpec{completions: 1, parallelism: 1, backoffLimit: 6}, spec)
			late := w.batchJob("b", jobSpec{completions: 1, parallelism: 1, backoffLimit: 6, onlyFailed: true}, spec)
			w.until(minute, "both run", func() bool { return early.ready()+late.ready() == 2 })
			for _, b := range []*soleJob{early, late} {
				w.api.delete(b.own[0])
			}
			first := late.own[0]
			w.until(20*time.Second, "the first is replaced", func() bool { return early.ready() == 1 })
			w.until(2*minute, "the second is replaced", func() bool {
				if first.exists && len(late.active()) > 0 {
					w.fail("the second was replaced while it terminated")
				}
				return late.ready() == 1
			})
		}},
		"the parallelism of a Job changes": {nodes: 2, play: func(w *world) {
			b := w.batchJob("j", jobSpec{parallelism: 6, backoffLimit: 6}, card)
			w.until(minute, "six run", func() bool { return b.ready() == 6 })
			b.parallelism = 2
			b.changed()
			w.until(minute, "two are left", func() bool { return b.ready() == 2 && len(b.pods) == 2 })
			b.parallelism = 8
			b.changed()
			w.until(minute, "eight run", func() bool { return b.ready() == 8 })
		}},
		"a CronJob allows Jobs beside each other": {nodes: 2, play: func(w *world) {
			c := w.cronJob("c", 20*time.Second, allow, jobSpec{completions: 1, parallelism: 1}, lasting(card, minute))
			w.until(3*minute, "three Jobs run", func() bool { return c.running() == 3 })
		}},
		"a CronJob forbids it": {nodes: 2, play: func(w *world) {
			c := w.cronJob("c", 20*time.Second, forbid, jobSpec{completions: 1, parallelism: 1}, lasting(card, minute))
			w.until(5*minute, "three Jobs were run, one after the other", func() bool {
				if c.running() > 1 {
					w.fail("%d Jobs run", c.running())
				}
				return c.begun == 3
			})
		}},
		"a CronJob replaces the former Job": {nodes: 2, play: func(w *world) {
			c := w.cronJob("c", 30*time.Second, replace, jobSpec{completions: 1, parallelism: 1}, card)
			w.until(3*minute, "the third Job runs alone", func() bool { return c.begun == 3 && c.running() == 1 && len(c.pods) == 1 })
		}},
		"a CronJob's groups have one name": {nodes: 2, play: func(w *world) {
			c := w.cronJob("c", minute, allow, jobSpec{completions: 4, parallelism: 4}, lasting(member("c", 4), 30*time.Second))
			w.until(5*minute, "three Jobs are complete", func() bool { return w.stats.whole == 3 && c.begun > 3 })
		}},
		"a Deployment is rolled": {nodes: 2, play: func(w *world) {
			d := w.deployment("d", rollout{replicas: 4, maxSurge: 1, maxUnavailable: 1}, card)
			w.until(minute, "it runs", d.rolled)
			d.restart()
			w.until(5*minute, "it is rolled", func() bool {
				if w.bound("") < 3 || len(active(d.pods)) > 5 {
					w.fail("%d pods are bound, and %d active", w.bound(""), len(active(d.pods)))
				}
				return d.rolled()
			})
		}},
		"a Deployment is recreated": {nodes: 1, play: func(w *world) {
			d := w.deployment("d", rollout{replicas: 4, recreate: true}, member("d", 4))
			w.until(minute, "it runs", d.rolled)
			d.restart()
			w.until(5*minute, "it is rolled", d.rolled)
			w.wantStats("groups that were whole", w.stats.whole, 2)
		}},
		"a Deployment of a group is rolled, with a surge of all pods": {nodes: 2, play: func(w *world) {
			d := w.deployment("d", rollout{replicas: 4, maxSurge: 4}, member("d", 4))
			w.until(minute, "it runs", d.rolled)
			d.restart()
			w.until(5*minute, "it is rolled", d.rolled)
		}},
		"a Deployment of a group is rolled": {nodes: 3, play: func(w *world) {
			d := w.deployment("d", rollout{replicas: 4, maxSurge: 1, maxUnavailable: 1}, member("d", 4))
			w.until(minute, "it runs", d.rolled)
			d.restart()
			w.until(60*minute, "it is rolled", d.rolled)
		}},
		"a Deployment replaces a failed pod at once": {nodes: 2, play: func(w *world) {
			d := w.deployment("d", rollout{replicas: 4, maxSurge: 1}, member("d", 4))
			w.until(minute, "it runs", d.rolled)
			w.api.end(d.pods[0], corev1.PodFailed)
			w.until(20*time.Second, "it runs again", d.rolled)
		}},
		"a StatefulSet starts pod by pod, and is rolled from the last": {nodes: 1, play: func(w *world) {
			s := w.statefulSet("s", 4, false, card)
			w.until(minute, "it runs", func() bool {
				if n := len(s.active()); n > s.ready()+1 {
					w.fail("%d pods exist and %d are ready", n, s.ready())
				}
				return s.ready() == 4
			})
			s.restart()
			w.until(5*minute, "it is rolled", func() bool {
				if s.ready() < 3 {
					w.fail("%d pods are ready", s.ready())
				}
				return s.ready() == 4 && s.pod(0).revision == 1
			})
		}},
		"a parallel StatefulSet of a group is rolled, and a pod is deleted": {nodes: 1, play: func(w *world) {
			s := w.statefulSet("s", 4, true, member("s", 4))
			w.until(minute, "it runs", func() bool { return s.ready() == 4 })
			s.restart()
			w.until(5*minute, "it is rolled", func() bool { return s.ready() == 4 && s.pod(0).revision == 1 })
			w.api.delete(s.pod(2))
			w.runFor(5 * time.Second)
			w.until(minute, "it runs again", func() bool { return s.ready() == 4 })
		}},
		"a StatefulSet whose group waits for its second pod": {nodes: 1, play: func(w *world) {
			s := w.statefulSet("s", 2, false, member("s", 2))
			w.runFor(10 * minute)
			w.want(s.active(), 1)
			w.wantStats("bound pods", w.bound("s"), 0)
		}},
		"a replica of a LeaderWorkerSet restarts as a whole": {nodes: 1, play: func(w *world) {
			l := w.leaderWorkerSet("l", 1, 4, false, true, member("l", 4), member("l", 4))
			w.until(minute, "it runs", func() bool { return l.ready(0) })
			before := slices.Clone(l.pods)
			w.api.end(before[2], corev1.PodFailed)
			w.until(3*minute, "it runs again", func() bool { return l.ready(0) && l.groups[0].leader != before[0] })
			if slices.ContainsFunc(before, func(p *apiPod) bool { return p.exists && !p.info.Ended }) {
				w.fail("a pod of the former replica runs")
			}
		}},
		"a worker of a LeaderWorkerSet restarts alone": {nodes: 1, play: func(w *world) {
			l := w.leaderWorkerSet("l", 1, 4, false, false, member("l", 4), member("l", 4))
			w.until(minute, "it runs", func() bool { return l.ready(0) })
			leader := l.groups[0].leader
			w.api.end(l.groups[0].workers.own[1], corev1.PodFailed)
			w.until(3*minute, "it runs again", func() bool { return l.ready(0) })
			if l.groups[0].leader != leader {
				w.fail("the leader was created again")
			}
		}},
		"the workers of a LeaderWorkerSet are created after the leader is ready": {nodes: 1, play: func(w *world) {
			l := w.leaderWorkerSet("l", 1, 4, true, true, card, card)
			w.until(minute, "it runs", func() bool {
				if len(l.pods) > 1 && !l.groups[0].leader.ready() {
					w.fail("%d pods exist", len(l.pods))
				}
				return l.ready(0)
			})
		}},
		"one of two replicas of a LeaderWorkerSet restarts": {nodes: 2, play: func(w *world) {
			l := w.leaderWorkerSet("l", 2, 4, false, true, member("l", 4), member("l", 4))
			w.until(minute, "both run", func() bool { return l.ready(0) && l.ready(1) })
			w.api.end(l.groups[1].workers.own[1], corev1.PodFailed)
			w.runFor(10 * time.Second)
			w.until(60*minute, "both run again", func() bool { return l.ready(0) && l.ready(1) })
		}},
		"two replicas of a LeaderWorkerSet, with room for one and a half": {nodes: 1, play: func(w *world) {
			w.api.addNode("half", "a", 8, 16, 16)
			l := w.leaderWorkerSet("l", 2, 4, false, true, member("l", 4), member("l", 4))
			w.runFor(30 * minute)
			if !l.ready(0) && !l.ready(1) || w.bound("l") != 4 {
				w.fail("%d pods are bound, and no replica of four", w.bound("l"))
			}
		}, today: "pods are bound"},
		"a LeaderWorkerSet is rolled, replica by replica": {nodes: 2, play: func(w *world) {
			leader, worker := card, card
			l := w.leaderWorkerSet("l", 2, 3, false, true, leader, worker)
			w.until(minute, "both run", func() bool { return l.ready(0) && l.ready(1) })
			l.restart()
			w.until(5*minute, "both are rolled", func() bool {
				if !l.ready(0) && !l.ready(1) {
					w.fail("no replica is ready")
				}
				return l.ready(0) && l.ready(1) && l.groups[0].revision == 1
			})
		}},
		"a JobSet restarts as a whole, and completes": {nodes: 1, play: func(w *world) {
			one := jobSpec{completions: 1, parallelism: 1}
			three := jobSpec{completions: 3, parallelism: 3, indexed: true}
			spec := lasting(member("s", 4), 30*time.Second)
			j := w.jobSet("s", 2, []replicatedJob{{1, one}, {1, three}}, []podSpec{spec, spec})
			w.until(minute, "it runs", func() bool { return w.bound("s") == 4 })
			w.runFor(10 * time.Second)
			w.api.end(j.pods[3], corev1.PodFailed)
			w.until(3*minute, "it is complete", j.over)
			w.wantStats("restarts", j.restarts, 1)
		}},
		"a JobSet fails after its restarts": {nodes: 1, play: func(w *world) {
			spec := lasting(member("s", 2), 5*time.Second)
			spec.fails = true
			j := w.jobSet("s", 2, []replicatedJob{{2, jobSpec{completions: 1, parallelism: 1}}}, []podSpec{spec})
			w.until(5*minute, "it has failed", func() bool { return j.lost && j.over() })
			w.wantStats("groups that were whole", w.stats.whole, 3)
		}},
		"a stream of small groups": {nodes: 2, play: func(w *world) {
			s := w.stream("s", streamSpec{size: 2, width: 4, every: 5 * time.Second}, lasting(card, 30*time.Second))
			w.until(5*minute, "twenty have run", func() bool { return w.stats.whole == 20 })
			w.wantStats("groups at the same time", min(len(s.items), 4), 4)
		}},
		"tiny pods": {nodes: 1, play: func(w *world) {
			w.stream("s", streamSpec{width: 1, every: 4 * minute}, lasting(podSpec{memory: 2}, 2*time.Second))
			w.until(25*minute, "six have run", func() bool { return w.stats.singles == 6 })
		}},
		"pods that are kept apart": {nodes: 3, play: func(w *world) {
			spec := card
			spec.apart = "d"
			d := w.deployment("d", rollout{replicas: 4, maxSurge: 1}, spec)
			w.runFor(2 * minute)
			w.wantStats("bound pods", w.bound(""), 3)
			w.wantMessage(d.job, "didn't match pod anti-affinity rules")
		}},
		"pods whose volume is missing": {nodes: 1, play: func(w *world) {
			spec := card
			spec.volume = "data"
			b := w.batchJob("j", jobSpec{completions: 2, parallelism: 2}, spec)
			w.runFor(2 * minute)
			w.want(b.active(), 2)
			w.wantStats("bound pods", w.bound(""), 0)
			w.wantMessage(b.job, "not found")
		}},
		"pods without GPU memory take the CPU, and the memory": {nodes: 1, play: func(w *world) {
			w.stream("c", streamSpec{width: 1, every: time.Second}, podSpec{cpu: 7})
			w.stream("r", streamSpec{width: 1, every: time.Second}, podSpec{ram: 30})
			w.runFor(10 * time.Second)
			cpu, ram := card, card
			cpu.cpu, ram.ram = 2, 4
			a, b := w.single("a", cpu), w.single("b", ram)
			w.runFor(minute)
			w.wantMessage(a.job, "Insufficient cpu")
			w.wantMessage(b.job, "Insufficient memory")
		}},
		"a pool scales up from zero, and down again": {play: func(w *world) {
			w.autoscale(autoscaling{boot: minute, empty: 2 * minute}, newPool(3)...)
			m := w.single("s", card)
			w.until(2*minute, "it runs", func() bool { return w.bound("") == 1 })
			w.wantStats("nodes", w.existing(), 1)
			m.stop()
			w.until(5*minute, "no node is left", func() bool { return w.existing() == 0 })
		}},
		"a pool scales up for a group, by as much as it needs": {nodes: 1, play: func(w *world) {
			w.autoscale(autoscaling{boot: minute, empty: 10 * minute}, newPool(4)...)
			w.group("g", 8, card)
			w.until(5*minute, "it runs", func() bool { return w.bound("g") == 8 })
			w.wantStats("nodes", w.existing(), 2)
		}},
		"a pool doesn't scale up for pods that fit no new node": {nodes: 1, play: func(w *world) {
			w.autoscale(autoscaling{boot: minute, empty: 10 * minute}, newPool(4)...)
			w.single("zone", podSpec{memory: 16, constraints: constraints{zone: "elsewhere"}})
			w.single("volume", podSpec{memory: 16, constraints: constraints{volume: "missing"}})
			w.single("cpu", podSpec{memory: 16, cpu: 9})
			w.single("gated", podSpec{memory: 16, gated: true})
			w.runFor(10 * minute)
			w.wantStats("nodes", w.existing(), 1)
		}},
		"a pool doesn't scale up for a pod that lacks room on one card": {nodes: 1, play: func(w *world) {
			w.autoscale(autoscaling{boot: minute, empty: 10 * minute}, newPool(4)...)
			w.batchJob("j", jobSpec{completions: 4, parallelism: 4}, podSpec{memory: 9})
			w.until(minute, "they run", func() bool { return w.bound("") == 4 })
			w.single("s", podSpec{memory: 9})
			w.runFor(10 * minute)
			w.wantStats("nodes", w.existing(), 1)
		}},
		"a pool scales up from zero with fair sharing": {fair: twoTenants, play: func(w *world) {
			w.autoscale(autoscaling{boot: minute, empty: 10 * minute}, newPool(3)...)
			w.single("s", podSpec{memory: 16, tenant: "a", fairGate: true})
			w.until(30*minute, "it runs", func() bool { return w.bound("") == 1 })
		}},
		"a pool scales up with fair sharing": {nodes: 1, fair: twoTenants, play: func(w *world) {
			w.autoscale(autoscaling{boot: minute, empty: 10 * minute}, newPool(3)...)
			w.batchJob("j", jobSpec{completions: 6, parallelism: 6}, podSpec{memory: 16, tenant: "a", fairGate: true})
			w.until(5*minute, "they run", func() bool { return w.bound("") == 6 })
		}},
		"a pool scales up for a group with fair sharing": {nodes: 1, fair: twoTenants, play: func(w *world) {
			w.autoscale(autoscaling{boot: minute, empty: 10 * minute}, newPool(3)...)
			w.group("g", 8, podSpec{memory: 16, tenant: "a", fairGate: true})
			w.until(30*minute, "it runs", func() bool { return w.bound("g") == 8 })
		}},
	} {
		play := func(w *world) {
			for i := range scene.nodes {
				w.api.addNode(fmt.Sprint("n", i), "a", 8, 16, 16, 16, 16)
			}
			w.runFor(time.Second)
			scene.play(w)
		}
		if scene.today == "" {
			playScene(t, name, worldOptions{replicas: 1, fair: scene.fair}, play)
			continue
		}
		t.Run(strings.ReplaceAll(name, " ", "_"), func(t *testing.T) {
			if w := runScene(0, worldOptions{replicas: 1, fair: scene.fair}, false, play); !strings.Contains(w.violation, scene.today) {
				t.Errorf("expected a known failure, %q: %q", scene.today, w.violation)
			}
		})
	}
}

// twoTenants share a cluster with an autoscaler.
var twoTenants = fairSharing{tenants: []simTenant{{"a", "1"}, {"b", "1"}}, provisioning: 10, pause: tickInterval}

// newPool returns nodes for an autoscaler.
func newPool(n int) (nodes []*apiNode) {
	for i := range n {
		nodes = append(nodes, newNode(fmt.Sprint("pool", i), "a", 8, 16, 16, 16, 16))
	}
	return nodes
}

// existing counts the nodes.
func (w *world) existing() (n int) {
	for _, node := range w.api.nodes {
		if node.exists {
			n++
		}
	}
	return n
}

// until lets time pass until the condition is true, and fails if that takes longer.
func (w *world) until(d time.Duration, what string, done func() bool) {
	if !w.runUntil(d, done) {
		w.fail("not within %v: %s", d, what)
	}
}

func (w *world) want(pods []*apiPod, n int) { w.wantStats("active pods", len(pods), n) }

func (w *world) wantStats(what string, got, want int) {
	if got != want {
		w.fail("%s: %d, expected %d", what, got, want)
	}
}

// wantMessage fails if no pending pod of the job has such a condition.
func (w *world) wantMessage(j *job, text string) {
	if !slices.ContainsFunc(j.pods, func(p *apiPod) bool {
		c := p.object.Status.Conditions
		return p.exists && p.info.Node == "" && len(c) == 1 && strings.Contains(c[0].Message, text)
	}) {
		w.fail("no pod of %s has the message %q", j.name, text)
	}
}

func active(pods []*apiPod) []*apiPod {
	return slices.DeleteFunc(slices.Clone(pods), func(p *apiPod) bool { return !p.active() })
}

// running counts the Jobs that have an active pod.
func (c *cronJob) running() (n int) {
	for _, b := range c.jobs {
		if len(b.active()) > 0 {
			n++
		}
	}
	return n
}
