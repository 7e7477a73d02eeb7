package eviction

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/record"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// executions is an API server with the group g1, g2, g3 and the pod s, and the round that evicts them for the pod w. Its API server deletes what
// is evicted.
type executions struct {
	t        *testing.T
	server   *fake.Server
	observer *fake.Observer
	clock    *clocktesting.FakeClock
	pods     []*corev1.Pod
	round    Round
	// refused are the pods whose eviction is refused, except for dry runs.
	refused string
	// justified is what the round's Wanted returns.
	justified map[gpu.PodUID]bool
}

func newExecutions(t *testing.T) *executions {
	f := &executions{t: t, clock: clocktesting.NewFakeClock(begin), server: fake.NewServer(), observer: &fake.Observer{}, justified: always()}
	for _, name := range []string{"g1", "g2", "g3", "s", "w"} {
		pod := fake.Pod(name, 4, fake.Bound("n1", 0))
		if name == "w" {
			pod = fake.Pod(name, 16)
		}
		f.pods = append(f.pods, pod)
		f.server.Set(pod)
	}
	p := func(i int) PodID { return IDs(protocol.Pod(f.pods[i]))[0] }
	f.round = Round{
		Cause: ByShare, For: []Waiting{{p(4), "n1", []int{0}}},
		Victims: []Victim{{Pods: []PodID{p(0), p(1), p(2)}, For: p(4), What: "Evicted"}, {Pods: []PodID{p(3)}, For: p(4), What: "Evicted"}},
	}
	f.server.Answer(fake.Answers{Evict: func(pod gpu.Pod, dryRun bool) error {
		switch {
		case dryRun:
		case strings.Contains(f.refused, pod.Name):
			return budgetRefusal()
		default:
			for _, object := range f.pods {
				if object.Name == pod.Name {
					f.server.Set(fake.Edited(object, fake.Terminating(f.clock.Now().Add(30*time.Second))))
				}
			}
		}
		return nil
	}})
	return f
}

// process returns an Executor that leads from now on. Its cache has what the API server has now.
func (f *executions) process(api API) *Executor {
	objects := []runtime.Object{fake.Node("n1", 16)}
	for _, pod := range f.pods {
		objects = append(objects, f.server.Get(pod))
	}
	c := newCluster(objects...)
	x := NewExecutor(Options{
		API: api, Ledger: c.ledger, Cache: c, Recorder: record.NewFakeRecorder(100), Observer: f.observer, Reclaims: f.observer,
		AnswerLost: time.Minute, Leading: func() error { return nil }, Clock: f.clock, NewGroup: func(int) background.Group { return &inline{} },
	}, recordName)
	x.Tick(context.Background())
	return x
}

// evict makes the round, if its check succeeds.
func (f *executions) evict(x *Executor) (time.Time, error) {
	if err := x.Check(context.Background(), f.round.Victims); err != nil {
		return time.Time{}, err
	}
	_, until, err := x.Evict(context.Background(), f.round, func() map[gpu.PodUID]bool { return f.justified })
	return until, err
}

// always wants victims for the pods of these tests.
func always() map[gpu.PodUID]bool { return map[gpu.PodUID]bool{"uid-w": true, "uid-a": true} }

// later lets time pass in steps of a second.
func (f *executions) later(x *Executor, d time.Duration) {
	for range d / time.Second {
		f.clock.Step(time.Second)
		x.Tick(context.Background())
	}
}

// running returns the names of the victims that run.
func (f *executions) running() string {
	var names []string
	for _, pod := range f.pods[:4] {
		if live := f.server.Get(pod); live != nil && live.DeletionTimestamp == nil {
			names = append(names, pod.Name)
		}
	}
	return strings.Join(names, " ")
}

// inline is a Group that runs one function after the other.
type inline struct{ err error }

func (g *inline) Go(run func() error) { g.err = errors.Join(g.err, run()) }
func (g *inline) Wait() error         { return g.err }

var errStandby = errors.New("standby")

// The leader dies at each call to the API server of a round, and the next one at each of its calls. The one after them finishes what they have begun:
// all victims if the pod still waits, else the rest of the group. Nothing else is evicted. The same holds if the caches of the next ones show only
// after a while what was evicted.
func TestExecutorDies(t *testing.T) {
	for _, lag := range []time.Duration{0, 20 * time.Second} {
		testExecutorDies(t, lag)
	}
}

func testExecutorDies(t *testing.T, lag time.Duration) {
	const calls = 22 // A round needs 19.
	for _, waits := range []bool{true, false} {
		for _, after := range []bool{true, false} {
			outcomes := map[string]int{}
			for first := range calls {
				for second := range calls {
					f := newExecutions(t)
					_, _ = f.evict(f.process(&fake.Mortal{API: f.server, Left: first + 1, After: after}))
					before := f.running()
					f.next(&fake.Mortal{API: f.server, Left: second + 1, After: after}, waits, lag)
					f.next(f.server, waits, lag)
					running, begun := f.running(), before != "g1 g2 g3 s"
					outcomes[running]++
					if begun != (running != "g1 g2 g3 s") || begun && running != "" && (waits || running != "s") {
						t.Errorf("dead at calls %d and %d, after them %t, waits %t, lag %v: first %q run, in the end %q",
							first+1, second+1, after, waits, lag, before, running)
					}
				}
			}
			if len(outcomes) < 2 {
				t.Errorf("outcomes %v", outcomes)
			}
		}
	}
}

// next is a process that takes over. Its cache shows only after the lag that pods are being deleted.
func (f *executions) next(api API, waits bool, lag time.Duration) {
	x := f.process(api)
	c := x.Cache.(*cluster)
	report := func(current bool) {
		for _, pod := range f.pods {
			if current {
				pod = f.server.Get(pod)
			}
			c.report(pod)
		}
	}
	report(lag == 0)
	for passed := range 3 * time.Minute / time.Second {
		if passed == lag/time.Second {
			report(true)
		}
		f.later(x, time.Second)
		for _, r := range x.Inherited(ByShare) {
			if waits {
				x.Continue(r, always)
			}
		}
	}
}

// What the API server refuses after the dry run is retried until the round ends, as long as the pod waits. A group is finished in any case.
func TestExecutorRetries(t *testing.T) {
	for name, tc := range map[string]struct {
		refused   string
		meanwhile func(f *executions, x *Executor)
		running   string
		began     bool
	}{
		"nothing is refused":                {"", nil, "", true},
		"the first one":                     {"g1", nil, "g1 g2 g3 s", false},
		"for some time":                     {"g2 s", func(f *executions, x *Executor) { f.later(x, 20*time.Second); f.refused = "" }, "", true},
		"until the end":                     {"g2 s", nil, "g2 s", true},
		"until after the end":               {"g2 s", func(f *executions, x *Executor) { f.later(x, 92*time.Second); f.refused = "" }, "g2 s", true},
		"no further victims may be evicted": {"g2 s", func(f *executions, _ *Executor) { f.justified["uid-w"], f.refused = false, "" }, "s", true},
		"they may be evicted for the other pod only": {"g2 s", func(f *executions, _ *Executor) {
			f.round.Victims[1].For.UID = "other"
			f.justified, f.refused = map[gpu.PodUID]bool{"uid-w": false, "other": true}, ""
		}, "", true},
		"not for some time": {"g2 s", func(f *executions, x *Executor) {
			f.justified["uid-w"], f.refused = false, ""
			f.later(x, 20*time.Second)
			f.justified["uid-w"] = true
		}, "", true},
		"the pod doesn't wait anymore": {"g2 s", func(f *executions, _ *Executor) { f.justified, f.refused = nil, "" }, "s", true},
	} {
		t.Run(name, func(t *testing.T) {
			f := newExecutions(t)
			x := f.process(f.server)
			f.refused = tc.refused
			until, err := f.evict(x)
			if began := !until.IsZero(); began != tc.began || (err != nil) != (tc.refused != "") {
				t.Errorf("began %t, %v", began, err)
			}
			if tc.meanwhile != nil {
				tc.meanwhile(f, x)
			}
			f.later(x, 3*time.Minute)
			if got := f.running(); got != tc.running {
				t.Errorf("%q run, want %q", got, tc.running)
			}
			if object, _ := f.server.ConfigMap(t.Context(), recordName.Namespace, recordName.Name); object.Data[keyRounds] != "null" && object.Data[keyRounds] != "[]" {
				t.Errorf("still recorded: %s", object.Data[keyRounds])
			}
			if len(x.rounds) > 0 {
				t.Error("the round doesn't end")
			}
			if counted, evicted := f.observer.Count("reclaimed pods"), 4-len(strings.Fields(tc.running)); counted != evicted {
				t.Errorf("%d evictions are counted, of %d", counted, evicted)
			}
		})
	}
}

// A round for two pods outlasts its leader. What was refused is evicted for its own pod only, whichever of them still waits.
func TestExecutorInheritsSeveral(t *testing.T) {
	for waits, want := range map[gpu.PodUID]string{"uid-w": "s", "uid-other": ""} {
		f := newExecutions(t)
		other := PodID{Namespace: "default", Name: "other", UID: "uid-other"}
		f.round.For, f.round.Victims[1].For = append(f.round.For, Waiting{other, "n1", []int{1}}), other
		f.refused = "s"
		_, _ = f.evict(f.process(f.server))
		f.refused = ""
		x := f.process(f.server)
		for _, r := range x.Inherited(ByShare) {
			x.Continue(r, func() map[gpu.PodUID]bool { return map[gpu.PodUID]bool{waits: true} })
		}
		f.later(x, 10*time.Second)
		if got := f.running(); got != want {
			t.Errorf("%s waits: %q run, want %q", waits, got, want)
		}
		if x.Tries("uid-s") != (waits == "uid-other") {
			t.Errorf("%s waits: tries to evict s: %t", waits, x.Tries("uid-s"))
		}
	}
}

// A pod with a long grace period gets a shorter one, and one with a short grace period keeps it.
func TestGracePeriod(t *testing.T) {
	f := newExecutions(t)
	for i, seconds := range []int64{30 * 24 * 60 * 60, 600, 0} {
		f.pods[i].Spec.TerminationGracePeriodSeconds = new(seconds)
		f.server.Set(f.pods[i])
	}
	until, err := f.evict(f.process(f.server))
	if want := begin.Add(protocol.MaxGracePeriod + queue.Arrival); err != nil || !until.Equal(want) {
		t.Errorf("the round ends at %v, want %v: %v", until, want, err)
	}
	got := f.server.Calls().Evicted
	slices.Sort(got)
	check.Equal(t, "the result", []string{"?g1 600s", "?g2", "?g3", "?s", "g1 600s", "g2", "g3", "s"}, got)
}

// Nothing is evicted if the round can't be recorded.
func TestExecutorRecords(t *testing.T) {
	for name, tc := range map[string]struct {
		before func(f *executions, x *Executor)
		want   error
		// failed is true if a failure to read or write the record is counted.
		failed bool
	}{
		"the API server refuses": {func(f *executions, _ *Executor) {
			f.server.Answer(fake.Answers{Record: func(string) error { return fake.ErrDead }})
		}, fake.ErrDead, true},
		"another process has written": {func(f *executions, _ *Executor) {
			other := f.process(f.server)
			if _, err := f.evict(other); err != nil {
				t.Fatal(err)
			}
			f.server.Set(f.pods[0])
		}, errOtherHolder, false},
		"this process leads no more": {func(_ *executions, x *Executor) {
			x.Leading = func() error { return errStandby }
		}, errStandby, false},
		"the record is full": {func(f *executions, _ *Executor) {
			v := f.round.Victims[0]
			v.Pods = slices.Repeat(v.Pods, maxRecord/30)
			f.round.Victims = append(f.round.Victims, v)
		}, errRecordFull, true},
		"there are as many rounds as possible": {func(f *executions, x *Executor) {
			for i := range maxRounds {
				x.rounds[gpu.PodUID(fmt.Sprint(i))] = newExecution(Round{})
			}
		}, errFull, false},
		"the former leader's rounds aren't read": {func(_ *executions, x *Executor) { x.resign() }, errFull, false},
		"the API server refuses to read them": {func(f *executions, x *Executor) {
			f.server.Answer(fake.Answers{Record: func(string) error { return fake.ErrDead }})
			x.resign()
			x.Tick(t.Context())
		}, errFull, true},
	} {
		t.Run(name, func(t *testing.T) {
			f := newExecutions(t)
			x := f.process(f.server)
			tc.before(f, x)
			before := len(f.server.Calls().Evicted)
			if _, until, err := x.Evict(t.Context(), f.round, always); !errors.Is(err, tc.want) || !until.IsZero() {
				t.Errorf("until %v, %v; want %v", until, err, tc.want)
			}
			if got := f.server.Calls().Evicted[before:]; len(got) > 0 {
				t.Errorf("evicted %v", got)
			}
			if failed := f.observer.Counts()["record failed"]; (failed > 0) != tc.failed {
				t.Errorf("%d failures are counted", failed)
			}
		})
	}
}

// An operator deletes the record, or empties it, while a round is in progress: it goes on, further ones begin, and the next leader finds them.
func TestExecutorRecordDeleted(t *testing.T) {
	for name, change := range map[string]func(f *executions){
		"it is deleted": func(f *executions) { f.server.RemoveConfigMap(recordName) },
		"it is emptied": func(f *executions) {
			f.server.RemoveConfigMap(recordName)
			if _, err := f.server.CreateConfigMap(t.Context(), recordName.Namespace, recordName.Name); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newExecutions(t)
			x := f.process(f.server)
			f.refused = "s"
			if until, err := f.evict(x); until.IsZero() {
				t.Fatal(err)
			}
			change(f)
			other := f.round
			other.For = []Waiting{{PodID{"default", "a", "uid-a"}, "n1", []int{0}}}
			other.Victims = []Victim{{Pods: f.round.Victims[1].Pods, For: other.For[0].PodID, What: "Evicted"}}
			f.refused = ""
			if _, until, err := x.Evict(t.Context(), other, always); err != nil || until.IsZero() {
				t.Errorf("another round doesn't begin: %v", err)
			}
			if f.running() != "" {
				t.Errorf("%s run", f.running())
			}
			next := f.process(f.server)
			if got := next.Inherited(ByShare); len(got) != 2 {
				t.Errorf("the next leader finds %d rounds", len(got))
			}
		})
	}
}

// Evictions are turned off while one of a group's pods is refused, and on again a day later: the pod may belong to a whole group by then.
func TestExecutorOutdatedRecord(t *testing.T) {
	f := newExecutions(t)
	f.refused = "g2"
	if until, err := f.evict(f.process(f.server)); until.IsZero() {
		t.Fatal(err)
	}
	f.refused = ""
	f.clock.Step(24 * time.Hour)
	f.later(f.process(f.server), 3*time.Minute)
	if got := f.running(); got != "g2" {
		t.Errorf("%q run, want g2", got)
	}
}

// A record that can't be written is tried again every five seconds, not at each step.
func TestExecutorWritesAgain(t *testing.T) {
	f := newExecutions(t)
	x := f.process(f.server)
	if _, err := f.evict(x); err != nil {
		t.Fatal(err)
	}
	writes := 0
	f.server.Answer(fake.Answers{Record: func(string) error {
		writes++
		return fake.ErrDead
	}})
	f.later(x, 91*time.Second) // Until the round has ended.
	writes = 0
	f.later(x, time.Minute)
	if writes != 12 {
		t.Errorf("tried %d times in a minute, want 12", writes)
	}
	f.server.Answer(fake.Answers{})
	f.later(x, 6*time.Second)
	if object, _ := f.server.ConfigMap(t.Context(), recordName.Namespace, recordName.Name); object.Data[keyRounds] != "null" && object.Data[keyRounds] != "[]" {
		t.Errorf("still recorded: %s", object.Data[keyRounds])
	}
}

// A new leader's cache doesn't have a victim yet when it takes over. The former leader has evicted nothing: nor does the new one if no pod waits, and
// if one does, it evicts all victims.
func TestExecutorInheritsUnseen(t *testing.T) {
	for waits, want := range map[bool]string{true: "", false: "g1 g2 g3 s"} {
		f := newExecutions(t)
		_, _ = f.evict(f.process(&fake.Mortal{API: f.server, Left: 12, After: false})) // It dies before the first eviction.
		x := f.process(f.server)
		c := x.Cache.(*cluster)
		delete(c.pods, "g1")
		for _, r := range x.Inherited(ByShare) {
			if waits {
				x.Continue(r, always)
			}
		}
		f.later(x, 5*time.Second)
		c.report(f.server.Get(f.pods[0]))
		f.later(x, 3*time.Minute)
		if got := f.running(); got != want {
			t.Errorf("waits %t: %q run, want %q", waits, got, want)
		}
	}
}

// The answer to the first eviction of a group is lost, the others are refused, and then no pod waits any more. Once the cache shows that the eviction
// was made, the rest of the group is evicted, else none.
func TestExecutorLostAnswer(t *testing.T) {
	for made, want := range map[string]string{"at once": "s", "later": "s", "never": "g1 g2 g3 s"} {
		f := newExecutions(t)
		x := f.process(f.server)
		terminating := fake.Edited(f.pods[0], fake.Terminating(f.clock.Now().Add(30*time.Second)))
		f.server.Answer(fake.Answers{Evict: func(pod gpu.Pod, dryRun bool) error {
			switch {
			case dryRun:
				return nil
			case pod.Name != "g1":
				return budgetRefusal()
			case made == "at once":
				f.server.Set(terminating)
			}
			return errLost
		}})
		if until, err := f.evict(x); err == nil || until.IsZero() {
			t.Fatal(until, err)
		}
		f.justified = nil
		f.server.Answer(fake.Answers{Evict: func(pod gpu.Pod, _ bool) error {
			for _, object := range f.pods {
				if object.Name == pod.Name {
					f.server.Set(fake.Edited(object, fake.Terminating(f.clock.Now().Add(30*time.Second))))
				}
			}
			return nil
		}})
		f.later(x, 30*time.Second)
		if made != "never" {
			f.server.Set(terminating)
			x.Cache.(*cluster).report(terminating)
		}
		f.later(x, 3*time.Minute)
		if got := f.running(); got != want {
			t.Errorf("made %s: %q run, want %q", made, got, want)
		}
		if len(x.rounds) > 0 {
			t.Errorf("made %s: the round doesn't end", made)
		}
	}
}

// A round for a pod doesn't begin while a former one for it still evicts the rest of a group.
func TestExecutorOneRoundPerPod(t *testing.T) {
	f := newExecutions(t)
	x := f.process(f.server)
	f.refused = "g2 g3"
	if until, err := f.evict(x); err == nil || until.IsZero() {
		t.Fatal(until, err)
	}
	f.justified = nil
	f.later(x, 2*time.Second)
	second := f.round
	second.Victims = second.Victims[1:]
	_, _, err := x.Evict(t.Context(), second, always)
	f.refused = ""
	f.later(x, time.Minute)
	if got := f.running(); got != "" || !errors.Is(err, errFull) {
		t.Errorf("%q run, %v", got, err)
	}
}
