package scheduling

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/apiserver/fake"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// What the plan reserved is checked again before any member is bound. A group that lost a place isn't bound at all.
func TestPlanLosesPlaces(t *testing.T) {
	theirs := fake.Pod("theirs", 16)
	for name, test := range map[string]struct {
		// lose happens while two members are held.
		lose func(g *gangFixture)
		// newTerm is true if a term begins before any member is held.
		newTerm bool
		want    []string
	}{
		"a former leader has bound a pod to the card": {
			newTerm: true, lose: func(*gangFixture) {},
		},
		"another component binds a pod to the card": {
			lose: func(g *gangFixture) {
				g.publishObject(fake.Edited(theirs, fake.Bound("n1", 0)))
				g.awaitAllocation(theirs, "bound n1 card 0")
			},
		},
		"the card shrinks, and another one has room": {
			lose: func(g *gangFixture) {
				g.publishNode(fake.Node("n1", 8, 16))
			},
			want: []string{"job-0", "job-1", "job-2"},
		},
		"the card shrinks": {
			lose: func(g *gangFixture) { g.publishNode(fake.Node("n1", 8, 8)) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := startGang(t, GangOptions{}, theirs)
			arrived := []int{0, 1}
			if test.newTerm {
				if err := g.TakeOver(t.Context()); err != nil {
					t.Fatal(err)
				}
				g.server.Set(fake.Edited(theirs, fake.Bound("n1", 0))) // The watch hasn't reported it.
			} else {
				g.startBinds(t.Context(), arrived...)
				g.awaitHeld(2)
				arrived = nil
			}
			test.lose(g)
			g.startBinds(t.Context(), append(arrived, 2)...)
			errs := g.awaitEnds(gangSize)
			g.wantNoCardOver()
			if diff := cmp.Diff(test.want, g.boundMembers()); diff != "" {
				t.Errorf("bound members (-want +got):\n%s\nerrors: %v", diff, errs)
			}
		})
	}
}

// publishNode makes the watch report the node, and waits until the ledger has its cards.
func (g *gangFixture) publishNode(node *corev1.Node) {
	g.t.Helper()
	if _, err := g.client.CoreV1().Nodes().Update(g.t.Context(), node, metav1.UpdateOptions{}); err != nil {
		g.t.Fatal(err)
	}
	want := protocol.ParseNode(node).Cards
	g.await("the node's cards", func() bool {
		got, _ := g.ledger.Node(node.Name)
		return cmp.Equal(want, got.Cards)
	})
}

// neverEvicted lets more than the patience pass and checks that no member is evicted.
func (g *gangFixture) neverEvicted() {
	g.t.Helper()
	for range 600 {
		g.clock.Step(tick)
		time.Sleep(time.Millisecond) // The loops run on goroutines of their own.
	}
	if evicted := g.server.Calls().Evicted; len(evicted) > 0 {
		g.t.Errorf("evicted: %v", evicted)
	}
}

// The former leader has bound the whole group. The watch has reported two binds, and then nothing for longer than the patience.
func TestWholeGangOnStaleWatch(t *testing.T) {
	pods, objects := members()
	g := startGroups(t, GangOptions{}, objects...)
	g.pods = pods
	if err := g.TakeOver(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, card := range []int{0, 0, 1} {
		g.server.Set(fake.Edited(pods[i], inRun, fake.Bound("n1", card), fake.Phase(corev1.PodRunning)))
	}
	g.publish(pods[0])
	g.publish(pods[1])
	g.awaitState(gang.PhaseRunning)
	g.neverEvicted()
	g.want(pods[2], "bound n1 card 1")
}

// failAt makes the API server fail at the bind of the i-th member, once it has bound the members before: it answers nothing any
// more. made is true if it has made that last write.
func (g *gangFixture) failAt(i int, made bool) {
	var before sync.WaitGroup
	before.Add(i)
	g.server.Answer(fake.Answers{Bind: func(_ context.Context, b *corev1.Binding) error {
		if b.Name < g.pods[i].Name {
			defer before.Done()
			return g.server.Commit(b)
		}
		before.Wait()
		if made {
			_ = g.server.Commit(b)
		}
		g.server.Answer(fake.Answers{
			Read: errLost, Bind: func(context.Context, *corev1.Binding) error { return errLost },
			Evict: func(gpu.Pod, bool) error { return errLost },
		})
		return errLost
	}})
}

// The API server fails just when it has bound the last member: the answer is lost and the watch stops. Later a live read finds
// the pod bound.
func TestWholeGangAfterLostAnswer(t *testing.T) {
	g := startSoleGang(t)
	g.failAt(2, true)
	g.bindAll(0, 1, 2)
	g.want(g.pods[2], "assumed n1 card 1")
	g.server.Answer(fake.Answers{})
	g.publish(g.pods[0])
	g.publish(g.pods[1])
	g.pass("a live read", func() bool { return g.allocation("uid-job-2") == "bound n1 card 1" })
	g.awaitState(gang.PhaseRunning)
	g.neverEvicted()
}

// The API server of a sole extender fails for two minutes in the middle of a group's binds: the first member is bound, the answer
// to the second is lost. Then the group is completed.
func TestOutageDuringBinds(t *testing.T) {
	for name, made := range map[string]bool{"the second write was made": true, "the second write was not made": false} {
		t.Run(name, func(t *testing.T) {
			g := startSoleGang(t)
			g.failAt(1, made)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			g.startBinds(ctx, 0, 1, 2)
			for range 1200 {
				g.clock.Step(tick)
				time.Sleep(time.Millisecond)
			}
			cancel() // kube-scheduler gives the calls up.
			if evicted := g.server.Calls().Evicted; len(evicted) > 0 {
				t.Errorf("evicted during the outage: %v", evicted)
			}
			g.awaitEnds(gangSize)
			g.server.Answer(fake.Answers{})
			g.wantCompleted()
		})
	}
}

// The answer to a bind is lost and the API server fails for longer than a bind may take. When a live read finds that pod bound, the
// last member, whose call is still held, has time left to be bound.
func TestLastMemberAfterLostAnswer(t *testing.T) {
	g := startSoleGang(t)
	g.failAt(1, true)
	g.startBinds(t.Context(), 0, 1, 2)
	g.awaitEnds(2)
	g.awaitHeld(1)
	g.server.Answer(fake.Answers{})
	g.wantEnds(1, nil)
	g.awaitState(gang.PhaseRunning)
	if n := g.marked(); n != 1 {
		t.Errorf("%d members mark the gang as whole, want one", n)
	}
}

// startSoleGang is startGang for an extender without replicas. Its binds end soon.
func startSoleGang(t *testing.T) *gangFixture {
	pods, objects := members()
	g := newGangFixture(t).start(Options{BindTimeout: 2 * time.Second}, objects...)
	g.pods = pods
	g.offer()
	return g
}

// wantCompleted retries the members that aren't bound, as kube-scheduler does, until all are bound. No member is evicted.
func (g *gangFixture) wantCompleted() {
	g.t.Helper()
	g.pass("the group to be bound", func() bool {
		var passed []int
		for i, pod := range g.pods {
			if g.server.Get(pod).Spec.NodeName == "" && len(g.filter(pod, "n1").Passed) > 0 {
				passed = append(passed, i)
			}
		}
		g.bindAll(passed...)
		return len(g.boundMembers()) == gangSize
	})
	g.awaitState(gang.PhaseRunning)
	if evicted := g.server.Calls().Evicted; len(evicted) > 0 {
		g.t.Errorf("evicted: %v", evicted)
	}
}

// Reserved places give way to a pod of higher priority.
func TestPlanGivesWay(t *testing.T) {
	type scene struct {
		priority int32
		// gone is true if the plan gives way, bound if the pod is then bound.
		gone, bound bool
		call        func(g *gangFixture, pod *corev1.Pod)
	}
	filter := func(want ...string) func(*gangFixture, *corev1.Pod) {
		return func(g *gangFixture, pod *corev1.Pod) {
			g.t.Helper()
			if got := g.filter(pod, "n1").Names(); !slices.Equal(got, want) {
				g.t.Errorf("the pod may go to %v, want %v", got, want)
			}
		}
	}
	filterAndBind := func(g *gangFixture, pod *corev1.Pod) {
		g.t.Helper()
		filter("n1")(g, pod)
		g.server.Set(pod)
		if err := g.bind(pod); err != nil {
			g.t.Errorf("bind: %v", err)
		}
	}
	preempt := func(proposal gpu.PodUID, want ...gpu.PodUID) func(*gangFixture, *corev1.Pod) {
		return func(g *gangFixture, pod *corev1.Pod) {
			g.t.Helper()
			for range 2 { // kube-scheduler may ask again before the members have left its cache.
				got, err := g.Preempt(g.t.Context(), pod, map[string]preemption.Victims{"n1": {Pods: []gpu.PodUID{proposal}}})
				if diff := cmp.Diff(want, got["n1"].Pods); diff != "" || err != nil {
					g.t.Errorf("victims (-want +got):\n%s, %v", diff, err)
				}
			}
		}
	}
	for name, test := range map[string]scene{
		"in filter, of higher priority":            {5, true, true, filterAndBind},
		"in filter, of higher priority, not bound": {5, true, false, filter("n1")},
		"in filter, of equal priority":             {0, false, false, filter()},
		"in preempt, of higher priority":           {5, true, false, preempt("uid-job-0")},
		"in preempt, victims for other resources":  {5, true, false, preempt("uid-cpu", "uid-cpu")},
		"in preempt, of equal priority":            {0, false, false, preempt("uid-job-0")},
	} {
		t.Run(name, func(t *testing.T) {
			g := startGang(t, GangOptions{}, fake.Pod("cpu", 0, fake.On("n1"), fake.CPU(8)))
			g.startBinds(t.Context(), 0, 1)
			g.awaitHeld(2)
			single := fake.Pod("single", 16, fake.Priority(test.priority))
			test.call(g, single)
			if !test.gone {
				g.awaitHeld(2)
				g.want(g.pods[0], "assumed n1 card 0")
				return
			}
			g.wantEnds(2, gang.GaveWay)
			g.wantNoCardOver()
			g.want(g.pods[0], "none") // The place is kept for the pod, though it isn't bound yet.
			if got := g.filter(single, "n1").Names(); len(got) != 1 {
				t.Errorf("then the pod may go to %v", got)
			}
			if test.bound {
				g.want(single, "bound n1 card 0")
				return
			}
			g.pass("the end of the kept place", func() bool { return g.allocation(gpu.PodUID(single.UID)) == "none" })
			g.pass("the group's plan", func() bool { return g.allocation("uid-job-0") != "none" })
		})
	}
}
