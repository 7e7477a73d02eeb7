package scheduling

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// TestControllers plays scenes with groups of the controllers that people use, and with an autoscaler, in a healthy cluster with room. Where the
// extender can't serve such a workload, today says what happens instead.
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
		"a Job of a group completes": {nodes: 1, play: func(w *world) {
			b := w.batchJob("j", jobSpec{completions: 4, parallelism: 4, indexed: true}, lasting(member("j", 4), minute))
			w.until(2*minute, "the Job is complete", func() bool { return b.complete })
			w.wantStats("groups that were whole", w.stats.whole, 1)
		}},
		"a CronJob's groups have one name": {nodes: 2, play: func(w *world) {
			c := w.cronJob("c", minute, allow, jobSpec{completions: 4, parallelism: 4}, lasting(member("c", 4), 30*time.Second))
			w.until(5*minute, "three Jobs are complete", func() bool { return w.stats.whole == 3 && c.begun > 3 })
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
