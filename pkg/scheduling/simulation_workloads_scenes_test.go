package scheduling

import (
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// TestControllers plays scenes with groups of the controllers that people use, and with an autoscaler, in a healthy cluster with room.
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
	}{
		"a Job of a group completes": {nodes: 1, play: func(w *world) {
			b := w.batchJob("j", jobSpec{completions: 4, parallelism: 4, indexed: true}, lasting(member("j", 4), minute))
			w.until(2*minute, "the Job is complete", func() bool { return b.complete })
			w.wantStats("groups that were whole", w.stats.whole, 1)
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
		"a replica of a LeaderWorkerSet restarts as a whole": {nodes: 1, play: func(w *world) {
			l := w.leaderWorkerSet("l", 1, 4, true, member("l", 4), member("l", 4))
			w.until(minute, "it runs", func() bool { return l.ready(0) })
			before := slices.Clone(l.pods)
			w.api.end(before[2], corev1.PodFailed)
			w.until(3*minute, "it runs again", func() bool { return l.ready(0) && l.groups[0].leader != before[0] })
			if slices.ContainsFunc(before, func(p *apiPod) bool { return p.exists && !p.info.Ended }) {
				w.fail("a pod of the former replica runs")
			}
		}},
		"one of two replicas of a LeaderWorkerSet restarts": {nodes: 2, play: func(w *world) {
			l := w.leaderWorkerSet("l", 2, 4, true, member("l", 4), member("l", 4))
			w.until(minute, "both run", func() bool { return l.ready(0) && l.ready(1) })
			w.api.end(l.groups[1].workers.own[1], corev1.PodFailed)
			w.runFor(10 * time.Second)
			w.until(60*minute, "both run again", func() bool { return l.ready(0) && l.ready(1) })
		}},
		"a pool scales up from zero, and down again": {play: func(w *world) {
			w.autoscale(autoscaling{boot: minute, empty: 2 * minute}, newPool(3)...)
			m := w.single("s", card)
			w.until(2*minute, "it runs", func() bool { return w.bound("") == 1 })
			w.wantStats("nodes", w.existing(), 1)
			m.stop()
			w.until(5*minute, "no node is left", func() bool { return w.existing() == 0 })
		}},
		"a pool scales up from zero with fair sharing": {fair: twoTenants, play: func(w *world) {
			w.autoscale(autoscaling{boot: minute, empty: 10 * minute}, newPool(3)...)
			w.single("s", podSpec{memory: 16, tenant: "a", fairGate: true})
			w.until(30*minute, "it runs", func() bool { return w.bound("") == 1 })
		}},
		"a pool scales up for a group with fair sharing": {nodes: 1, fair: twoTenants, play: func(w *world) {
			w.autoscale(autoscaling{boot: minute, empty: 10 * minute}, newPool(3)...)
			w.group("g", 8, podSpec{memory: 16, tenant: "a", fairGate: true})
			w.until(30*minute, "it runs", func() bool { return w.bound("g") == 8 })
		}},
	} {
		playScene(t, name, worldOptions{replicas: 1, fair: scene.fair}, func(w *world) {
			for i := range scene.nodes {
				w.api.addNode(fmt.Sprint("n", i), "a", 8, 16, 16, 16, 16)
			}
			w.runFor(time.Second)
			scene.play(w)
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

func (w *world) wantStats(what string, got, want int) {
	if got != want {
		w.fail("%s: %d, expected %d", what, got, want)
	}
}
