package scheduling

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// openings is a gang.Observer that blocks when a barrier opens: it sends a value to the channel and receives one from it.
type openings struct {
	fake.Observer
	opening chan struct{}
}

// BarrierOpened is called with the lock of the gang's manager held.
func (o *openings) BarrierOpened(time.Duration) {
	o.opening <- struct{}{}
	<-o.opening
}

// member returns a pod of the group "job". It asks for 8.
func member(size, i int, edits ...fake.PodEdit) *corev1.Pod {
	return fake.Pod(fmt.Sprint("job-", i), 8, append(edits, func(pod *corev1.Pod) {
		pod.CreationTimestamp = metav1.NewTime(begin.Add(time.Duration(i-3600) * time.Second))
		fake.Annotation(protocol.AnnotationGroupName, "job")(pod)
		fake.Annotation(protocol.AnnotationGroupSize, strconv.Itoa(size))(pod)
	})...)
}

const gangSize = 3

// gangFixture is a Scheduler with a node of two cards of 16, for which gangs are enabled.
type gangFixture struct {
	*fixture
	gangs   *fake.Observer
	standby standby
	// draining is true if another process answers kube-scheduler, though this one still leads.
	draining standby
	// pods are the members of a group, see startGang.
	pods []*corev1.Pod
	// inFlight counts the bind calls that haven't ended. Their results are in ends.
	inFlight atomic.Int32
	ends     chan bindEnd
}

type bindEnd struct {
	name string
	err  error
}

// startGroups starts a replica.
func startGroups(t *testing.T, o GangOptions, objects ...runtime.Object) *gangFixture {
	t.Helper()
	g := newGangFixture(t)
	o.Answering = g.draining.leading
	return g.start(Options{Leading: g.standby.leading, Gangs: o}, objects...)
}

func newGangFixture(t *testing.T) *gangFixture {
	return &gangFixture{fixture: &fixture{t: t}, gangs: &fake.Observer{}, ends: make(chan bindEnd, 100)}
}

// start starts the Scheduler, a sole extender if Options.Leading is nil.
func (g *gangFixture) start(o Options, objects ...runtime.Object) *gangFixture {
	g.t.Helper()
	gangs := &o.Gangs
	gangs.Hold, gangs.Patience, gangs.OnFailure = 10*time.Second, 30*time.Second, cmp.Or(gangs.OnFailure, gang.Evict)
	if gangs.Observer == nil {
		gangs.Observer = g.gangs
	}
	o.BindTimeout = cmp.Or(o.BindTimeout, 10*time.Minute)
	o.BindWindow = time.Second
	g.fixture = start(g.t, o, append(objects, fake.Node("n1", 16, 16))...)
	return g
}

// startGang starts a Scheduler with a gang whose members are all pending and have passed filter: memory is reserved for them.
func startGang(t *testing.T, o GangOptions, others ...runtime.Object) *gangFixture {
	t.Helper()
	pods, objects := members()
	g := startGroups(t, o, append(objects, others...)...)
	g.pods = pods
	g.offer()
	return g
}

// members returns the members of a gang, all pending.
func members() (pods []*corev1.Pod, objects []runtime.Object) {
	for i := range gangSize {
		pods = append(pods, member(gangSize, i))
		objects = append(objects, pods[i])
	}
	return pods, objects
}

// offer makes a filter call for each member, once the gang is pending. All of them pass.
func (g *gangFixture) offer() {
	g.t.Helper()
	g.awaitState(gang.PhasePending)
	for _, pod := range g.pods {
		if result := g.filter(pod, "n1"); !slices.Equal(result.Names(), []string{"n1"}) {
			g.t.Fatalf("%s may go to %v: %s", pod.Name, result.Names(), result.Message)
		}
	}
}

func (g *gangFixture) awaitState(phase gang.Phase) {
	g.t.Helper()
	g.pass("the gang to be "+phase.String(), func() bool { return g.GangStates()[phase.String()] == 1 })
}

// startBinds starts the bind calls of some members. Their results are sent to g.ends.
func (g *gangFixture) startBinds(ctx context.Context, members ...int) {
	for _, i := range members {
		pod := g.pods[i]
		g.inFlight.Add(1)
		go func() {
			err := g.Bind(ctx, request(pod, "n1"))
			g.inFlight.Add(-1)
			g.ends <- bindEnd{pod.Name, err}
		}()
	}
}

// wantEnds lets time pass until n bind calls have ended, and compares their errors.
func (g *gangFixture) wantEnds(n int, want error) {
	g.t.Helper()
	g.pass("the binds to end", func() bool { return len(g.ends) == n })
	for range n {
		if end := <-g.ends; !errors.Is(end.err, want) {
			g.t.Errorf("%s: %v, want %v", end.name, end.err, want)
		}
	}
}

// awaitHeld waits until n binds are held: their calls have not ended, and nothing but time goes on.
func (g *gangFixture) awaitHeld(n int) {
	g.t.Helper()
	g.await(fmt.Sprintf("%d held binds", n), func() bool { return int(g.inFlight.Load()) == n })
}

// marked returns the number of members with the annotation that the gang is whole.
func (g *gangFixture) marked() (n int) {
	for _, pod := range g.server.Pods() {
		if pod.Annotations[protocol.AnnotationGroupWhole] == "true" {
			n++
		}
	}
	return n
}

func TestGangIsBoundTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := startGang(t, GangOptions{})
		g.clock.Step(time.Second) // The binds of single pods would now wait for each other, until the clock moves.
		g.startBinds(t.Context(), 0, 1)
		g.awaitHeld(2)
		if n := g.server.Calls().Binds; n != 0 {
			t.Fatalf("%d were bound before all binds had arrived", n)
		}
		g.startBinds(t.Context(), 2)
		g.wantEnds(gangSize, nil)
		if n := g.marked(); n != 1 {
			t.Errorf("%d members mark the gang as whole, want one", n)
		}
		for _, pod := range g.pods {
			if run := g.server.Get(pod).Annotations[protocol.AnnotationGroupRun]; run != "uid-job-0" {
				t.Errorf("%s is of run %q", pod.Name, run)
			}
		}
		if g.gangs.Count("gang bound") != 1 || g.gangs.Count("barriers opened") != 1 {
			t.Errorf("counted: %v", g.gangs.Counts())
		}
		for _, pod := range g.pods {
			g.publish(pod)
		}
		g.awaitState(gang.PhaseRunning)
	})
}

// The bind of one member doesn't arrive in time, or is given up. The reservations last, and a second attempt succeeds.
func TestGangHeldBindsEnd(t *testing.T) {
	for name, test := range map[string]struct {
		giveUp bool
		want   error
	}{
		"a bind doesn't arrive":        {false, reasons.GroupTimedOut},
		"kube-scheduler gives them up": {true, context.Canceled},
	} {
		t.Run(name, bubble(func(t *testing.T) {
			g := startGang(t, GangOptions{})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			g.startBinds(ctx, 0, 1)
			g.awaitHeld(2)
			if test.giveUp {
				cancel()
			}
			g.wantEnds(2, test.want)
			g.awaitHeld(0)
			g.want(g.pods[0], "assumed n1 card 0")
			if n := g.observer.Count("bind held_back"); n != 2 {
				t.Errorf("%d binds counted as held back", n)
			}
			g.startBinds(t.Context(), 0, 1, 2)
			g.wantEnds(gangSize, nil)
		}))
	}
}

// The held binds are rejected, and nothing stays reserved.
func TestGangIsGivenUp(t *testing.T) {
	for name, test := range map[string]struct {
		change func(g *gangFixture)
		want   error
	}{
		"a member is deleted":     {func(g *gangFixture) { g.server.Remove(g.pods[2]); g.publishGone(g.pods[2]) }, reasons.GroupDeleted},
		"another replica answers": {func(g *gangFixture) { g.draining.Store(true) }, reasons.GroupStopping},
		"another replica leads":   {func(g *gangFixture) { g.standby.Store(true) }, reasons.GroupStopping},
	} {
		t.Run(name, bubble(func(t *testing.T) {
			g := startGang(t, GangOptions{})
			g.startBinds(t.Context(), 0, 1)
			g.awaitHeld(2)
			test.change(g)
			g.wantEnds(2, test.want)
			for _, pod := range g.pods {
				g.wantSettled(pod, "none")
			}
			if n := g.server.Calls().Binds; n != 0 {
				t.Errorf("%d binds", n)
			}
		}))
	}
}

// A member that the watch has not reported yet is not bound alone.
func TestUnknownMember(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := startGang(t, GangOptions{})
		unknown := member(gangSize, 7)
		g.server.Set(unknown)
		if result := g.filter(unknown, "n1"); len(result.Passed) > 0 || result.Message != reasons.GroupUnknown.Text() {
			t.Errorf("filter: %+v", result)
		}
		if err := g.bind(unknown); !errors.Is(err, reasons.GroupUnknown) {
			t.Errorf("bind: %v", err)
		}
		g.publish(unknown)
		g.pass("a requeue", func() bool { return len(g.requeued()) > 0 })
	})
}

// The lease lapses between two ticks and is renewed: what is to be done meanwhile is kept.
func TestEffectsWaitForTheLease(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	l := ledger.New()
	manager := gang.New(gang.Options{
		Ledger: l, Observer: &fake.Observer{}, Failures: &queue.Failures{}, AwaitsTurn: func(gpu.Pod) bool { return false },
	})
	manager.StartLeading(now)
	for _, uid := range []gpu.PodUID{"a", "b"} {
		manager.SetMember(gang.Member{Pod: gpu.Pod{UID: uid, Request: 8}, Gang: gang.Key{Name: "job"}, Size: 2}, now)
		manager.Filter(uid, []string{"n1"}, []string{"n1"}, now)
	}
	g := &groups{manager: manager, leading: func() error { return errors.New("the lease has lapsed") }}
	g.act()
	if !manager.TakeEffects().Requeue {
		t.Error("the requeue is lost")
	}
}

// short makes a pod one that kube-scheduler has rejected because the node is full.
func short(pod *corev1.Pod) {
	pod.Status.Conditions = []corev1.PodCondition{{
		Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable,
		Message: "0/1 nodes are available: 1 Insufficient aliyun.com/gpu-mem.",
	}}
}

// No pod is evicted for a member of a gang that may never become whole.
func TestPreemptForMember(t *testing.T) {
	for name, resource := range map[string]corev1.ResourceName{"GPU memory": protocol.ResourceMemory, "whole cards": protocol.ResourceWholeCard} {
		t.Run(name, bubble(func(t *testing.T) {
			pending := member(2, 0, fake.Priority(5))
			pending.Spec.Containers[0].Resources.Limits = fake.Amount(resource, 8)
			g := startGroups(t, GangOptions{}, fake.Pod("a", 16, fake.Bound("n1", 0)), pending)
			g.awaitState(gang.PhaseIncomplete)
			unknown := pending.DeepCopy() // The watch has not reported it.
			unknown.Name, unknown.UID = "job-1", "uid-job-1"
			for _, pod := range []*corev1.Pod{pending, unknown} {
				got, err := g.Preempt(t.Context(), pod, map[string]preemption.Victims{"n1": {Pods: []gpu.PodUID{"uid-a"}}})
				if err != nil || len(got) > 0 {
					t.Errorf("%s: victims %v, %v", pod.Name, got, err)
				}
			}
		}))
	}
}

// Pods without a group don't wait for the gang manager's lock.
func TestSinglePodsDoNotWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		single := fake.Pod("single", 8)
		observer := &openings{opening: make(chan struct{})}
		g := startGang(t, GangOptions{Observer: observer})
		g.server.Set(single)
		g.publish(single)
		g.startBinds(t.Context(), 0, 1, 2)
		<-observer.opening
		if result := g.filter(single, "n1"); result.Reasons == nil || len(result.Passed) != 1 {
			t.Errorf("filter: %+v", result)
		}
		check.NoError(t, g.bind(single))
		if got, err := g.Preempt(t.Context(), fake.Pod("other", 16), nil); err != nil || len(got) > 0 {
			t.Errorf("%v, %v", got, err)
		}
		observer.opening <- struct{}{}
		g.wantEnds(gangSize, nil)
	})
}

// Without gangs, members are placed and bound like any other pod.
func TestGangsOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pod := member(2, 0)
		f := start(t, Options{}, fake.Node("n1", 16), pod)
		if got := f.filter(pod, "n1").Names(); len(got) != 1 {
			t.Errorf("it may go to %v", got)
		}
		_, unknown := f.Groups()
		if err := f.bind(pod); err != nil || f.GangStates() != nil || unknown == nil {
			t.Errorf("%v, %v, %v", err, f.GangStates(), unknown)
		}
	})
}
