package scheduling

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/binding"
)

// TestSimulation runs clusters with groups and single pods under disturbances, each from one seed, until a million steps were
// made. GPUSHARE_SIM_SEED=7 begins with seed 7, and GPUSHARE_SIM_STEPS sets the number of steps.
func TestSimulation(t *testing.T) {
	if total := simulate(t, 1_000_000, plainWorld); os.Getenv("GPUSHARE_SIM_STEPS") == "" && (total.nominated == 0 || total.taken == 0) {
		t.Errorf("%d nominations to nodes outside samples, of which %d were used", total.nominated, total.taken)
	}
}

// simulate runs worlds until the steps were made, a hundred times as many in the long form, and returns what happened in them.
func simulate(t *testing.T, steps int64, run func(seed uint64, tracing bool) *world) stats {
	if os.Getenv("GPUSHARE_TEST_LONG") != "" {
		steps *= 100
	}
	defer debug.SetGCPercent(debug.SetGCPercent(400)) // Worlds are small, and make much garbage: a quarter of the time.
	first := envInt("GPUSHARE_SIM_SEED", 0)
	steps = envInt("GPUSHARE_SIM_STEPS", steps)

	var mu sync.Mutex
	var made int64
	next, total, failed := uint64(first), stats{failed: map[string]int{}, cards: map[string]int{}, known: map[*knownDefect][]uint64{}, outcomes: map[string]int{}}, []*world{}
	worker := func() {
		for {
			mu.Lock()
			if made >= steps || len(failed) > 0 && os.Getenv("GPUSHARE_SIM_ALL") == "" {
				mu.Unlock()
				return
			}
			seed := next
			next++
			mu.Unlock()
			w := run(seed, false)
			mu.Lock()
			made += int64(w.steps)
			total.add(w.stats)
			if w.liveness != nil {
				for what, n := range w.liveness.counts {
					total.outcomes[what] += n
				}
			}
			switch k := w.known(); {
			case k != nil:
				total.known[k] = append(total.known[k], seed)
				if os.Getenv("GPUSHARE_SIM_TRACE") != "" {
					t.Log(strings.Join(run(seed, true).history, "\n"))
				}
				t.Logf("seed %d: known, %s: %s%s", seed, k.defect, w.violation, w.describe())
			case w.violation != "":
				failed = append(failed, w)
				t.Logf("seed %d: %s%s", seed, w.violation, w.describe())
			}
			mu.Unlock()
		}
	}
	var group sync.WaitGroup
	for range min(4, runtime.NumCPU()) {
		group.Go(worker)
	}
	group.Wait()
	for _, w := range failed {
		t.Errorf("seed %d: %s%s", w.seed, w.violation, w.describe())
		if again := run(w.seed, true); again.violation != w.violation {
			t.Errorf("seed %d isn't deterministic: %s", w.seed, again.violation)
		} else {
			t.Logf("seed %d:\n%s\n%s", w.seed, strings.Join(again.history[max(0, len(again.history)-maxHistory):], "\n"), again.final)
		}
	}
	t.Logf("%d steps, %d seeds: %+v", made, next-uint64(first), total.text())
	return total
}

// TestSimulationRepeats checks that a seed decides all that happens.
func TestSimulationRepeats(t *testing.T) {
	for seed, run := range map[uint64]func(uint64, bool) *world{4: mixedWorld, 5: mixedWorld, 6: runCrowd} { // The second one has fair sharing.
		a, b := run(seed, false), run(seed, true)
		if diff := cmp.Diff(a.stats, b.stats, cmp.AllowUnexported(stats{})); diff != "" || a.steps != b.steps || a.violation != b.violation {
			t.Errorf("seed %d: %d and %d steps, violations %q and %q (-first +second):\n%s", seed, a.steps, b.steps, a.violation, b.violation, diff)
		}
	}
}

// envInt returns the number in an environment variable.
func envInt(name string, otherwise int64) int64 {
	if n, err := strconv.ParseInt(os.Getenv(name), 10, 64); err == nil {
		return n
	}
	return otherwise
}

// text is for the log.
func (s stats) text() string {
	s.known = nil
	return fmt.Sprintf("%+v", s)
}

func (s *stats) add(o stats) {
	s.binds, s.lost, s.rejected, s.singles, s.whole = s.binds+o.binds, s.lost+o.lost, s.rejected+o.rejected, s.singles+o.singles, s.whole+o.whole
	s.evictions, s.evicted, s.preempted = s.evictions+o.evictions, s.evicted+o.evicted, s.preempted+o.preempted
	s.opened, s.reclaimed, s.protected = s.opened+o.opened, s.reclaimed+o.reclaimed, s.protected+o.protected
	s.overruns, s.twice = s.overruns+o.overruns, s.twice+o.twice
	s.leaders, s.restarts = s.leaders+o.leaders, s.restarts+o.restarts
	s.nominated, s.taken = s.nominated+o.nominated, s.taken+o.taken
	for reason, n := range o.failed {
		s.failed[reason] += n
	}
	for what, n := range o.cards {
		s.cards[what] += n
	}
}

func plainWorld(seed uint64, tracing bool) *world { return runSeed(seed, false, tracing) }
func mixedWorld(seed uint64, tracing bool) *world { return runSeed(seed, true, tracing) }

// runSeed runs the world of one seed.
func runSeed(seed uint64, mixed, tracing bool) *world {
	w := newWorld(seed, worldOptions{
		hold: 10 * time.Second, patience: 30 * time.Second, maxIdle: 0.02, maxAge: 10 * time.Minute, maxBackoff: 5 * time.Second, mixed: mixed,
	})
	defer w.close()
	w.tracing = tracing
	w.worldOptions.replicas = 1 + w.random.IntN(2)
	if seed%3 == 1 { // As with thousands of nodes.
		w.slow = 40
	}
	w.brisk = seed%5 >= 3
	w.brownouts = seed%5 == 3
	if seed%4 == 2 {
		w.sample = 1 + int(seed/4%3)
	}
	w.popFromBackoff = w.chance(0.5)
	switch {
	case w.chance(0.3), w.brisk && w.chance(0.5): // Many retries come when writes whose answers were lost can no longer take effect.
		w.maxBackoff = binding.Deadline(simBindTimeout) - simBindTimeout
	case w.chance(0.3):
		w.maxBackoff = 10 * time.Second
	}
	if w.chance(0.8) {
		w.bindWindow = w.between(20*time.Millisecond, simBindTimeout/4)
	}
	if w.brisk { // kube-scheduler learns in lots that memory is free, and then binds many pods at a time.
		w.scheduler.watch.lag = w.between(5*time.Millisecond, 3*time.Second)
	}
	if w.brownouts { // Retries wait for each other in the moments in which live reads show that nothing was written.
		w.maxBackoff, w.bindWindow = binding.Deadline(simBindTimeout)-simBindTimeout, simBindTimeout/4
		w.after(time.Minute, w.brownOutAgain)
	}
	w.randomNodes()
	if seed%3 == 2 {
		w.randomSharing()
	}
	w.fragmented, w.overruns = w.chance(0.5), w.chance(0.3)
	if w.chance(0.5) {
		w.randomBudgets()
	}
	w.lead()
	// A fifth of the worlds has no disturbances, so that what fails there is at fault itself.
	if seed%5 > 0 {
		much := []float64{0.3, 1, 4}[w.random.IntN(3)]
		w.faults = faults{
			rejected: 0.03 * much * w.random.Float64(), busy: 0.05 * much * w.random.Float64(), lost: 0.08 * much * w.random.Float64(),
			unreachable: 0.05 * much * w.random.Float64(), slow: 0.05 * w.random.Float64(), moment: 0.05 * much * w.random.Float64(),
			died: 0.003 * much * w.random.Float64(), stuck: 0.1 * w.random.Float64(),
		}
		if w.brisk {
			w.faults.lost = 0.3 * w.random.Float64()
		}
		w.after(time.Second, w.disturbAgain)
	}
	if mixed {
		w.after(time.Second, w.mix)
	}
	w.after(time.Second, w.work)
	w.runFor(20 * time.Minute)
	if w.violation == "" {
		w.calmDown()
	}
	if tracing {
		w.final = w.report()
	}
	return w
}

// work creates and ends jobs, again and again.
func (w *world) work() {
	if w.calm {
		return
	}
	longest, most := 4*time.Second, 25
	if w.brisk {
		longest, most = time.Second, 5
	}
	w.after(w.between(50*time.Millisecond, longest), w.work)
	w.jobs = slices.DeleteFunc(w.jobs, func(j *job) bool {
		if j.controller.over() {
			j.stopped = true
			return true
		}
		return false
	})
	switch n := w.random.IntN(10); {
	case n < 7 && len(w.jobs) < most:
		if !w.brisk && w.chance(0.25) {
			w.randomWorkload(w.newName(), w.randomSpec())
		} else {
			w.randomJob()
		}
	case n < 8 && len(w.jobs) > 12:
		w.jobs[w.random.IntN(len(w.jobs))].stop()
	case len(w.jobs) == 0:
	default:
		w.trouble(w.jobs[w.random.IntN(len(w.jobs))])
	}
}

// trouble does something to a job.
func (w *world) trouble(j *job) {
	if len(j.pods) == 0 {
		return
	}
	p := j.pods[w.random.IntN(len(j.pods))]
	switch w.random.IntN(6) {
	case 4: // The gate is removed.
		w.ungate(j)
	case 0, 5:
		if w.chance(0.65) {
			j.controller.change()
		}
	case 1:
		w.api.delete(p)
	case 2:
		w.api.end(p, "Failed")
	case 3:
		w.api.end(p, "Succeeded")
	}
}

// ungate removes the scheduling gates of a job.
func (w *world) ungate(j *job) {
	for i := range j.specs {
		j.specs[i].gated = false
	}
	for _, p := range j.pods {
		if p.exists && p.gated {
			p.gated, j.impossible = false, false
			w.api.removeGate(p, testGate)
		}
	}
}

// disturbAgain disturbs the cluster, again and again.
func (w *world) disturbAgain() {
	if !w.calm {
		w.after(w.between(time.Second, 30*time.Second), w.disturbAgain)
		w.disturb()
	}
}

// moment disturbs the cluster soon, now and then. It is called where a disturbance is likely to do harm.
func (w *world) moment() {
	if !w.calm && w.chance(w.faults.moment) {
		w.after(w.between(0, 20*time.Millisecond), func() {
			if !w.calm {
				disturbances[w.random.IntN(harmful)](w)
			}
		})
	}
}

// disturb disturbs the cluster.
func (w *world) disturb() { disturbances[w.random.IntN(len(disturbances))](w) }

// harmful is the number of the first disturbances that are likely to do harm at the wrong moment.
const harmful = 8

var disturbances = []func(*world){
	(*world).changeLeader,
	(*world).changeCard,
	(*world).changeCard,
	(*world).cutOff,
	(*world).cutOff,
	func(w *world) {
		if r := w.answering(); r != nil {
			r.freeze(w.between(100*time.Millisecond, 20*time.Second))
		}
	},
	func(w *world) {
		if len(w.jobs) > 0 {
			w.trouble(w.jobs[w.random.IntN(len(w.jobs))])
		}
	},
	func(w *world) { // The watch of an extender stalls, and some begin again with a list.
		if len(w.replicas) > 0 {
			w.replicas[w.random.IntN(len(w.replicas))].stall(w.between(time.Second, 90*time.Second))
		}
	},
	(*world).changeLeader,
	(*world).changeNode,
	(*world).handOverGracefully,
	(*world).brownOut,
	func(w *world) { w.scheduler.watch.stalled = w.now + w.between(100*time.Millisecond, 3*time.Second) },
}

// brownOut keeps the API server from answering Bindings. Watches often lag meanwhile.
func (w *world) brownOut() {
	d := w.between(5*time.Second, 90*time.Second)
	w.api.mute = max(w.api.mute, w.now+d)
	w.trace("api: Bindings aren't answered for %v", d)
	for _, r := range w.replicas {
		if w.chance(0.4) {
			r.stall(w.between(0, d))
		}
	}
	if w.chance(0.2) {
		w.scheduler.watch.stalled = w.now + w.between(0, d)
	}
}

// brownOutAgain keeps Bindings from arriving, again and again. Small pods come and go when the retries come.
func (w *world) brownOutAgain() {
	if w.calm {
		return
	}
	d := w.between(20*time.Second, 50*time.Second)
	w.api.mute, w.api.away = max(w.api.mute, w.now+d), w.now+d
	w.trace("api: Bindings don't arrive for %v", d)
	deadline := binding.Deadline(simBindTimeout)
	w.after(d+deadline+w.between(5*time.Second, 20*time.Second), w.brownOutAgain)
	for range 120 {
		w.after(d+w.between(-time.Second, deadline+time.Second), func() {
			if !w.calm {
				j := w.single(w.newName(), podSpec{memory: 6 + 2*w.random.Int64N(4), lasts: time.Second})
				w.after(300*time.Millisecond, j.stop)
			}
		})
	}
}

// cutOff keeps the extenders from the API server.
func (w *world) cutOff() {
	for _, r := range w.replicas {
		r.apart = max(r.apart, w.now+w.between(time.Second, 2*time.Minute))
		w.blind = max(w.blind, r.apart)
		w.trace("%s can't reach the API server until %v", r.name, r.apart)
		if w.worldOptions.replicas > 1 {
			w.lapse(r)
		}
	}
}

// changeCard changes the health or the size of a card.
func (w *world) changeCard() {
	node := w.api.nodes[w.random.IntN(len(w.api.nodes))]
	i := w.random.IntN(len(node.cards))
	switch {
	case !node.exists:
		return
	case w.chance(0.5):
		node.sick[i] = !node.sick[i]
	default:
		node.cards[i] = []int64{16, 16, 12, 8, 24}[w.random.IntN(5)]
	}
	w.api.setNode(node)
}

// changeNode cordons a node, or deletes it for a while.
func (w *world) changeNode() {
	node := w.api.nodes[w.random.IntN(len(w.api.nodes))]
	switch {
	case !node.exists:
	case w.chance(0.3):
		w.api.removeNode(node)
		if w.chance(0.5) {
			w.after(w.between(time.Second, 40*time.Second), func() { w.api.deletePodsOn(node.name) })
		}
		w.after(w.between(time.Second, time.Minute), func() { w.api.setNode(node) })
	default:
		node.closed = !node.closed
		w.api.setNode(node)
	}
}

func (r *replica) freeze(d time.Duration) {
	r.frozenUntil = max(r.frozenUntil, r.w.now+d)
	r.w.blind = max(r.w.blind, r.w.now+d)
	r.w.trace("%s freezes for %v", r.name, d)
	if r.w.worldOptions.replicas > 1 && d > 8*time.Second {
		r.w.lapse(r)
	}
}

// stall holds up the watch, which then continues, or begins again with a list.
func (r *replica) stall(d time.Duration) {
	w := r.w
	r.cache.watch.stalled = max(r.cache.watch.stalled, w.now+d)
	w.blind = max(w.blind, w.now+d)
	w.trace("%s: the watch stalls for %v", r.name, d)
	if w.chance(0.3) {
		w.after(d, func() {
			if !r.dead {
				r.cache.list()
			}
		})
	}
}

// lead starts the extenders and makes one of them the leader.
func (w *world) lead() {
	for i := range w.worldOptions.replicas {
		w.newReplica(fmt.Sprintf("extender%d", i))
	}
	if w.worldOptions.replicas > 1 {
		w.takeOver(w.replicas[0])
	}
}

// takeOver makes the replica the leader, now that no write of the former one can take effect any more.
func (w *world) takeOver(r *replica) {
	if r.dead || w.answering() != nil {
		return
	}
	if r.frozenUntil > w.now || r.apart > w.now {
		w.after(time.Second, func() { w.takeOver(r) })
		return
	}
	w.trace("%s leads", r.name)
	w.stats.leaders++
	w.terms++
	if err := r.scheduler.TakeOver(w.context()); err != nil {
		panic(err)
	}
	r.leads = true
}

// lapse ends the term of a leader that can't renew its Lease. It may write for the deadline of a bind.
func (w *world) lapse(r *replica) {
	if !r.leads {
		return
	}
	w.after(8*time.Second, func() {
		if r.dead || !r.leads || max(r.frozenUntil, r.apart) < w.now {
			return // It renewed its Lease in time.
		}
		r.leads = false
		w.trace("%s lost its Lease", r.name)
		w.succeed(r, 15*time.Second)
	})
}

// succeed lets another replica take over.
func (w *world) succeed(old *replica, after time.Duration) {
	w.after(after, func() {
		var others []*replica
		for _, r := range w.replicas {
			if r != old && !r.dead {
				others = append(others, r)
			}
		}
		if len(others) == 0 {
			others = w.replicas
		}
		if len(others) > 0 {
			w.takeOver(others[w.random.IntN(len(others))])
		}
	})
}

// handOverGracefully ends a leader's term. Another replica, or the same one, leads later.
func (w *world) handOverGracefully() {
	r := w.answering()
	if r == nil || w.worldOptions.replicas == 1 {
		return
	}
	w.trace("%s gives the Lease up", r.name)
	r.leads = false
	var drain func()
	drain = func() {
		if !r.dead && len(r.calls) > 0 {
			w.after(100*time.Millisecond, drain)
			return
		}
		if w.chance(0.3) && !r.dead {
			r = nil // It can lead again.
		}
		w.succeed(r, 2*simBindTimeout+w.between(0, time.Second))
	}
	w.after(time.Second, drain)
}

// changeLeader kills the leader. A sole extender starts again; with replicas another one takes over, and a new standby starts.
func (w *world) changeLeader() {
	w.disturbed()
	r := w.answering()
	if r == nil {
		return
	}
	w.stats.restarts++
	if w.chance(0.4) { // The next leader doesn't see the last binds.
		for _, o := range w.replicas {
			if o != r {
				o.stall(w.between(10*time.Second, 2*time.Minute))
			}
		}
	}
	r.kill()
	name := fmt.Sprintf("extender%d", w.stats.restarts+1)
	if w.worldOptions.replicas == 1 {
		// Its last writes take effect within moments: the API server has them, or the connection is closed.
		w.after(2*simBindTimeout+w.between(100*time.Millisecond, 10*time.Second), func() { w.newReplica(name) })
		return
	}
	w.succeed(r, w.between(15*time.Second, 28*time.Second))
	w.after(w.between(time.Second, 20*time.Second), func() { w.newReplica(name) })
}
