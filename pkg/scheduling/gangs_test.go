package scheduling

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// gangCounts is a gang.Observer that counts the calls.
type gangCounts struct {
	mu sync.Mutex
	n  map[string]int
	// opening, if not nil, receives a value when a barrier opens; the Manager, with its lock held, then waits for one
	// from it.
	opening chan struct{}
}

func (c *gangCounts) count(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n[what]++
}

func (c *gangCounts) of(what string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n[what]
}

func (c *gangCounts) GangHeld(time.Duration) {
	c.count("held")
	if c.opening != nil {
		c.opening <- struct{}{}
		<-c.opening
	}
}
func (c *gangCounts) GangBound()               { c.count("bound") }
func (c *gangCounts) GangFailed(reason string) { c.count(reason) }
func (c *gangCounts) GangStarving()            { c.count("claimed") }
func (c *gangCounts) GangEvicted()             { c.count("evicted") }

// member returns a pod of a group. The pod asks for 8.
func member(group string, size, i int) *corev1.Pod {
	pod := newPod(fmt.Sprintf("%s-%d", group, i), 8)
	pod.CreationTimestamp = metav1.NewTime(time.Date(2026, 7, 1, 11, 0, i, 0, time.UTC))
	pod.Annotations = map[string]string{
		protocol.AnnotationGroupName: group, protocol.AnnotationGroupSize: strconv.Itoa(size),
	}
	return pod
}

// gangFixture is a Cluster with gangs enabled, a node of two cards of 16, and a group of three pods that ask for 8
// each.
type gangFixture struct {
	*fixture
	seen  *gangCounts
	leads leadership
	pods  []*corev1.Pod
	ends  chan bindEnd
}

type bindEnd struct {
	name string
	err  error
}

const gangSize = 3

func startGang(t *testing.T, onFailure gang.FailurePolicy) *gangFixture {
	t.Helper()
	g := &gangFixture{seen: &gangCounts{n: map[string]int{}}, ends: make(chan bindEnd, 100)}
	g.fixture = startWith(t, Options{BindTimeout: time.Minute, NodePolicy: placement.Binpack, Leading: g.leads.ask, Gangs: GangOptions{
		Hold: 10 * time.Second, Patience: 30 * time.Second, OnFailure: onFailure, Observer: g.seen,
	}}, func(*Cluster) {}, newNode(t, "n1", 16, 16))
	for i := range gangSize {
		pod := member("job", gangSize, i)
		g.pods = append(g.pods, pod)
		g.server.set(pod)
		g.publish(pod)
	}
	g.await("the group to be known", func() bool { return g.GangStates()[gang.StatePending] == 1 })
	return g
}

// offered makes a filter call for each member.
func (g *gangFixture) offered() {
	g.t.Helper()
	for _, pod := range g.pods {
		answer, decided := g.FilterGang(pod, []string{"n1"})
		if !decided || len(answer.Nodes) != 1 {
			g.t.Fatalf("%s may go to %v: %s", pod.Name, answer.Nodes, answer.Reason.Text)
		}
	}
}

// come starts the bind calls of some members. Their results are sent to g.ends.
func (g *gangFixture) come(ctx context.Context, members ...int) {
	for _, i := range members {
		pod := g.pods[i]
		go func() { g.ends <- bindEnd{pod.Name, g.Bind(ctx, g.request(pod, "n1"))} }()
	}
}

// end returns the result of the next bind call that ends.
func (g *gangFixture) end() bindEnd {
	g.t.Helper()
	select {
	case e := <-g.ends:
		return e
	case <-time.After(30 * time.Second):
		g.t.Fatal("no bind ends")
		return bindEnd{}
	}
}

// heldBinds waits until n binds are held.
func (g *gangFixture) heldBinds(n int) {
	g.t.Helper()
	g.await(fmt.Sprintf("%d held binds", n), func() bool { return g.gangs.book.HeldBinds() == n })
}

// pass advances the clock in steps of gangInterval until the condition is true.
func (g *gangFixture) pass(what string, condition func() bool) {
	g.t.Helper()
	g.await(what, func() bool {
		g.clock.Step(gangInterval)
		return condition()
	})
}

func (g *gangFixture) proofs() (names []string) {
	for _, pod := range g.pods {
		if now := g.server.get(pod); now != nil && now.Annotations[protocol.AnnotationGroupWhole] == "true" {
			names = append(names, pod.Name)
		}
	}
	return names
}

func TestAGroupIsBoundTogether(t *testing.T) {
	g := startGang(t, gang.Evict)
	g.offered()
	g.come(t.Context(), 0, 1)
	g.heldBinds(2)
	if n := g.server.bindsSoFar(); n != 0 {
		t.Fatalf("%d were bound before all had come", n)
	}
	g.come(t.Context(), 2)
	for range gangSize {
		if e := g.end(); e.err != nil {
			t.Errorf("%s: %v", e.name, e.err)
		}
	}
	if got := g.proofs(); len(got) != 1 {
		t.Errorf("the proof is on %v, want it on one", got)
	}
	if g.seen.of("bound") != 1 || g.seen.of("held") != 1 {
		t.Errorf("counted: %v", g.seen.n)
	}
	for _, pod := range g.pods {
		g.publish(pod)
	}
	g.await("the group to be whole", func() bool { return g.GangStates()[gang.StateWhole] == 1 })
}

func TestAMemberThatDoesNotComeSendsAllBack(t *testing.T) {
	g := startGang(t, gang.Evict)
	g.offered()
	g.come(t.Context(), 0, 1)
	g.heldBinds(2)
	g.pass("the hold to end", func() bool { return len(g.ends) == 2 })
	for range 2 {
		if e := g.end(); !errors.Is(e.err, gang.TimedOut) {
			t.Errorf("%s: %v", e.name, e.err)
		}
	}
	g.wantHeld(g.pods[0], "assumed n1 card 0") // The members return.
	g.come(t.Context(), 0, 1, 2)
	for range gangSize {
		if e := g.end(); e.err != nil {
			t.Errorf("%s: %v", e.name, e.err)
		}
	}
}

func TestPlacesAreGivenBackWhenNobodyComes(t *testing.T) {
	g := startGang(t, gang.Evict)
	g.offered()
	g.wantHeld(g.pods[2], "assumed n1 card 1")
	g.pass("the places to be free", func() bool { return g.held(g.pods[0]) == "not held" })
	g.wantHeld(g.pods[2], "not held")
	if g.seen.of(gang.Expired.Label) != 1 {
		t.Errorf("counted: %v", g.seen.n)
	}
	g.pass("the group to be called again", func() bool { return len(g.server.wakes()) > 0 })
}

func TestACallThatIsGivenUpIsNoticed(t *testing.T) {
	g := startGang(t, gang.Evict)
	g.offered()
	ctx, cancel := context.WithCancel(t.Context())
	g.come(ctx, 0)
	g.heldBinds(1)
	cancel()
	if e := g.end(); e.err == nil || !errors.Is(e.err, context.Canceled) {
		t.Errorf("it ended with %v", e.err)
	}
	g.heldBinds(0)
	g.come(t.Context(), 0, 1, 2)
	for range gangSize {
		if e := g.end(); e.err != nil {
			t.Errorf("%s: %v", e.name, e.err)
		}
	}
}

func TestADeletedMemberSendsAllBack(t *testing.T) {
	g := startGang(t, gang.Evict)
	g.offered()
	g.come(t.Context(), 0, 1)
	g.heldBinds(2)
	g.server.remove(g.pods[2])
	g.publishGone(g.pods[2])
	g.pass("the binds to be sent back", func() bool { return len(g.ends) == 2 })
	for range 2 {
		if e := g.end(); !errors.Is(e.err, gang.Deleted) {
			t.Errorf("%s: %v", e.name, e.err)
		}
	}
	for _, pod := range g.pods {
		g.wantHeld(pod, "not held")
	}
}

func TestWhoDoesNotLeadHoldsNothing(t *testing.T) {
	g := startGang(t, gang.Evict)
	g.offered()
	g.come(t.Context(), 0, 1)
	g.heldBinds(2)
	g.leads.set(errors.New("another leads"))
	g.pass("the binds to be sent back", func() bool { return len(g.ends) == 2 })
	for range 2 {
		if e := g.end(); !errors.Is(e.err, gang.Stopping) {
			t.Errorf("%s: %v", e.name, e.err)
		}
	}
	g.wantHeld(g.pods[2], "not held")
	if n := g.server.bindsSoFar(); n != 0 {
		t.Errorf("%d binds by who doesn't lead", n)
	}
}

// refusing makes the server reject the binding of one pod for good.
func (g *gangFixture) refusing(name string) {
	g.server.with(func(s *server) {
		s.onBind = func(ctx context.Context, binding *corev1.Binding) error {
			if binding.Name == name {
				return errRefused
			}
			return s.commit(ctx, binding)
		}
	})
}

func TestAGroupThatIsBoundInPartIsGivenUp(t *testing.T) {
	for _, policy := range []gang.FailurePolicy{gang.Evict, gang.Keep} {
		t.Run(string(policy), func(t *testing.T) {
			g := startGang(t, policy)
			g.offered()
			g.refusing("job-1")
			g.come(t.Context(), 0, 1, 2)
			results := map[string]error{}
			for range gangSize {
				e := g.end()
				results[e.name] = e.err
			}
			// The last one by UID, job-2, waits for the others and isn't bound if one of them isn't.
			if results["job-0"] != nil || results["job-1"] == nil || !errors.Is(results["job-2"], gang.NotBound) {
				t.Errorf("the binds ended with %v", results)
			}
			if got := g.proofs(); got != nil {
				t.Errorf("%v prove that the group was whole", got)
			}
			g.wantHeld(g.pods[1], "not held")
			g.wantHeld(g.pods[2], "not held")
			g.publish(g.pods[0])
			switch policy {
			case gang.Evict:
				g.pass("the eviction", func() bool { return g.seen.of("evicted") > 0 })
				g.server.with(func(s *server) {
					if s.evicted[0] != "job-0" {
						t.Errorf("evicted: %v", s.evicted)
					}
				})
			case gang.Keep:
				g.pass("the group to be left as it is", func() bool { return g.GangStates()[gang.StateWhole] == 1 })
				g.server.with(func(s *server) {
					if len(s.evicted) > 0 {
						t.Errorf("evicted: %v", s.evicted)
					}
				})
			}
		})
	}
}

func TestABindThatFailsForAMomentIsTriedAgain(t *testing.T) {
	g := startGang(t, gang.Evict)
	g.offered()
	var mu sync.Mutex
	failures := 2
	g.server.with(func(s *server) {
		s.onBind = func(ctx context.Context, binding *corev1.Binding) error {
			mu.Lock()
			fail := binding.Name == "job-0" && failures > 0
			if fail {
				failures--
			}
			mu.Unlock()
			if fail {
				return errLost
			}
			return s.commit(ctx, binding)
		}
	})
	g.come(t.Context(), 0, 1, 2)
	g.pass("all to be bound", func() bool { return len(g.ends) == gangSize })
	for range gangSize {
		if e := g.end(); e.err != nil {
			t.Errorf("%s: %v", e.name, e.err)
		}
	}
}

// An extender that starts now learns only from the pods how the gang came to have one bound member of two.
func TestAnExtenderThatStartsLaterKnowsWholeGroups(t *testing.T) {
	created := member("job", 2, 1).CreationTimestamp.Time
	for name, tc := range map[string]struct {
		proof bool
		// bound is when the running member was bound, or zero if that is unknown.
		bound time.Time
		want  string
	}{
		"it proves that all were bound":                          {proof: true, want: gang.StateWhole},
		"the bind time is unknown":                               {want: gang.StatePartial},
		"the one that waits was there when it was bound":         {bound: created.Add(time.Minute), want: gang.StatePartial},
		"in the same second":                                     {bound: created, want: gang.StatePartial},
		"the one that waits was made later: it replaces another": {bound: created.Add(-time.Second), want: gang.StateWhole},
	} {
		t.Run(name, func(t *testing.T) {
			proof, want := tc.want == gang.StateWhole, tc.want
			running := member("job", 2, 0)
			running.Spec.NodeName, running.Status.Phase = "n1", corev1.PodRunning
			running.Annotations[protocol.AnnotationIndex] = "0"
			if tc.proof {
				running.Annotations[protocol.AnnotationGroupWhole] = "true"
			}
			if !tc.bound.IsZero() {
				running.Status.Conditions = []corev1.PodCondition{{
					Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(tc.bound),
				}}
			}
			f := startWith(t, Options{BindTimeout: time.Minute, NodePolicy: placement.Binpack, Gangs: GangOptions{
				Hold: 10 * time.Second, Patience: 30 * time.Second, OnFailure: gang.Evict, Observer: &gangCounts{n: map[string]int{}},
			}}, func(*Cluster) {}, newNode(t, "n1", 16, 16), running, member("job", 2, 1))
			f.await("the group to be "+want, func() bool {
				f.clock.Step(gangInterval)
				return f.GangStates()[want] == 1
			})
			answer, decided := f.FilterGang(member("job", 2, 1), []string{"n1"})
			if decided == proof {
				t.Errorf("the member that waits is answered %+v", answer)
			}
		})
	}
}

func TestAPodThatTheWatchHasNotToldOfIsNotBoundAlone(t *testing.T) {
	g := startGang(t, gang.Evict)
	stranger := member("job", gangSize, 7)
	g.server.set(stranger)
	if answer, decided := g.FilterGang(stranger, []string{"n1"}); !decided || answer.Reason != gang.Unknown {
		t.Errorf("filter: %+v", answer)
	}
	if err := g.Bind(t.Context(), g.request(stranger, "n1")); !errors.Is(err, gang.Unknown) {
		t.Errorf("bind: %v", err)
	}
	g.publish(stranger)
	g.pass("it to be called", func() bool { return len(g.server.wakes()) > 0 })
}

func TestOnlyWhoCanBeCountedDecidesWhoIsEvicted(t *testing.T) {
	running, odd := member("job", 2, 0), member("job", 3, 1)
	running.Spec.NodeName, running.Status.Phase = "n1", corev1.PodRunning
	running.Annotations[protocol.AnnotationIndex] = "0"
	seen := &gangCounts{n: map[string]int{}}
	f := startWith(t, Options{BindTimeout: time.Minute, NodePolicy: placement.Binpack, Gangs: GangOptions{
		Hold: 10 * time.Second, Patience: 30 * time.Second, OnFailure: gang.Evict, Observer: seen,
	}}, func(*Cluster) {}, newNode(t, "n1", 16, 16), running, odd)
	f.await("the group to be known", func() bool { return f.GangStates()[gang.StateIncomplete] == 1 })
	for range 1000 {
		f.clock.Step(gangInterval)
	}
	mended := odd.DeepCopy()
	mended.Annotations[protocol.AnnotationGroupSize] = "2"
	f.server.set(mended)
	f.publish(mended)
	f.await("the group to be bound in part", func() bool {
		f.clock.Step(gangInterval)
		return f.GangStates()[gang.StatePartial] == 1
	})
	if n := seen.of("evicted"); n > 0 {
		t.Errorf("%d were evicted while the group's size was unknown", n)
	}
	f.await("the eviction", func() bool {
		f.clock.Step(gangInterval)
		return seen.of("evicted") > 0
	})
}

func TestAClaimReachesNodesThatAreFull(t *testing.T) {
	seen := &gangCounts{n: map[string]int{}}
	f := startWith(t, Options{BindTimeout: time.Minute, NodePolicy: placement.Binpack, Gangs: GangOptions{
		Hold: 10 * time.Second, Patience: 30 * time.Second, ClaimAfter: 20 * time.Second, OnFailure: gang.Evict, Observer: seen,
	}}, func(*Cluster) {}, newNode(t, "n1", 16, 16), boundPod("a", 16, "n1", 0), boundPod("b", 16, "n1", 1),
		member("job", 2, 0), member("job", 2, 1))
	// No filter call arrives for any member: kube-scheduler sees that the node is full.
	f.await("a claim", func() bool {
		f.clock.Step(gangInterval)
		return seen.of("claimed") > 0
	})
	f.publishGone(boundPod("a", 16, "n1", 0))
	f.await("room for the group alone", func() bool {
		return f.fits(protocol.Pod(member("job", 2, 0)), "n1")
	})
	if f.fits(protocol.Pod(newPod("lonely", 8)), "n1") {
		t.Error("a pod that is no member finds room that was claimed")
	}
}

// A plan's reservations can't be preempted. A rejected pod of higher priority is requeued when the gang becomes whole.
func TestWhoGoesBeforeAGroupIsCalledWhenItIsBound(t *testing.T) {
	for priority, want := range map[int32]bool{0: false, 5: true} {
		t.Run(fmt.Sprint(priority), func(t *testing.T) {
			g := startGang(t, gang.Evict)
			g.offered()
			g.Refused(gpu.Pod{UID: "uid-other", Namespace: "default", Name: "other", Request: 16, Priority: priority}, g.Clock.Now())
			before := len(g.server.wakes())
			g.come(t.Context(), 0, 1, 2)
			for range gangSize {
				if e := g.end(); e.err != nil {
					t.Errorf("%s: %v", e.name, e.err)
				}
			}
			if want {
				g.pass("the queue to be woken", func() bool { return len(g.server.wakes()) > before })
			} else if _, called := g.waker.takeCall(); called {
				t.Error("a requeue without a rejected pod")
			}
		})
	}
}

func TestNobodyLeavesForAMemberThatWaits(t *testing.T) {
	for name, whole := range map[string]bool{"of GPU memory": false, "of whole cards": true} {
		t.Run(name, func(t *testing.T) {
			waits := member("job", 2, 0)
			if whole {
				waits.Spec.Containers[0].Resources.Limits = amount(protocol.ResourceWholeCard, 1)
			}
			waits.Spec.Priority = ptr.To[int32](5)
			f := startWith(t, Options{BindTimeout: time.Minute, NodePolicy: placement.Binpack, Gangs: GangOptions{
				Hold: 10 * time.Second, Patience: 30 * time.Second, OnFailure: gang.Evict, Observer: &gangCounts{n: map[string]int{}},
			}}, func(*Cluster) {}, newNode(t, "n1", 16), boundPod("a", 16, "n1", 0), waits)
			f.await("the member to be known", func() bool { return f.GangStates()[gang.StateIncomplete] == 1 })
			proposed := map[string]preemption.Victims{"n1": {Pods: []gpu.PodUID{"uid-a"}}}
			if got, err := f.Preempt(t.Context(), waits, proposed); err != nil || len(got) > 0 {
				t.Errorf("it would have %v leave, %v", got, err)
			}
		})
	}
}

func TestAMemberWhoseMarksCannotBeReadIsTold(t *testing.T) {
	g := startGang(t, gang.Evict)
	bad := member("job", gangSize, 7)
	bad.Annotations[protocol.AnnotationGroupSize] = "many"
	g.server.set(bad)
	g.publish(bad)
	g.await("it to be known", func() bool { _, known := g.gangs.book.GangOf("uid-job-7"); return known })
	for range 2 {
		answer, decided := g.FilterGang(bad, []string{"n1"})
		if !decided || len(answer.Nodes) > 0 || answer.Reason.Text != "gang: the group's size is not a positive integer" {
			t.Errorf("it may go to %v: %s", answer.Nodes, answer.Reason.Text)
		}
	}
	g.wantEvent("Warning GangInvalid The pod can't be counted as a member: the group's size is not a positive integer")
	g.offered() // The other members are not affected.
}

func TestPodsWithoutAGroupDoNotEvenWaitForTheLock(t *testing.T) {
	g := startGang(t, gang.Evict)
	g.offered()
	g.seen.opening = make(chan struct{})
	g.come(t.Context(), 0, 1, 2)
	<-g.seen.opening
	lonely := newPod("lonely", 8)
	g.server.set(lonely)
	g.publish(lonely)
	if _, decided := g.FilterGang(lonely, []string{"n1"}); decided {
		t.Error("it is decided about")
	}
	if err := g.bind(lonely); err != nil {
		t.Error(err)
	}
	if got, err := g.Preempt(t.Context(), newPod("other", 16), nil); err != nil || len(got) > 0 {
		t.Errorf("%v, %v", got, err)
	}
	g.seen.opening <- struct{}{}
	for range gangSize {
		if e := g.end(); e.err != nil {
			t.Errorf("%s: %v", e.name, e.err)
		}
	}
}

func TestPodsWithoutAGroupAreLeftAlone(t *testing.T) {
	g := startGang(t, gang.Evict)
	if _, decided := g.FilterGang(newPod("lonely", 8), []string{"n1"}); decided {
		t.Error("a pod without a group is decided about")
	}
	f := start(t, time.Minute, newNode(t, "n1", 16))
	if _, decided := f.FilterGang(member("job", 2, 0), []string{"n1"}); decided {
		t.Error("groups are switched off, and decided about")
	}
}
