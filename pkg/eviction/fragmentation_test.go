package eviction

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/fake"
)

func TestFragmentation(t *testing.T) {
	f := newFixture(t, nil)
	f.reject(f.pending, "n1")
	f.later(cycle - 1)
	f.wantEvicted() // kube-scheduler goes first.
	f.later(1)
	f.wantEvicted("?a5", "a5") // 4 + 5 are enough; the victim with the least memory is chosen.
	for _, want := range []string{
		"Normal GPUCardEvicted Evicted from GPU card 0 of node n1 for pod default/pending of higher priority",
		"Normal GPUCardEvicting Evicting 1 pod(s) of lower priority from GPU card 0 of node n1: the node has enough free GPU memory, but too few of its cards have",
	} {
		if got := <-f.events; got != want {
			t.Errorf("Event %q, want %q", got, want)
		}
	}
	f.later(interval) // No other pod is evicted while the watch hasn't reported the deletion.
	f.report(fake.Edited(f.a5, fake.Terminating(f.clock.Now())))
	f.later(interval)
	f.delete(f.a5)
	if f.fitsFor(9, 5) || !f.fitsFor(10, 5) {
		t.Error("the freed card isn't reserved against pods of equal priority, or is against higher ones")
	}
	f.later(interval)
	f.later(queue.ArrivalTimeout)
	if f.fitsFor(9, 5) {
		t.Error("the reservation ended too early")
	}
	f.later(interval)
	if !f.fitsFor(9, 5) {
		t.Error("the reservation doesn't end")
	}
	f.wantEvicted("?a5", "a5")
	if got := f.observer.Counts(); got["evicted "+string(reasons.ResultEvicted)] != 1 || got["write eviction"] != 1 {
		t.Errorf("counted %v", got)
	}
}

func TestFragmentationVictims(t *testing.T) {
	cordoned := fake.Node("n2", 16)
	cordoned.Spec.Unschedulable = true
	for name, test := range map[string]struct {
		before  func(f *fixture)
		objects []runtime.Object
		want    []string
	}{
		// The API server evicts no pod with several budgets.
		"a pod with several budgets is spared": {func(f *fixture) { fake.Label("x")(f.a5) },
			[]runtime.Object{fake.Budget("one", "x", 9), fake.Budget("two", "x", 9)}, []string{"?a7", "a7"}},
		"a nomination to a cordoned node is invalid": {func(f *fixture) { fake.Nominated("n2")(f.pending) },
			[]runtime.Object{cordoned}, []string{"?a5", "a5"}},
		// So an extender that takes over continues with the card of the former leader's victims.
		"terminating victims are awaited": {func(f *fixture) { fake.Terminating(begin)(f.a7) }, nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, test.before, test.objects...)
			f.startRound()
			f.wantEvicted(test.want...)
			if !f.reserves() {
				t.Error("no card is reserved")
			}
		})
	}
}

// A pod that asks for two cards gets them freed both at once: the second card is the one that is in pieces.
func TestFragmentationOfSeveralCards(t *testing.T) {
	f := newFixture(t, func(f *fixture) {
		f.b12 = fake.Pod("b15", 15, fake.Bound("n1", 1), fake.Priority(2))
		f.pending = fake.Pod("pending", 4, fake.Cards(2), fake.Priority(9))
	})
	f.startRound()
	f.wantEvicted("?b15", "b15")
	for _, want := range []string{
		"Normal GPUCardEvicted Evicted from GPU card 1 of node n1 for pod default/pending of higher priority",
		"Normal GPUCardEvicting Evicting 1 pod(s) of lower priority from GPU cards 0, 1 of node n1: the node has enough free GPU memory, but too few of its cards have",
	} {
		if got := <-f.events; got != want {
			t.Errorf("Event %q, want %q", got, want)
		}
	}
	f.delete(f.b12)
	if !f.fitsFor(9, 14) || f.fitsFor(9, 15) { // Two of each card are kept for it.
		t.Error("the freed cards aren't reserved against pods of equal priority")
	}
}

func TestNoEviction(t *testing.T) {
	for name, test := range map[string]struct {
		// before changes the pods of the cluster. after happens after the rejection.
		before, after func(f *fixture)
	}{
		"the others are of equal priority":  {before: func(f *fixture) { fake.Priority(1)(f.pending) }},
		"the node's sum has no room either": {before: func(f *fixture) { f.pending = fake.Pod("pending", 9, fake.Priority(9)) }},
		"it is nominated to a node, where a pod of lower priority is terminating": {before: func(f *fixture) {
			fake.Nominated("n1")(f.pending)
			fake.Terminating(begin)(f.b12)
		}},
		"the victims are static pods": {before: func(f *fixture) {
			for _, pod := range []*corev1.Pod{f.a7, f.a5, f.b12} {
				fake.Mirror(pod)
			}
		}},
		"kube-scheduler has nominated a node since": {after: func(f *fixture) { f.report(fake.Edited(f.pending, fake.Nominated("n1"))) }},
		"it is bound":                         {after: func(f *fixture) { f.report(fake.Edited(f.pending, fake.Bound("n1", 0))) }},
		"it is terminating":                   {after: func(f *fixture) { f.report(fake.Edited(f.pending, fake.Terminating(begin))) }},
		"it is gone":                          {after: func(f *fixture) { f.delete(f.pending) }},
		"another pod has its name":            {after: func(f *fixture) { f.report(fake.Edited(f.pending, func(pod *corev1.Pod) { pod.UID = "another" })) }},
		"a card has room":                     {after: func(f *fixture) { f.delete(f.a7) }},
		"the candidate nodes are out of date": {after: func(f *fixture) { f.clock.Step(candidatesLife) }},
		"filter has passed it":                {after: func(f *fixture) { f.Unblock("uid-pending") }},
		"this replica doesn't lead":           {after: func(f *fixture) { f.standby = errors.New("standby") }},
		"the cache isn't synced":              {after: func(f *fixture) { f.notReady = errLost }},
		"the budgets aren't synced":           {after: func(f *fixture) { f.budgetsNotSynced = errLost }},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, test.before)
			f.reject(f.pending, "n1")
			if test.after != nil {
				test.after(f)
			}
			f.later(cycle)
			f.wantEvicted()
		})
	}
}

// budgetRefusal is the API server's answer if a disruption budget forbids an eviction.
func budgetRefusal() error {
	err := apierrors.NewTooManyRequests("Cannot evict pod as it would violate the pod's disruption budget.", 0)
	err.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: policyv1.DisruptionBudgetCause, Message: "the budget"}}
	return err
}

// severalBudgets is its answer for a pod with several budgets. It has no reason (k8s.io/kubernetes pkg/registry/core/pod/storage/eviction.go).
var severalBudgets = &apierrors.StatusError{ErrStatus: metav1.Status{
	Status: metav1.StatusFailure, Code: http.StatusInternalServerError,
	Message: "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.",
}}

// TestAnswered: an overloaded API server says nothing about the pod.
func TestAnswered(t *testing.T) {
	overloaded := apierrors.NewGenericServerResponse(http.StatusTooManyRequests, "create", fake.PodResource, "a", "Too many requests, please try again later.", 1, true)
	for _, test := range []struct {
		err  error
		want bool
	}{
		{budgetRefusal(), true},
		{apierrors.NewForbidden(fake.PodResource, "a", errors.New("denied")), true},
		{overloaded, false},
		{apierrors.NewTooManyRequests("busy", 1), false},
		{apierrors.NewServiceUnavailable("starting"), false},
		{errors.New("connection refused"), false},
	} {
		if got := answered(test.err); got != test.want {
			t.Errorf("%v: %t", test.err, got)
		}
	}
}

func TestEvictionRejected(t *testing.T) {
	for name, test := range map[string]struct {
		answer error
		result reasons.Result
	}{
		"by a budget":                  {budgetRefusal(), reasons.ResultRefused},
		"by a webhook":                 {apierrors.NewForbidden(fake.PodResource, "a5", errors.New("denied")), reasons.ResultFailed},
		"for several budgets of a pod": {severalBudgets, reasons.ResultFailed},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, nil)
			f.server.Answer(fake.Answers{Evict: func(pod gpu.Pod, _ bool) error {
				if pod.Name == "a5" {
					return test.answer
				}
				return nil
			}})
			f.startRound()
			f.wantEvicted("?a5")
			if f.reserves() {
				t.Error("a card is reserved that isn't freed")
			}
			if got := f.observer.Count("evicted " + string(test.result)); got != 1 {
				t.Errorf("%d rounds counted as %s", got, test.result)
			}
			f.later(interval)
			f.wantEvicted("?a5") // It is not retried every second.
			f.later(queue.Retry)
			f.wantEvicted("?a5", "?a7", "a7") // The next best victim, while the first one is spared.
		})
	}
}

// A pod for which no card can be freed doesn't block pods of lower priority. But while the API server doesn't answer, no other
// pod is tried in the same step.
func TestEvictionForNextPod(t *testing.T) {
	denied := apierrors.NewForbidden(fake.PodResource, "a5", errors.New("denied"))
	for name, test := range map[string]struct {
		answer error
		want   [3][]string // after each step
	}{
		"evictions are rejected": {denied, [3][]string{{"?a5", "?c12", "c12"}, {"?a5", "?c12", "c12"}, {"?a5", "?c12", "c12", "?a7"}}},
		// No victim is spared because of an unavailable server.
		"the API server doesn't answer": {errLost, [3][]string{{"?a5"}, {"?a5", "?c12"}, {"?a5", "?c12", "?a5"}}},
	} {
		t.Run(name, func(t *testing.T) {
			second := fake.Pod("second", 8, fake.Priority(8))
			f := newFixture(t, nil, append(withSecondNode(), second)...)
			f.server.Answer(fake.Answers{Evict: func(pod gpu.Pod, _ bool) error {
				if errors.Is(test.answer, denied) && pod.Name == "c12" {
					return nil
				}
				return test.answer
			}})
			f.reject(f.pending, "n1")
			f.reject(second, "n2")
			for i, d := range []time.Duration{cycle, interval, queue.Retry} {
				f.later(d)
				f.wantEvicted(test.want[i]...)
			}
		})
	}
}

// kube-scheduler doesn't clear a nomination if only fragmentation prevents the placement.
func TestEvictionForInvalidNomination(t *testing.T) {
	f := newFixture(t, func(f *fixture) { fake.Nominated("n2")(f.pending) }, fake.Node("n2", 16, 16),
		fake.Pod("c9", 9, fake.Bound("n2", 0)), fake.Pod("d9", 9, fake.Bound("n2", 1), fake.Terminating(begin.Add(-time.Hour))))
	f.startRound()
	f.wantEvicted("?a5", "a5")
	f.delete(f.a5)
	f.report(fake.Edited(f.pending, fake.Label("changed")))
	f.later(interval)
	if f.fitsFor(9, 5) {
		t.Error("the freed card isn't reserved: the invalid nomination counts")
	}
	f.report(fake.Edited(f.pending, fake.Nominated("n3")))
	if !f.fitsFor(9, 5) {
		t.Error("a new nomination doesn't count")
	}
}

// A node that takes no pods with several cards any more, as after a switch of its isolation mode, keeps no nomination of one valid.
func TestEvictionForNominationToChangedNode(t *testing.T) {
	f := newFixture(t, func(f *fixture) {
		f.b12 = fake.Pod("b15", 15, fake.Bound("n1", 1), fake.Priority(2))
		f.pending = fake.Pod("pending", 4, fake.Cards(2), fake.Priority(9), fake.Nominated("n2"))
	}, fake.Node("n2", 16, 16))
	n2, _ := f.ledger.Node("n2")
	n2.SeveralCards = reasons.OneCardOnly
	f.ledger.SetNode("n2", n2.NodeSpec)
	f.startRound()
	f.wantEvicted("?b15", "b15")
}

// With more guarded nodes than maxPlans, the node on which a card can be freed still gets its turn.
func TestEvictionBehindManyGuardedNodes(t *testing.T) {
	names, objects := []string{"n1"}, []runtime.Object{fake.Budget("all", "x", 0)}
	for i := range maxPlans {
		node := fmt.Sprint("guarded-", i)
		names = append(names, node)
		objects = append(objects, fake.Node(node, 16, 16),
			fake.Pod("c-"+node, 12, fake.Bound(node, 0), fake.Label("x")), fake.Pod("d-"+node, 12, fake.Bound(node, 1), fake.Label("x")))
	}
	f := newFixture(t, nil, objects...)
	for range 100 {
		f.reject(f.pending, names...)
		f.later(cycle)
		if f.reserves() {
			return
		}
		f.clock.Step(candidatesLife)
	}
	t.Error("no card is freed")
}

// A filter call with a new nomination gives kube-scheduler time to delete its victims.
func TestEvictionWaitsAfterNomination(t *testing.T) {
	f := newFixture(t, nil)
	f.reject(f.pending, "n1")
	f.clock.Step(cycle)
	nominated := fake.Edited(f.pending, fake.Nominated("n1"))
	f.report(nominated)
	f.reject(nominated, "n1")
	f.later(cycle - 1)
	f.wantEvicted()
	f.later(1)
	f.wantEvicted("?a5", "a5")
}

// A pod for which filter finds a node while an earlier pod of the same step is tried gets no round.
func TestNoEvictionAfterPass(t *testing.T) {
	for name, test := range map[string]struct {
		meanwhile func(f *fixture)
		want      []string
	}{
		"nothing happens":  {func(*fixture) {}, []string{"?a5", "?c12", "c12"}},
		"filter passes it": {func(f *fixture) { f.Unblock("uid-second") }, []string{"?a5"}},
		"kube-scheduler evicts pods for it": {func(f *fixture) {
			f.Proposed("uid-second", map[string]preemption.Victims{"n2": {Pods: []gpu.PodUID{"uid-d12"}}})
		}, []string{"?a5"}},
	} {
		t.Run(name, func(t *testing.T) {
			second := fake.Pod("second", 8, fake.Priority(8))
			f := newFixture(t, nil, append(withSecondNode(), second)...)
			f.server.Answer(fake.Answers{Evict: func(pod gpu.Pod, _ bool) error {
				if pod.Name != "a5" {
					return nil
				}
				test.meanwhile(f)
				return budgetRefusal()
			}})
			f.reject(f.pending, "n1")
			f.reject(second, "n2")
			f.later(cycle)
			f.wantEvicted(test.want...)
		})
	}
}

// Pods for which there is no plan give up their places among the remembered pods.
func TestEvictionOfManyBlockedPods(t *testing.T) {
	second := fake.Pod("second", 8, fake.Priority(2))
	objects := append(withSecondNode(), second)
	var hopeless []*corev1.Pod
	for i := range maxBlocked {
		hopeless = append(hopeless, fake.Pod(fmt.Sprint("hopeless-", i), 8, fake.Priority(1+int32(i))))
		objects = append(objects, hopeless[i])
	}
	f := newFixture(t, func(f *fixture) {
		for _, pod := range []*corev1.Pod{f.a7, f.a5, f.b12} {
			fake.Priority(200)(pod)
		}
	}, objects...)
	for _, pod := range hopeless {
		f.reject(pod, "n1")
	}
	f.clock.Step(cycle)
	for range maxBlocked/maxTries + 1 {
		f.later(interval)
	}
	f.reject(second, "n2")
	for range 3 * cycle / interval { // Some of the others are tried again before it.
		f.later(interval)
	}
	f.wantEvicted("?c12", "c12")
}

// While the answer to an eviction is lost, no other pod is evicted, and the card is reserved.
func TestEvictionLostAnswer(t *testing.T) {
	for name, evicted := range map[string]bool{"the eviction was made": true, "the eviction wasn't made": false} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, nil)
			f.server.Answer(fake.Answers{Evict: func(_ gpu.Pod, dryRun bool) error {
				if dryRun {
					return nil
				}
				return errLost
			}})
			f.startRound()
			f.later(interval)
			f.wantEvicted("?a5", "a5")
			f.server.Answer(fake.Answers{})
			if evicted {
				f.delete(f.a5)
				f.later(interval)
				if f.fitsFor(9, 5) {
					t.Error("a pod of equal priority gets the freed card")
				}
				return
			}
			f.later(f.AnswerLost - interval)
			f.reject(f.pending, "n1")
			f.later(queue.Retry)
			f.later(queue.Retry)
			f.wantEvicted("?a5", "a5", "?a5", "a5")
		})
	}
}

// The card's remaining free memory isn't given to other pods while the eviction is in progress.
func TestEvictionReservesCardFromTheStart(t *testing.T) {
	f := newFixture(t, nil)
	var cards []int
	f.server.Answer(fake.Answers{Evict: func(gpu.Pod, bool) error {
		allocation, err := f.ledger.Reserve("n1", gpu.Pod{UID: "other", Priority: 9, Request: 3}, placement.Binpack, begin)
		if err != nil {
			return err
		}
		cards = append(cards, allocation.Placement[0].Card)
		f.ledger.Remove("other")
		return nil
	}})
	f.startRound()
	f.wantEvicted("?a5", "a5")
	if !slices.Equal(cards, []int{1, 1}) {
		t.Errorf("another pod gets cards %v, want 1 each time", cards)
	}
}

// The victim is already gone when it is evicted, and the watch lags.
func TestEvictionOfDeletedPod(t *testing.T) {
	f := newFixture(t, nil)
	f.server.Answer(fake.Answers{Evict: func(pod gpu.Pod, _ bool) error { return apierrors.NewNotFound(fake.PodResource, pod.Name) }})
	f.startRound()
	f.later(interval)
	if !f.reserves() {
		t.Error("the round is over, though its victim is gone")
	}
}

// A victim that stays, for any reason, doesn't keep the card from other pods forever.
func TestEvictionVictimStays(t *testing.T) {
	for name, test := range map[string]struct {
		terminating bool
		// patience is how long the round lasts. next are the evictions of the round after it.
		patience time.Duration
		next     []string
	}{
		"it is terminating, though its grace period is over": {true, protocol.OverdueMargin, []string{"?a7", "a7"}},
		"it isn't terminating":                               {false, 65 * time.Second, []string{"?a5", "a5"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, nil)
			f.startRound()
			if test.terminating {
				f.report(fake.Edited(f.a5, fake.Terminating(f.clock.Now())))
			}
			f.later(test.patience)
			if !f.reserves() {
				t.Error("the round is over too early")
			}
			f.later(interval)
			f.later(interval)
			if f.reserves() {
				t.Error("the round doesn't end")
			}
			f.delete(f.b12)
			if !f.fitsFor(9, 16) {
				t.Error("memory is still reserved")
			}
			f.report(f.b12)
			f.reject(f.pending, "n1")
			f.later(cycle - 1)
			f.wantEvicted("?a5", "a5") // There is no second round at once.
			f.clock.Step(queue.LongestPause)
			f.reject(f.pending, "n1")
			f.later(0)
			f.later(cycle)
			f.wantEvicted(append([]string{"?a5", "a5"}, test.next...)...)
		})
	}
}

// If a pod of higher priority takes the freed card, another card is freed soon.
func TestEvictionCardTaken(t *testing.T) {
	f := newFixture(t, nil, withSecondNode()...)
	f.reject(f.pending, "n1", "n2")
	f.later(cycle)
	f.delete(f.a5)
	f.report(fake.Pod("high", 9, fake.Bound("n1", 0), fake.Priority(10)))
	f.later(interval)
	if f.reserves() {
		t.Error("the round goes on, though its card is taken")
	}
	f.clock.Step(queue.Retry)
	f.reject(f.pending, "n1", "n2")
	f.later(cycle)
	f.wantEvicted("?a5", "a5", "?c12", "c12")
}

// The card isn't reserved while another process leads.
func TestRoundsOfTerms(t *testing.T) {
	f := newFixture(t, nil)
	f.startRound()
	f.delete(f.a5)
	if f.fitsFor(9, 5) {
		t.Fatal("the freed card isn't reserved")
	}
	f.standby = errors.New("standby")
	f.later(interval)
	if !f.fitsFor(9, 5) {
		t.Error("the card is still reserved by a former leader")
	}
}

// The card is reserved again after a nomination to another node has ended.
func TestReservationAfterNomination(t *testing.T) {
	f := newFixture(t, nil)
	f.startRound()
	f.delete(f.a5)
	f.report(fake.Edited(f.pending, fake.Nominated("n2")))
	if !f.fitsFor(9, 5) {
		t.Error("the nomination to another node doesn't count")
	}
	f.report(f.pending)
	if f.fitsFor(9, 5) {
		t.Error("the card isn't reserved again")
	}
}

// The number of candidate nodes that are kept is limited.
func TestBlockedNodesAreBounded(t *testing.T) {
	f := newFixture(t, nil)
	f.Rejected(protocol.Pod(f.pending), "", func(yield func(string) bool) {
		for yield("n1") {
		}
	}, begin)
	if n := len(f.blocked["uid-pending"].nodes); n != maxBlockedNodes {
		t.Errorf("%d nodes are kept", n)
	}
}

// BenchmarkHopeless measures one step with maxBlocked blocked pods, none of which has a plan. On 120 nodes with 8 cards and 24
// pods each, either no pod has a lower priority, or budgets guard all pods.
func BenchmarkHopeless(b *testing.B) {
	for name, priority := range map[string]int32{"equal priority": 0, "guarded": 9} {
		b.Run(name, func(b *testing.B) {
			objects := []runtime.Object{fake.Budget("all", "x", 0)}
			var names []string
			for i := range 120 {
				names = append(names, fmt.Sprint("n-", i))
				objects = append(objects, fake.Node(names[i], 16, 16, 16, 16, 16, 16, 16, 16))
				for pod := range 24 {
					objects = append(objects, fake.Pod(fmt.Sprintf("p-%d-%d", i, pod), 4, fake.Bound(names[i], pod%8), fake.Label("x")))
				}
			}
			var blocked []*corev1.Pod
			for i := range maxBlocked {
				blocked = append(blocked, fake.Pod(fmt.Sprint("w", i), 8, fake.Priority(priority)))
				objects = append(objects, blocked[i])
			}
			f := newFixture(b, nil, objects...)
			for b.Loop() {
				b.StopTimer()
				f.clear()
				for _, pod := range blocked {
					f.reject(pod, names...)
				}
				f.clock.Step(cycle)
				b.StartTimer()
				f.Tick(b.Context())
			}
		})
	}
}
