package scheduling

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/binding"
	"github.com/gpushare/gpushare/pkg/gang"
)

// TestScenes are short scripts on the simulation. Each of them failed before groups had runs.
func TestScenes(t *testing.T) {
	minute := time.Minute
	for name, scene := range map[string]struct {
		replicas int
		play     func(w *world)
	}{
		"two groups of eight for which the CPU suffices for seven members": {1, func(w *world) {
			for i := range 4 {
				w.api.addNode(fmt.Sprint("n", i), "ab"[i/2:i/2+1], 4-int64(i%2), 16, 16, 16, 16)
			}
			w.group("a", 8, podSpec{memory: 16, cpu: 1, constraints: constraints{zone: "a"}}).impossible = true
			w.group("b", 8, podSpec{memory: 16, cpu: 1, constraints: constraints{zone: "b"}}).impossible = true
			w.runFor(minute)
			w.singlesRun(50, podSpec{memory: 16, lasts: 20 * time.Second, priority: 1000})
		}},
		"groups that miss what the extender doesn't know": {1, func(w *world) {
			for i := range 4 {
				w.api.addNode(fmt.Sprint("n", i), "a", 32, 16, 16, 16, 16)
			}
			for i := range 8 { // Each needs a port of every node but one; no node has it twice.
				w.group(fmt.Sprint("g", i), 5, podSpec{memory: 16, cpu: 1, constraints: constraints{port: 80}}).impossible = true
			}
			w.runFor(minute)
			w.singlesRun(50, podSpec{memory: 16, lasts: 20 * time.Second})
		}},
		"groups that miss what the extender doesn't know, and fill the cluster": {1, func(w *world) {
			for i := range 5 {
				w.api.addNode(fmt.Sprint("n", i), "a", 32, 16, 16, 16, 16, 16, 16)
			}
			for i := range 20 { // Each of them takes a fifth of it.
				w.group(fmt.Sprint("g", i), 6, podSpec{memory: 16, cpu: 1, constraints: constraints{port: 80}}).impossible = true
			}
			w.runFor(minute)
			w.singlesRun(50, podSpec{memory: 16, lasts: 20 * time.Second})
		}},
		"kube-scheduler stands still again and again, while a group has all memory reserved": {1, func(w *world) {
			for i := range 10 {
				w.api.addNode(fmt.Sprint("n", i), "a", 32, 16, 16, 16, 16)
			}
			w.group("g", 40, podSpec{memory: 16})
			for range 4 {
				phases := func() map[gang.Phase]int { return w.replicas[0].scheduler.groups.manager.Phases() }
				for range 30_000 {
					if w.runFor(time.Millisecond); phases()[gang.PhasePlanned]+phases()[gang.PhasePermitting] > 0 {
						break
					}
				}
				w.scheduler.stopped = w.now + 45*time.Second
				w.runFor(45 * time.Second)
			}
			w.runFor(minute)
			w.wantWhole("g", 40)
		}},
		"kube-scheduler takes longer for all pending pods than binds are held": {1, func(w *world) {
			w.slow = 20 + 20*int(w.seed)
			for i := range 4 {
				w.api.addNode(fmt.Sprint("n", i), "a", 32, 16, 16)
			}
			whole := func() (n int) {
				for i := range 4 {
					n += w.bound(fmt.Sprint("fits", i))
				}
				return n
			}
			for i := range 4 {
				w.group(fmt.Sprint("fits", i), 30, podSpec{memory: 1})
			}
			w.group("huge", 180, podSpec{memory: 16}).impossible = true
			w.until(6*minute, "all groups that fit run", func() bool { return whole() == 4*30 })
		}},
		"kube-scheduler takes a minute for all pending pods, of which a group comes first": {1, func(w *world) {
			w.slow = 20 // Without the priority, members that were rejected at different times return at different times, and never meet.
			for i := range 4 {
				w.api.addNode(fmt.Sprint("n", i), "a", 32, 16, 16)
			}
			w.group("fits", 120, podSpec{memory: 1, priority: 1})
			w.group("huge", 1800, podSpec{memory: 16}).impossible = true
			w.until(2*minute, "the group runs", func() bool { return w.bound("fits") == 120 })
		}},
		"a group that no scheduler places": {1, func(w *world) {
			w.api.addNode("n0", "a", 32, 16, 16, 16, 16)
			w.group("g", 4, podSpec{memory: 16, scheduler: absentScheduler}).impossible = true
			w.group("h", 4, podSpec{memory: 16, cpu: 100_000}).impossible = true
			w.runFor(minute)
			w.singlesRun(50, podSpec{memory: 16, lasts: 20 * time.Second})
		}},
		"retries wait for each other when it is found out that nothing was written": {1, func(w *world) {
			w.bindWindow, w.maxBackoff = simBindTimeout/4, binding.Deadline(simBindTimeout)-simBindTimeout
			w.replicas[0].kill()
			w.newReplica("collecting")
			for i := range 8 {
				w.api.addNode(fmt.Sprint("n", i), "a", 32, 16, 16, 16)
			}
			w.api.mute = time.Hour // The client gives up after its whole timeout.
			w.fate = func(string) fate {
				if w.now%time.Minute < 45*time.Second {
					return lostNever
				}
				return made
			}
			for i := range 6_000 {
				if i%30 == 0 && len(w.api.pods) < 60 {
					w.array(fmt.Sprint("a", i), 12, podSpec{memory: 6 + 2*int64(i/30%4), lasts: w.between(time.Second, 10*time.Second)})
				}
				if w.now%time.Minute > 44*time.Second { // kube-scheduler counts by node, and offers nodes of which no card has enough left.
					j := w.single(fmt.Sprint("s", i), podSpec{memory: 6 + 2*w.random.Int64N(4), lasts: time.Second})
					w.after(300*time.Millisecond, j.stop)
				}
				w.runFor(100 * time.Millisecond)
			}
		}},
		"a new leader plans before its watch reports the last binds": {2, func(w *world) {
			w.api.addNode("n0", "a", 8, 16, 16)
			w.runFor(time.Second)
			w.replicas[1].cache.watch.stalled = w.now + 3*minute
			w.single("s", podSpec{memory: 16})
			w.runFor(10 * time.Second)
			w.handOver()
			j := w.group("g", 1, podSpec{memory: 16})
			w.runUntil(minute, func() bool { return len(j.pods) > 0 })
			w.runFor(time.Second)
			for _, p := range j.pods { // The watch reports the group's pod, but not the single pod's bind.
				w.replicas[0].cache.observe(change{pod: p, info: p.info, object: p.object})
			}
			w.runFor(2 * minute)
			w.wantWhole("g", 1)
		}},
		"a restart that overlaps, with room for three of four": {1, func(w *world) {
			w.api.addNode("n0", "a", 32, 16, 16, 16, 16)
			j := w.group("g", 4, podSpec{memory: 16, grace: time.Second})
			w.runFor(minute)
			w.wantWhole("g", 4)
			j.restart()
			w.single("s", podSpec{memory: 16, priority: 10})
			w.runFor(5 * minute)
			w.checkRest()
			if n := w.bound("g"); n != 0 {
				w.fail("%d members of the second run are bound", n)
			}
		}},
		"two restarts that overlap, with room for one": {1, func(w *world) {
			w.api.addNode("n0", "a", 32, 16, 16, 16, 16, 16, 16)
			a, b := w.group("a", 3, podSpec{memory: 16, grace: time.Second}), w.group("b", 3, podSpec{memory: 16, grace: time.Second})
			w.runFor(minute)
			a.restart()
			b.restart()
			w.single("s", podSpec{memory: 16, priority: 10})
			w.runFor(5 * minute)
			w.checkRest()
			if a, b := w.bound("a"), w.bound("b"); a+b != 3 || a*b != 0 {
				w.fail("%d members of a are bound, and %d of b", a, b)
			}
		}},
		"a new leader doesn't know that a member of a whole group was deleted": {2, func(w *world) {
			w.api.addNode("n0", "a", 8, 16, 16)
			w.runFor(time.Second)
			binds := 0
			w.fate = func(string) fate {
				if binds++; binds == 2 {
					w.replicas[1].cache.watch.stalled = w.now + 5*minute
				}
				return made
			}
			w.replicas[1].cache.watch.lag = 0
			j := w.group("g", 2, podSpec{memory: 16})
			w.runFor(10 * time.Second)
			w.wantWhole("g", 2)
			w.takePlace(j, w.marked(j))
			w.handOver()
			w.runFor(3 * minute)
			w.wantNoEviction()
		}},
		"one important member doesn't lift its group": {1, func(w *world) {
			w.api.addNode("n0", "a", 32, 16, 16, 16, 16)
			// Each member needs a card of its own: only pods with an even amount ask for two.
			w.group("first", 4, podSpec{memory: 15, lasts: 2 * minute})
			w.runFor(30 * time.Second)
			lifted := w.group("lifted", 4, podSpec{memory: 15})
			lifted.specs[0].priority = 1000
			w.runFor(10 * time.Second)
			w.group("honest", 4, podSpec{memory: 15, priority: 500})
			w.runFor(5 * minute)
			w.wantWhole("honest", 4)
		}},
	} {
		playScene(t, name, worldOptions{replicas: scene.replicas}, scene.play)
	}
}

// playScene plays a scene with two seeds, and fails if an invariant doesn't hold.
func playScene(t *testing.T, name string, o worldOptions, play func(w *world)) {
	t.Run(strings.ReplaceAll(name, " ", "_"), func(t *testing.T) {
		for seed := range uint64(2) {
			if w := runScene(seed, o, false, play); w.violation != "" {
				w = runScene(seed, o, true, play)
				t.Fatalf("seed %d: %s\n%s\n%s", seed, w.violation, strings.Join(w.history, "\n"), w.final)
			}
		}
	})
}

// runScene plays a scene.
func runScene(seed uint64, o worldOptions, tracing bool, play func(w *world)) *world {
	o.hold, o.patience, o.maxIdle, o.maxBackoff = 10*time.Second, 30*time.Second, 0.02, 5*time.Second
	w := newWorld(seed, o)
	defer w.close()
	w.tracing = tracing
	w.lead()
	play(w)
	w.final = w.report()
	return w
}

// handOver kills the leader and makes the standby the leader, as soon as that may be.
func (w *world) handOver() {
	w.replicas[0].kill()
	w.runFor(26 * time.Second)
	w.takeOver(w.replicas[0])
}

// marked returns the member that was bound last.
func (w *world) marked(j *memberSet) *apiPod {
	for _, p := range j.pods {
		if p.info.Member.MarkedWhole {
			return p
		}
	}
	panic("no member of " + j.name + " is marked")
}

// takePlace deletes the member, whose card fails. Its controller creates another pod.
func (w *world) takePlace(j *memberSet, p *apiPod) {
	n := w.api.node(p.info.Node)
	n.sick[p.info.Placement[0].Card] = true
	w.api.setNode(n)
	w.runFor(2 * time.Second)
	j.replace = false
	w.api.delete(p)
	w.runFor(5 * time.Second)
	j.createMember(p.member)
	w.runFor(5 * time.Second)
}

func (w *world) wantNoEviction() {
	if w.stats.evictions > 0 {
		w.fail("%d members were evicted", w.stats.evictions)
	}
}

// wantWhole fails if not all members of the group are bound.
func (w *world) wantWhole(group string, size int) {
	if n := w.bound(group); n != size {
		w.fail("%d of %d members of %s are bound", n, size, group)
	}
}

// singlesRun submits a single pod every minute, and checks that each is bound within five seconds, except for one in twenty, and
// that the groups that can't run keep less than a twentieth of the memory reserved.
func (w *world) singlesRun(n int, spec podSpec) {
	late, before := 0, w.reserved
	for i := range n {
		name := fmt.Sprint("single", i)
		begun := w.now
		j := w.single(name, spec)
		if !w.runUntil(5*time.Second, func() bool { return len(j.pods) > 0 && j.pods[0].bound() }) {
			late++
			w.trace("%s is late", name)
		}
		w.runFor(begun + time.Minute - w.now)
		j.stop()
	}
	if late*20 > n {
		w.fail("%d of %d single pods were not bound within five seconds", late, n)
	}
	impossible, all := w.reserved.impossible-before.impossible, w.reserved.all-before.all
	if share := impossible / all; share > 0.05 {
		w.fail("groups that can't run kept %.0f%% of the memory reserved", 100*share)
	}
}
