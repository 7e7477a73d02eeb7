package eviction

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/record"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// executions is an API server with the group g1, g2, g3 and the pod s, which are evicted for the pod w. Its API server deletes what is evicted.
type executions struct {
	t        *testing.T
	server   *fake.Server
	observer *fake.Observer
	clock    *clocktesting.FakeClock
	pods     []*corev1.Pod
	victims  []Victim
	// refused are the pods whose eviction is refused, except for dry runs.
	refused string
	// onlyFinish is true once evictions for others are turned off.
	onlyFinish bool
}

func newExecutions(t *testing.T) *executions {
	f := &executions{t: t, clock: clocktesting.NewFakeClock(begin), server: fake.NewServer(), observer: &fake.Observer{}}
	for _, name := range []string{"g1", "g2", "g3", "s", "w"} {
		pod := fake.Pod(name, 4, fake.Bound("n1", 0))
		if name == "w" {
			pod = fake.Pod(name, 16)
		}
		f.pods = append(f.pods, pod)
		f.server.Set(pod)
	}
	p := func(i int) PodID { return IDs(protocol.Pod(f.pods[i]))[0] }
	f.victims = []Victim{
		{Pods: []PodID{p(0), p(1), p(2)}, For: p(4), Message: "Evicted", Cause: ByShare}, {Pods: []PodID{p(3)}, For: p(4), Message: "Evicted", Cause: ByShare},
	}
	f.server.Answer(fake.Answers{Evict: f.answer})
	return f
}

// answer is the API server's answer to an eviction.
func (f *executions) answer(pod gpu.Pod, dryRun bool) error {
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
		OnlyFinish: f.onlyFinish,
	}, recordName)
	x.Tick(context.Background())
	return x
}

// evict evicts the victims, if their check succeeds.
func (f *executions) evict(x *Executor) (time.Time, error) {
	if err := x.DryRun(context.Background(), f.victims); err != nil {
		return time.Time{}, err
	}
	return x.Evict(context.Background(), f.victims)
}

// recorded returns the groups in the record.
func (f *executions) recorded() string {
	object, err := f.server.ConfigMap(f.t.Context(), recordName.Namespace, recordName.Name)
	if err != nil {
		f.t.Fatal(err)
	}
	return object.Data[keyGroups]
}

// later lets time pass, in the steps of Run.
func (f *executions) later(x *Executor, d time.Duration) {
	for range d / queue.Retry {
		f.clock.Step(queue.Retry)
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

// The leader dies at each call to the API server of its evictions, and the next one at each of its calls. The one after them evicts the rest of the
// group if a pod of it was evicted, and nothing else.
func TestExecutorDies(t *testing.T) {
	const calls = 22 // The evictions need 19.
	for _, after := range []bool{true, false} {
		outcomes := map[string]int{}
		for first := range calls {
			for second := range calls {
				f := newExecutions(t)
				_, _ = f.evict(f.process(&fake.Mortal{EvictionAPI: f.server, Left: first + 1, After: after}))
				before := f.running()
				for _, api := range []API{&fake.Mortal{EvictionAPI: f.server, Left: second + 1, After: after}, f.server} {
					f.later(f.process(api), 3*time.Minute)
				}
				running := f.running()
				outcomes[running]++
				want := before
				if !strings.HasPrefix(before, "g1 g2 g3") {
					want = strings.Join(slices.DeleteFunc(strings.Fields(before), func(name string) bool { return name != "s" }), " ")
				}
				if running != want {
					t.Errorf("dead at calls %d and %d, after them %t: first %q run, in the end %q, want %q", first+1, second+1, after, before, running, want)
				}
			}
		}
		if len(outcomes) < 3 {
			t.Errorf("outcomes %v", outcomes)
		}
	}
}

// What the API server refuses after the dry run is tried again for the rest of a group only, for a minute after the others should have ended.
func TestExecutorRetries(t *testing.T) {
	for name, tc := range map[string]struct {
		refused string
		// lasts is how long they are refused.
		lasts   time.Duration
		running string
		began   bool
	}{
		"nothing is refused":  {"", 0, "", true},
		"the first one":       {"g1", 0, "g1 g2 g3 s", false},
		"for some time":       {"g2 s", 20 * time.Second, "s", true},
		"until the end":       {"g2 s", time.Hour, "g2 s", true},
		"until after the end": {"g2 s", 95 * time.Second, "g2 s", true},
	} {
		t.Run(name, func(t *testing.T) {
			f := newExecutions(t)
			x := f.process(f.server)
			f.refused = tc.refused
			until, err := f.evict(x)
			if began := !until.IsZero(); began != tc.began || (err != nil) != (tc.refused != "") {
				t.Errorf("began %t, %v", began, err)
			}
			f.later(x, min(tc.lasts, 3*time.Minute))
			f.refused = ""
			f.later(x, 3*time.Minute)
			if got := f.running(); got != tc.running {
				t.Errorf("%q run, want %q", got, tc.running)
			}
			if got := f.recorded(); got != "null" {
				t.Errorf("still recorded: %s", got)
			}
			if len(x.groups) > 0 || len(x.asked) > 0 {
				t.Error("the evictions don't end")
			}
			if counted, evicted := f.observer.Count("reclaimed pods"), 4-len(strings.Fields(tc.running)); counted != evicted {
				t.Errorf("%d evictions are counted, of %d", counted, evicted)
			}
		})
	}
}

// unreadable is an API server that answers no reads of the pod once it fails.
type unreadable struct {
	API
	pod   string
	fails bool
}

func (u *unreadable) Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error) {
	if u.fails && name == u.pod {
		return nil, errLost
	}
	return u.API.Pod(ctx, namespace, name)
}

// The first victim can't be read: nothing is evicted.
func TestExecutorReadFails(t *testing.T) {
	f := newExecutions(t)
	api := &unreadable{API: f.server, pod: "g1"}
	x := f.process(api)
	if err := x.DryRun(t.Context(), f.victims); err != nil {
		t.Fatal(err)
	}
	api.fails = true
	if until, err := x.Evict(t.Context(), f.victims); !until.IsZero() || !errors.Is(err, errLost) {
		t.Errorf("until %v, %v", until, err)
	}
	api.fails = false
	f.later(x, 3*time.Minute)
	if got := f.running(); got != "g1 g2 g3 s" {
		t.Errorf("%q run, want all", got)
	}
}

// Each eviction call takes longer than one can take effect, and one is refused: the rest of the group is evicted nevertheless.
func TestExecutorSlowCalls(t *testing.T) {
	f := newExecutions(t)
	x := f.process(f.server)
	f.server.Answer(fake.Answers{Evict: func(pod gpu.Pod, dryRun bool) error {
		if dryRun {
			return nil
		}
		f.clock.Step(x.AnswerLost + time.Second)
		if pod.Name != "g1" {
			return budgetRefusal()
		}
		f.server.Set(fake.Edited(f.pods[0], fake.Terminating(f.clock.Now().Add(10*time.Minute))))
		return nil
	}})
	if until, err := f.evict(x); err == nil || until.IsZero() {
		t.Fatal(until, err)
	}
	f.server.Answer(fake.Answers{Evict: func(pod gpu.Pod, _ bool) error {
		for _, object := range f.pods {
			if object.Name == pod.Name {
				f.server.Set(fake.Edited(object, fake.Terminating(f.clock.Now().Add(30*time.Second))))
			}
		}
		return nil
	}})
	f.later(x, 3*time.Minute)
	if got := f.running(); got != "s" {
		t.Errorf("%q run, want s", got)
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
	if want := begin.Add(protocol.MaxGracePeriod + queue.ArrivalTimeout); err != nil || !until.Equal(want) {
		t.Errorf("places are kept until %v, want %v: %v", until, want, err)
	}
	got := f.server.Calls().Evicted
	slices.Sort(got)
	check.Equal(t, "the result", []string{"?g1 600s", "?g2", "?g3", "?s", "g1 600s", "g2", "g3", "s"}, got)
}

// Nothing is evicted if the group can't be recorded.
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
		"another process has begun a term": {func(f *executions, _ *Executor) { f.process(f.server) }, errNotHeld, false},
		"this process leads no more": {func(_ *executions, x *Executor) {
			x.Leading = func() error { return errStandby }
		}, errStandby, false},
		"the former leader's groups aren't read": {func(_ *executions, x *Executor) { x.resign() }, errNotHeld, false},
		"the API server refuses to read them": {func(f *executions, x *Executor) {
			f.server.Answer(fake.Answers{Record: func(string) error { return fake.ErrDead }})
			x.resign()
			x.Tick(t.Context())
		}, errNotHeld, true},
	} {
		t.Run(name, func(t *testing.T) {
			f := newExecutions(t)
			x := f.process(f.server)
			tc.before(f, x)
			before := len(f.server.Calls().Evicted)
			if until, err := x.Evict(t.Context(), f.victims); !errors.Is(err, tc.want) || !until.IsZero() {
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

// An operator deletes the record, or empties it, while a group is evicted in part: others are evicted, and the next leader finds both.
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
			f.refused = "g2"
			if until, err := f.evict(x); until.IsZero() {
				t.Fatal(err)
			}
			change(f)
			gone := PodID{"default", "gone", "uid-gone"}
			other := Victim{Pods: append(f.victims[1].Pods, gone), For: f.victims[1].For, Message: "Evicted", Cause: ByShare}
			if until, err := x.Evict(t.Context(), []Victim{other}); err != nil || until.IsZero() {
				t.Errorf("another group isn't evicted: %v", err)
			}
			if next := f.process(f.server); len(next.groups) != 2 {
				t.Errorf("the next leader finds %d groups", len(next.groups))
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

// The leader dies after it has recorded a group, and before its first eviction. One of the group's pods ends by itself: the others stay.
func TestExecutorMemberEnds(t *testing.T) {
	recorded := 0
	for calls := range 22 {
		f := newExecutions(t)
		_, _ = f.evict(f.process(&fake.Mortal{EvictionAPI: f.server, Left: calls + 1, After: true}))
		object, err := f.server.ConfigMap(t.Context(), recordName.Namespace, recordName.Name)
		if err != nil || !strings.Contains(object.Data[keyGroups], "g1") || f.running() != "g1 g2 g3 s" {
			continue
		}
		recorded++
		f.server.Set(fake.Edited(f.pods[0], fake.Phase(corev1.PodSucceeded)))
		f.later(f.process(f.server), 3*time.Minute)
		if got := f.running(); got != "g1 g2 g3 s" {
			t.Errorf("dead after %d calls: %q stay, want all", calls+1, got)
		}
	}
	if recorded == 0 {
		t.Error("no leader died between the record and the first eviction")
	}
}

// Evictions for others are turned off, with or without the right to the record. What a former leader has begun is finished, and nothing else is written.
func TestExecutorOnlyFinishes(t *testing.T) {
	for name, tc := range map[string]struct {
		begun, forbidden bool
		running          string
		writes           int
	}{
		"a group is evicted in part": {begun: true, running: "s", writes: 2},
		"no group is":                {running: "g1 g2 g3 s"},
		"there is no right to it":    {begun: true, forbidden: true, running: "g2 s"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newExecutions(t)
			if x := f.process(f.server); tc.begun {
				f.refused = "g2 s"
				_, _ = f.evict(x)
				f.refused = ""
			}
			writes := 0
			f.server.Answer(fake.Answers{Evict: f.answer, Record: func(verb string) error {
				if tc.forbidden {
					return apierrors.NewForbidden(schema.GroupResource{Resource: "configmaps"}, recordName.Name, nil)
				}
				if verb != "get" {
					writes++
				}
				return nil
			}})
			f.onlyFinish = true
			x := f.process(f.server)
			f.later(x, time.Minute)
			if got := f.running(); got != tc.running || writes != tc.writes || !x.Ready() {
				t.Errorf("%q run, want %q; %d writes, want %d; ready %t", got, tc.running, writes, tc.writes, x.Ready())
			}
			if failed := f.observer.Counts()["record failed"]; failed > 0 {
				t.Errorf("%d failures are counted", failed)
			}
		})
	}
}

// A record that can't be written is tried again at each step.
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
	f.later(x, time.Minute)
	if writes != 12 {
		t.Errorf("tried %d times in a minute, want 12", writes)
	}
	f.server.Answer(fake.Answers{})
	f.later(x, queue.Retry)
	if got := f.recorded(); got != "null" {
		t.Errorf("still recorded: %s", got)
	}
}

// The answer to the first eviction of a group is lost, and the others are refused at first. Then the API server takes no evictions for ten minutes. If that
// eviction was made, the group is evicted as a whole, else not at all.
func TestExecutorLostAnswer(t *testing.T) {
	for made, want := range map[bool]string{true: "s", false: "g1 g2 g3 s"} {
		f := newExecutions(t)
		x := f.process(f.server)
		evicted := func(pod gpu.Pod) error {
			for _, object := range f.pods {
				if object.Name == pod.Name {
					f.server.Set(fake.Edited(object, fake.Terminating(f.clock.Now().Add(30*time.Second))))
				}
			}
			return nil
		}
		f.server.Answer(fake.Answers{Evict: func(pod gpu.Pod, dryRun bool) error {
			switch {
			case dryRun:
				return nil
			case pod.Name != "g1":
				return budgetRefusal()
			case made:
				_ = evicted(pod)
			}
			return errLost
		}})
		if until, err := f.evict(x); err == nil || until.IsZero() {
			t.Fatal(until, err)
		}
		away := &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
		f.server.Answer(fake.Answers{Evict: func(gpu.Pod, bool) error { return away }})
		f.later(x, 10*time.Minute)
		f.server.Answer(fake.Answers{Evict: func(pod gpu.Pod, _ bool) error { return evicted(pod) }})
		f.later(x, 3*time.Minute)
		if got := f.running(); got != want {
			t.Errorf("made %t: %q run, want %q", made, got, want)
		}
		if len(x.groups) > 0 {
			t.Errorf("made %t: the evictions don't end", made)
		}
	}
}
