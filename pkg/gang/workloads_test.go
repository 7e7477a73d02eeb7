package gang

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// controllers is the fixture (eight cards) with pods of named controllers.
type controllers struct{ *fixture }

// add creates pods of a card each. The pods of a LeaderWorkerSet name the controller after its kind.
func (c controllers) add(n int, group string, size int, controller string, edits ...memberEdit) (added []*pod) {
	for range n {
		m := Member{Pod: gpu.Pod{Request: 16}, Gang: Key{Namespace: "default", Name: group}, Size: size, Template: "t", Controller: controller, Kind: "Job"}
		added = append(added, c.fixture.add(m, edits...))
	}
	return added
}

// fill binds n single pods of a card each.
func (c controllers) fill(n int) (pods []*pod) {
	for range n {
		p := c.create("", 0, 16, "")
		c.bindSingle(p)
		pods = append(pods, p)
	}
	return pods
}

// end ends a bound pod.
func (c controllers) end(p *pod, succeeded bool) {
	p.Ended, p.Succeeded = true, succeeded
	c.ledger.Remove(p.UID)
	c.report(p)
}

// minutes lets time pass in which all pods are tried.
func (c controllers) minutes(n int) {
	for range n {
		c.advance(time.Minute)
		c.settle()
	}
}

func (c controllers) wantBound(what string, pods []*pod, want ...int) {
	c.Helper()
	n := 0
	for _, p := range pods {
		if p.Node != "" {
			n++
		}
	}
	if !slices.Contains(want, n) {
		status, _ := c.manager.Status(pods[len(pods)-1].UID)
		c.Errorf("of the %s %d of %d pods are bound, want %v; the last waits for: %s", what, n, len(pods), want, status.Reason.Words)
	}
}

func ofLeaderWorkerSet(m *Member) { m.Kind = LeaderWorkerSet }

// replica creates a replica of a LeaderWorkerSet: a leader of the StatefulSet of all leaders, and workers of a StatefulSet of their own.
func (c controllers) replica(group string, i, generation, size, number int) []*pod {
	leader := c.add(1, group, number, "leaders", ofLeaderWorkerSet)
	return append(leader, c.add(size-1, group, number, fmt.Sprintf("workers-%d-%d", i, generation), ofLeaderWorkerSet)...)
}

// Two replicas of four pods, room for six: one of them runs.
func TestLeaderWorkerSetStart(t *testing.T) {
	c := controllers{newFixture(t)}
	c.fill(2)
	a, b := c.replica("serve/0", 0, 0, 4, 4), c.replica("serve/1", 1, 0, 4, 4)
	c.minutes(10)
	c.wantBound("first replica", a, 0, 4)
	c.wantBound("second replica", b, 0, 4)
	c.wantBound("two replicas", slices.Concat(a, b), 4)
}

// A replica is created again, as a LeaderWorkerSet does by default when a pod of it fails. Its leader comes back before its workers, whose
// StatefulSet is another one then.
func TestLeaderWorkerSetRestart(t *testing.T) {
	for name, tc := range map[string]struct {
		groups [2]string
		number int
		// remains is how many of its old workers are still there when its leader comes back.
		remains int
	}{
		"each replica is a group":        {[2]string{"serve/0", "serve/1"}, 4, 0},
		"all replicas are one group":     {[2]string{"serve", "serve"}, 8, 0},
		"the workers live longer":        {[2]string{"serve/0", "serve/1"}, 4, 2},
		"one group, workers live longer": {[2]string{"serve", "serve"}, 8, 2},
	} {
		t.Run(name, func(t *testing.T) {
			c := controllers{newFixture(t)}
			first, second := c.replica(tc.groups[0], 0, 0, 4, tc.number), c.replica(tc.groups[1], 1, 0, 4, tc.number)
			c.settle()
			c.wantBound("LeaderWorkerSet", slices.Concat(first, second), 8)
			for _, p := range second[:4-tc.remains] {
				c.delete(p)
			}
			leader := c.add(1, tc.groups[1], tc.number, "leaders", ofLeaderWorkerSet)
			c.settle()
			for _, p := range second[4-tc.remains:] {
				c.delete(p)
			}
			workers := c.add(3, tc.groups[1], tc.number, "workers-1-1", ofLeaderWorkerSet)
			c.minutes(1)
			c.wantBound("replica that is created again", slices.Concat(leader, workers), 4)
		})
	}
}

// Two jobs with the same group name are created at the same time. There is room for six pods: one job runs, and not half of each.
func TestTwoJobsAtOnce(t *testing.T) {
	c := controllers{newFixture(t)}
	c.fill(2)
	var first, second []*pod
	for range 4 { // Their names sort alternately, as random suffixes do.
		first = append(first, c.add(1, "train", 4, "job-1")...)
		second = append(second, c.add(1, "train", 4, "job-2")...)
	}
	c.minutes(10)
	c.wantBound("first job", first, 4)
	c.wantBound("second job", second, 0)
}

// The pods of two such jobs are created one after the other, while kube-scheduler tries those that exist.
func TestTwoJobsAreCreated(t *testing.T) {
	c := controllers{newFixture(t)}
	c.fill(2)
	var first, second []*pod
	for range 4 {
		first = append(first, c.add(1, "train", 4, "job-1")...)
		second = append(second, c.add(1, "train", 4, "job-2")...)
		if s := c.manager.Startable(first[0].Gang, c.now); len(first) < 4 && (len(s.Together) > 0 || s.Shape != "") {
			t.Errorf("%d pods of each job exist, and fair sharing may start %v of shape %q", len(first), s.Together, s.Shape)
		}
		c.tryAll()
		c.advance(200 * time.Millisecond)
		c.tryAll()
		c.bindGranted()
	}
	c.minutes(10)
	c.wantBound("first job", first, 4)
	c.wantBound("second job", second, 0)
}

// Of a second job's pods only two exist when a first one of the same group name starts: they aren't surplus members of the first.
func TestTwoJobsOneIsLate(t *testing.T) {
	c := controllers{newFixture(t)}
	single := c.fill(8)
	first, second := c.add(4, "train", 4, "job-1"), c.add(2, "train", 4, "job-2")
	c.settle()
	for _, p := range single[:6] {
		c.delete(p)
	}
	c.settle()
	c.wantBound("first job", first, 4)
	second = append(second, c.add(2, "train", 4, "job-2")...) // For these there is no room any more.
	c.minutes(10)
	c.wantBound("second job", second, 0)
}

// The first pods of a job are older than those of another one of the same group name, which has all of its pods first: fair sharing still starts that
// one when the first job has all of its pods too. Pods may have been evicted for it meanwhile.
func TestTwoJobsFirstComplete(t *testing.T) {
	c := controllers{newFixture(t)}
	c.add(2, "train", 4, "job-1")
	var want []gpu.PodUID
	for _, p := range c.add(4, "train", 4, "job-2") {
		want = append(want, p.UID)
	}
	for range 2 {
		if together := c.manager.Startable(Key{Namespace: "default", Name: "train"}, c.now).Together; !slices.Equal(together, want) {
			t.Errorf("fair sharing may start %v, want %v", together, want)
		}
		c.add(2, "train", 4, "job-1")
	}
}

// Several jobs are one group, of which not all members must be bound together: those of a job that isn't among the first are surplus members.
func TestSurplusOfSeveralJobs(t *testing.T) {
	c := controllers{newFixture(t)}
	pods := slices.Concat(c.add(2, "train", 3, "driver"), c.add(2, "train", 3, "workers-0"), c.add(2, "train", 3, "workers-1"))
	c.minutes(1)
	c.wantBound("group", pods, 6)
}

// A job has more pods than its group's number. Those that are chosen to start, whose gates fair sharing opens, stay chosen while the job creates
// the others, and after a restart of the extender.
func TestSurplusMembersComeLater(t *testing.T) {
	c := controllers{newFixture(t)}
	gated := func(m *Member) { m.Gated = true }
	named := func(name string) memberEdit { return func(m *Member) { m.Name = name } }
	first := []gpu.PodUID{
		c.add(1, "train", 2, "job", gated, named("job-m"))[0].UID, c.add(1, "train", 2, "job", gated, named("job-n"))[0].UID,
	}
	want := func(when string) {
		t.Helper()
		if together := c.manager.Startable(Key{Namespace: "default", Name: "train"}, c.now).Together; !slices.Equal(together, first) {
			t.Errorf("%s: %v start, want %v", when, together, first)
		}
	}
	want("two pods exist")
	c.add(1, "train", 2, "job", gated, named("job-a"))
	want("a third pod exists")
	for _, uid := range first {
		p := c.pods[uid]
		p.Gated = false
	}
	next := newManager(t)
	c.manager = next
	for _, p := range slices.Backward(c.existing()) {
		c.report(p)
	}
	c.manager.StartLeading(c.now)
	slices.Reverse(first)
	want("another process leads")
}

// Three members of a job have completed, and their pods were removed. The last one fails, and the job replaces it.
func TestLastIndexFails(t *testing.T) {
	for name, restarts := range map[string]bool{"the extender knows the completed pods": false, "the extender restarts": true} {
		t.Run(name, func(t *testing.T) {
			c := controllers{newFixture(t)}
			pods := c.add(4, "train", 4, "job")
			c.settle()
			c.wantBound("job", pods, 4)
			for _, p := range pods[:3] {
				c.end(p, true)
				c.delete(p)
			}
			c.end(pods[3], false)
			replacement := c.add(1, "train", 4, "job")
			if restarts {
				c.manager.StopLeading(c.now)
				c.manager.StartLeading(c.now)
			}
			c.settle()
			c.minutes(1)
			c.wantBound("replacement", replacement, 1)
		})
	}
}

// addBroken creates a job of four pods, and binds all but the last one.
func (c controllers) addBroken() (pods []*pod) {
	c.Helper()
	pods = c.add(4, "train", 4, "job-1")
	for _, p := range pods {
		c.try(p)
	}
	for _, fails := range []bool{false, true} {
		for _, bind := range c.granted {
			c.bind(bind, fails)
		}
		c.granted = nil
		c.collectDecided()
	}
	c.wantBound("first job", pods, 3)
	return pods
}

// A group of a job is bound but for one pod, which is deleted. Another job of the same group name has all of its pods: it is bound whole or not at
// all, so none of them stands for the deleted one.
func TestGapBesideAnotherJob(t *testing.T) {
	for name, replaced := range map[string]bool{"the first job replaces its pod": true, "the first job is over": false} {
		t.Run(name, func(t *testing.T) {
			c := controllers{newFixture(t)}
			first := c.addBroken()
			second := c.add(4, "train", 4, "job-2")
			c.delete(first[3])
			c.fill(4) // One card is free.
			for range 10 {
				c.advance(time.Second)
				c.tryAll()
				c.bindGranted()
			}
			if replaced {
				first[3] = c.add(1, "train", 4, "job-1")[0]
			}
			c.settle()
			c.wantBound("second job", second, 0)
			if replaced {
				c.wantBound("first job", first, 4)
				c.wantNoEviction()
			} else {
				c.wantPhase(PhaseEvicting)
			}
		})
	}
}

// A group of a job is bound but for one pod, and the bound pods succeed. They count for this job only: another one of the same group name is bound whole
// or not at all.
func TestCompletedPodsOfAnotherJob(t *testing.T) {
	for name, lastExists := range map[string]bool{"the last pod is gone": false, "the last pod waits": true} {
		t.Run(name, func(t *testing.T) {
			c := controllers{newFixture(t)}
			first := c.addBroken()
			c.fill(5) // No room for four.
			second := c.add(4, "train", 4, "job-2")
			for _, p := range first {
				switch {
				case p.Node != "":
					c.end(p, true)
				case !lastExists:
					c.delete(p)
				}
			}
			c.minutes(3)
			c.wantBound("second job", second, 0)
			if lastExists {
				c.wantBound("first job", first, 4)
			}
		})
	}
}

// All members of a job fail: their replacements are bound together again.
func TestAllIndexesFail(t *testing.T) {
	c := controllers{newFixture(t)}
	pods := c.add(4, "train", 4, "job")
	c.settle()
	for _, p := range pods {
		c.end(p, false)
	}
	c.fill(6)
	again := c.add(4, "train", 4, "job")
	c.minutes(2)
	c.wantBound("replacements", again, 0)
}

// The Jobs of a JobSet are one group. The JobSet creates one of them again while another one runs on: its pods join the run, but not those of other
// JobSets, and not those of a further Job if all that the group needs run.
func TestJobOfJobSetAgain(t *testing.T) {
	for name, tc := range map[string]struct {
		jobSet  string
		deleted int
		want    int
	}{
		"the same JobSet":          {"set", 3, 3},
		"another JobSet":           {"other", 3, 0},
		"no Job was created again": {"set", 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			c := controllers{newFixture(t)}
			of := func(jobSet string) memberEdit { return func(m *Member) { m.JobSet = jobSet } }
			driver, workers := c.add(1, "train", 4, "driver", of("set")), c.add(3, "train", 4, "workers", of("set"))
			c.settle()
			c.wantBound("driver", driver, 1)
			c.wantBound("workers", workers, 3)
			for _, p := range workers[:tc.deleted] {
				c.delete(p)
			}
			again := c.add(3, "train", 4, "workers again", of(tc.jobSet))
			c.minutes(1)
			c.wantBound("workers that are created again", again, tc.want)
		})
	}
}

// A reason that doesn't end by itself says what the workload's kind needs.
func TestStalled(t *testing.T) {
	const refused = "; if pods are refused, as by a quota, the Events of their controller say why"
	ofKind := func(kind string) memberEdit { return func(m *Member) { m.Kind = kind } }
	for kind, want := range map[string]string{
		"StatefulSet":     "1 of 3 members exist; a StatefulSet creates all pods at once only with podManagementPolicy Parallel" + refused,
		"LeaderWorkerSet": "1 of 3 members exist; a LeaderWorkerSet creates all pods of a replica at once only with startupPolicy LeaderCreated" + refused,
		"ReplicaSet":      "1 of 3 members exist; the replicas of a Deployment must be at least the group's number" + refused,
		"Job":             "1 of 3 members exist; a Job has no more pods at a time than its parallelism, and completed pods that were removed don't count" + refused,
		"RayCluster":      "1 of 3 members exist; all must be created at once" + refused,
	} {
		c := controllers{newFixture(t)}
		edit := ofKind(kind)
		if kind == "LeaderWorkerSet" {
			edit = ofLeaderWorkerSet
		}
		p := c.add(1, "group", 3, "controller", edit)[0]
		c.advance(testPatience - time.Second)
		if status, _ := c.manager.Status(p.UID); status.Reason.Words != "1 of 3 members exist" {
			t.Errorf("%s: before the patience the reason is %q", kind, status.Reason.Words)
		}
		c.advance(2 * time.Second)
		if status, _ := c.manager.Status(p.UID); status.Reason.Words != want {
			t.Errorf("%s: the reason is %q, want %q", kind, status.Reason.Words, want)
		}
		if event := "GangIncomplete: The group waits: " + want; !slices.Contains(c.events, event) {
			t.Errorf("%s: no Event %q in %q", kind, event, c.events)
		}
	}
}
