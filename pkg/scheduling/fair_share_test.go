package scheduling

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/dispatch"
	"github.com/gpushare/gpushare/pkg/eviction"
	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// gated puts the gate of fair shares on a pod.
func gated(pod *corev1.Pod) {
	pod.Spec.SchedulingGates = append(pod.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: protocol.GateFairShare})
}

func ungated(pod *corev1.Pod) { pod.Spec.SchedulingGates = nil }

func inNamespace(name string) fake.PodEdit { return func(pod *corev1.Pod) { pod.Namespace = name } }

func namespace(name string, annotations map[string]string, labels ...string) *corev1.Namespace {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, UID: "uid-ns", Annotations: annotations, Labels: map[string]string{}}}
	for i := 0; i < len(labels); i += 2 {
		ns.Labels[labels[i]] = labels[i+1]
	}
	return ns
}

// startFair starts a Scheduler with fair sharing and groups, a node n1 with a card of 16, and the objects.
func startFair(t *testing.T, fair FairShareOptions, leading func() error, objects ...runtime.Object) *fixture {
	t.Helper()
	observer := &fake.Observer{}
	fair.On, fair.Observer = true, observer
	if fair.PriorityCutoff == 0 {
		fair.PriorityCutoff = 1000
	}
	return start(t, Options{FairShare: fair, Leading: leading, Gangs: GangOptions{Hold: 10 * time.Second, Patience: 30 * time.Second, Observer: observer}},
		append(objects, fake.Node("n1", 16))...)
}

// opened returns the names of the pods whose gate was removed.
func (f *fixture) opened() []string {
	opened := f.server.Calls().Opened
	slices.Sort(opened)
	return slices.Compact(opened)
}

func (f *fixture) passUntilOpened(want ...string) {
	f.t.Helper()
	f.pass("gates to be opened: "+strings.Join(want, " "), func() bool { return slices.Equal(f.opened(), want) })
}

// pendingPods returns the pending pods with the names.
func (f *fixture) pendingPods(names ...string) []*clustercache.PodInfo {
	return slices.DeleteFunc(f.cache.Pending(), func(pod *clustercache.PodInfo) bool { return !slices.Contains(names, pod.Name) })
}

// A pod's way from its gate to its bind.
func TestFairShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice, bob, late := fake.Pod("alice-1", 10, gated), fake.Pod("bob-1", 6, gated, inNamespace("bob")), fake.Pod("bob-2", 6, gated, inNamespace("bob"))
		f := startFair(t, FairShareOptions{}, nil, namespace("default", nil), namespace("bob", nil), alice, bob, late)
		if result := f.filter(late, "n1"); result.Message != reasons.AwaitsTurn || len(result.Passed) > 0 {
			t.Errorf("before its turn filter answers %v, %q", result.Passed, result.Message)
		}
		f.passUntilOpened("alice-1", "bob-1")
		f.want(alice, "assumed n1 card 0")
		for _, pod := range []*corev1.Pod{alice, bob} {
			f.publishObject(fake.Edited(pod, ungated))
			if result := f.filter(pod, "n2", "n1"); !slices.Equal(result.Names(), []string{"n1"}) {
				t.Errorf("%s may go to %v: %s", pod.Name, result.Names(), result.Message)
			}
		}
		check.Must(t, f.bind(alice))
		f.want(alice, "bound n1 card 0")
		f.publish(alice)
		f.await("the tenants", func() bool {
			return cmp.Equal(f.Tenants(), []dispatch.Tenant{
				{Terms: fairshare.DefaultTerms, Name: "bob", Share: 8, Allocated: 6, Waiting: 1, WaitingMemory: 6, PassedOver: 1, Obstacle: reasons.ObstacleNoRoom},
				{Terms: fairshare.DefaultTerms, Name: "default", Share: 8, Allocated: 10, Before: 1},
			}, cmpopts.IgnoreFields(dispatch.Tenant{}, "Next"))
		})
		want := []diagnosis.Diagnosis{{Reason: reasons.WaitsForTurn, Message: "waits for its turn: tenant bob has 6 of its share of 8; no card has room for it now" +
			"; cards of n1 are reserved for it, and it gets them when pods there have ended"}}
		f.pass("the reservation", func() bool {
			d := f.diagnose(f.pendingPods("bob-2"))
			return cmp.Equal(want, d)
		})
		f.publishGone(alice)
		f.passUntilOpened("alice-1", "bob-1", "bob-2")
	})
}

// kube-scheduler doesn't offer the node of the pod's place: the pod goes elsewhere.
func TestFairSharePlaceUnusable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pod := fake.Pod("p", 10, gated)
		f := startFair(t, FairShareOptions{}, nil, namespace("default", nil), pod, fake.Node("n2", 10))
		f.passUntilOpened("p") // Binpack prefers n2.
		f.want(pod, "assumed n2 card 0")
		if result := f.filter(pod, "n3"); len(result.Passed) > 0 {
			t.Errorf("it may go to %v", result.Names())
		}
		f.want(pod, "assumed n2 card 0") // The next call may offer that node.
		if result := f.filter(pod, "n1"); !slices.Equal(result.Names(), []string{"n1"}) {
			t.Errorf("it may go to %v", result.Names())
		}
		f.want(pod, "none")
	})
}

// The card of a pod's place can't be used any more when the pod is bound: it gets another card of the node, or none.
func TestFairSharePlaceLost(t *testing.T) {
	former := fake.Pod("former", 10, inNamespace("former"))
	for name, tc := range map[string]struct {
		cards []int64
		lost  func(f *fixture)
		want  string
	}{
		"to a bind of the former leader":   {[]int64{16}, func(f *fixture) { f.server.Set(fake.Edited(former, fake.Bound("n2", 0))) }, "none"},
		"and there is another card":        {[]int64{16, 20}, func(f *fixture) { f.server.Set(fake.Edited(former, fake.Bound("n2", 0))) }, "bound n2 card 1"},
		"since it was taken from the node": {[]int64{16, 20}, func(f *fixture) { f.ledger.SetNode("n2", ledger.NodeSpec{Cards: []gpu.Card{{Index: 1, Memory: 20}}}) }, "bound n2 card 1"},
	} {
		t.Run(name, bubble(func(t *testing.T) {
			pod := fake.Pod("p", 12, gated)
			f := startFair(t, FairShareOptions{}, new(standby).leading, namespace("default", nil), pod, fake.Node("n2", tc.cards...))
			check.Must(t, f.TakeOver(t.Context()))
			f.ledger.SetNode("n1", ledger.NodeSpec{})
			f.passUntilOpened("p")
			f.want(pod, "assumed n2 card 0")
			tc.lost(f)
			if err := f.Bind(t.Context(), request(pod, "n2")); noRoom(err) != (tc.want == "none") {
				t.Errorf("the bind returns %v", err)
			}
			f.want(pod, tc.want)
		}))
	}
}

// TestFairShareClockSteps sets the clock forwards or back between charge and gate, by more than a charge lasts: all pods get their turn,
// the card is never over its size, and no charge and no place stays.
func TestFairShareClockSteps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		clock, observer := &steppedClock{}, &fake.Observer{}
		f := start(t, Options{Clock: clock, FairShare: FairShareOptions{On: true, PriorityCutoff: 1000, Observer: observer}, Gangs: GangOptions{Patience: 30 * time.Second}},
			fake.Node("n1", 16), namespace("default", nil), namespace("bob", nil))
		rises := func(count string, change func()) {
			before := observer.Count(count)
			change()
			f.pass(count, func() bool { return observer.Count(count) > before })
		}
		for round := range 20 {
			var waiting, bound []*corev1.Pod
			f.server.Answer(fake.Answers{Open: errors.New("not now")})
			rises("gate opened false", func() {
				for i := range 4 { // Two of them fit.
					pod := fake.Pod(fmt.Sprintf("p-%d-%d", round, i), 8, gated, inNamespace([]string{"default", "bob"}[i%2]))
					f.server.Set(pod)
					f.publishObject(pod)
					waiting = append(waiting, pod)
				}
			})
			if round%2 == 0 {
				rises("charge expired", func() { clock.steps.Add(int64(time.Minute)) })
			} else {
				clock.steps.Add(-int64(time.Minute))
			}
			f.server.Answer(fake.Answers{})
			for len(waiting) > 0 {
				f.pass("a bind", func() bool {
					opened := f.opened()
					i := slices.IndexFunc(waiting, func(pod *corev1.Pod) bool {
						return slices.Contains(opened, pod.Name) && len(f.filter(fake.Edited(pod, ungated), "n1").Passed) > 0 && f.bind(pod) == nil
					})
					if i >= 0 {
						f.publish(waiting[i])
						bound, waiting = append(bound, waiting[i]), slices.Delete(waiting, i, i+1)
					}
					return i >= 0
				})
				if used := f.ledger.Nodes()[0].Used[0]; used > 16 {
					t.Fatalf("round %d: %d of 16 are used", round, used)
				}
				if len(bound) == 2 {
					for _, pod := range bound {
						f.publishGone(pod)
					}
					bound = nil
				}
			}
			f.pass("the end of all charges", func() bool {
				return !slices.ContainsFunc(f.Tenants(), func(t dispatch.Tenant) bool { return t.Allocated > 0 || t.Waiting > 0 })
			})
			if used := f.ledger.Nodes()[0].Used[0]; used > 0 {
				t.Fatalf("round %d: %d are used in the end", round, used)
			}
		}
	})
}

// What namespaces say.
func TestFairShareNamespaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pods := []runtime.Object{
			fake.Pod("a", 4, fake.Bound("n1", 0)), fake.Pod("b", 4, fake.Bound("n1", 0), inNamespace("b")),
			fake.Pod("free", 4, gated, inNamespace("free")), fake.Pod("urgent", 16, gated, inNamespace("b"), fake.Priority(1000)), fake.Pod("no-memory", 0, gated),
		}
		f := startFair(t, FairShareOptions{Label: "team"}, nil, append(pods,
			namespace("default", map[string]string{protocol.AnnotationFairShareWeight: "3", protocol.AnnotationFairShareGuaranteed: "2"}, "team", "x"),
			namespace("b", map[string]string{protocol.AnnotationFairShareWeight: "0", protocol.AnnotationFairShareGuaranteed: "2Gi"}, "team", "x"),
			namespace("free", nil, protocol.LabelFairShare, protocol.FairShareOff))...)
		f.passUntilOpened("free", "no-memory", "urgent")
		want := []dispatch.Tenant{{Terms: fairshare.Terms{Weight: 3, Guaranteed: 2}, Name: "x", Share: 8, Allocated: 8}}
		check.Equal(t, "the result", want, f.Tenants())
		f.wantEvent(`Warning FairShareInvalid The default value is used: annotation gpushare.aliyun.com/fair-share-weight: "0" is not a whole number from 1 to 1000000; ` +
			`annotation gpushare.aliyun.com/fair-share-guaranteed: "2Gi" is not a whole number from 0 to 1099511627776`)
		if n := f.InvalidNamespaces(); n != 1 {
			t.Errorf("%d invalid namespaces", n)
		}
		check.Must(t, f.client.CoreV1().Namespaces().Delete(t.Context(), "b", metav1.DeleteOptions{}))
		f.await("the deletion", func() bool { return f.InvalidNamespaces() == 0 })
	})
}

// Priorities count within a tenant only: a pod with a turn evicts no pods, one that needs none does.
func TestFairShareEvictsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pod, urgent := fake.Pod("p", 16, gated, fake.Priority(5), inNamespace("bob")), fake.Pod("urgent", 16, fake.Priority(1000), inNamespace("bob"))
		charged := fake.Pod("charged", 4, gated, fake.Priority(5), inNamespace("bob"))
		f := startFair(t, FairShareOptions{Provisioning: 1}, nil, namespace("default", nil), namespace("bob", nil), fake.Node("n2", 8), fake.Pod("a", 16, fake.Bound("n1", 0)), pod, charged)
		f.passUntilOpened("charged", "p") // The second one for an autoscaler.
		proposed := map[string]preemption.Victims{"n1": {Pods: []gpu.PodUID{"uid-a"}}}
		if got, err := f.Preempt(t.Context(), pod, proposed); len(got) > 0 || err != nil {
			t.Errorf("victims %v, %v", got, err)
		}
		if got, err := f.Preempt(t.Context(), charged, map[string]preemption.Victims{"n2": {Pods: []gpu.PodUID{"uid-x"}}}); len(got) > 0 || err != nil {
			t.Errorf("victims of a pod that has a place: %v, %v", got, err)
		}
		if got, err := f.Preempt(t.Context(), urgent, proposed); !cmp.Equal(proposed, got) || err != nil {
			t.Errorf("victims of the pod above the cutoff: %v, %v", got, err)
		}
	})
}

// The charge of a pod ends while a bind of the pod is in flight. Its place is released when that bind fails before its write, so the pod can go
// to any node again.
func TestChargeEndsDuringBind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pod := fake.Pod("p", 10, gated)
		f := startFair(t, FairShareOptions{}, nil, namespace("default", nil), pod, fake.Node("n2", 10))
		f.passUntilOpened("p")
		f.want(pod, "assumed n2 card 0")
		pod = fake.Edited(pod, ungated)
		f.server.Set(pod)
		f.publishObject(pod)
		claim, ok := f.binder.Claim("uid-p")
		if !ok {
			t.Fatal("a bind is in flight")
		}
		due := f.clock.Now().Add(5 * time.Minute)
		f.pass("the end of the charge", func() bool { return f.clock.Now().After(due) })
		f.want(pod, "assumed n2 card 0")
		claim.End()
		f.wantSettled(pod, "none")
		f.pass("the pod to pass on the other node", func() bool { return len(f.filter(pod, "n1").Passed) > 0 })
	})
}

// Reclaim is turned off while a group is evicted: the first leader without it evicts the rest.
func TestReclaimTurnedOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		left := fake.Pod("left", 8, fake.Bound("n1", 0))
		f := newFixture(t, Options{EvictionRecord: types.NamespacedName{Namespace: "kube-system", Name: "evictions"}}, fake.Node("n1", 16), left)
		record, err := f.server.CreateConfigMap(t.Context(), f.EvictionRecord.Namespace, f.EvictionRecord.Name)
		check.Must(t, err)
		pods := eviction.IDs(protocol.Pod(fake.Pod("evicted", 8)), protocol.Pod(left))
		groups, err := json.Marshal([]any{map[string]any{"pods": pods, "began": begin.Add(-time.Minute)}})
		check.Must(t, err)
		_, err = f.server.PatchConfigMap(t.Context(), record.Namespace, record.Name, record.ResourceVersion, map[string]string{"groups": string(groups)})
		check.Must(t, err)
		f.run()
		f.awaitSync()
		f.pass("the eviction", func() bool { return slices.Equal(f.server.Calls().Evicted, []string{"left"}) })
	})
}
