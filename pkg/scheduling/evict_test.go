package scheduling

import (
	"errors"
	"fmt"
	goruntime "runtime"
	"slices"
	"testing"
	"time"
	"weak"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// fragmented is a cluster with one node of two cards of 16. Pods with 7 and 5 of priority 1 use the first card, a pod
// with 12 of priority 2 the second. The node's sum has room for 8, but no card has.
type fragmented struct {
	*fixture
	leads              leadership
	a7, a5, b12, waits *corev1.Pod
	others             []runtime.Object
	t                  *testing.T
}

// fragmentedNode returns a node that allows 100 pods.
func fragmentedNode(t testing.TB, name string, cards ...int64) *corev1.Node {
	t.Helper()
	node := newNode(t, name, cards...)
	node.Status.Allocatable = amount(corev1.ResourcePods, 100)
	node.Status.Allocatable[protocol.ResourceMemory] = node.Status.Capacity[protocol.ResourceMemory]
	return node
}

func startFragmented(t *testing.T, changes ...func(f *fragmented)) *fragmented {
	f := &fragmented{
		t:  t,
		a7: ranked(boundPod("a7", 7, "n1", 0), 1), a5: ranked(boundPod("a5", 5, "n1", 0), 1),
		b12: ranked(boundPod("b12", 12, "n1", 1), 2), waits: ranked(newPod("waits", 8), 9),
	}
	for _, change := range changes {
		change(f)
	}
	// The test runs the evictor's rounds itself, see later.
	rounds := func(c *Cluster) { c.evictor = newEvictor(c) }
	f.fixture = startWith(t, Options{BindTimeout: patient, Leading: f.leads.ask}, rounds, append(f.others, fragmentedNode(t, "n1", 16, 16), f.a7, f.a5, f.b12, f.waits)...)
	return f
}

func ranked(pod *corev1.Pod, priority int32) *corev1.Pod {
	pod.Spec.Priority = &priority
	return pod
}

func (f *fragmented) block(pod *corev1.Pod) {
	f.Blocked(pod, slices.Values([]string{"n1"}), f.clock.Now())
}

// later advances the clock and runs one step of the evictor, as its ticker would.
func (f *fragmented) later(d time.Duration) {
	f.clock.Step(d)
	f.evictor.tick(f.t.Context())
}

// underWay reports whether a card is reserved for the pending pod.
func (f *fragmented) underWay() bool {
	f.evictor.mu.Lock()
	defer f.evictor.mu.Unlock()
	_, ok := f.evictor.rounds["uid-waits"]
	return ok
}

func (f *fragmented) wantEvicted(want ...string) {
	f.t.Helper()
	f.server.with(func(s *server) {
		if !slices.Equal(s.evicted, want) {
			f.t.Errorf("evicted %v, want %v", s.evicted, want)
		}
	})
}

// leaves makes the watch report that the pod is being deleted.
func (f *fragmented) leaves(pod *corev1.Pod) {
	f.t.Helper()
	leaving := pod.DeepCopy()
	leaving.DeletionTimestamp, leaving.Finalizers = &metav1.Time{Time: f.clock.Now()}, []string{"test/kubelet"}
	f.publishObject(leaving)
	f.await(pod.Name+" to leave", func() bool {
		_, holder, held := f.ledger.Lookup(gpu.PodUID(pod.UID))
		return held && holder.Leaving
	})
}

func (f *fragmented) fitsFor(priority int32, memory gpu.Memory) bool {
	return f.fits(gpu.Pod{UID: "other", Priority: priority, Request: memory}, "n1")
}

func TestACardIsFreedForAPodThatOnlyFragmentationBlocks(t *testing.T) {
	f := startFragmented(t)
	f.block(f.waits)
	f.later(evictDelay - 1)
	f.wantEvicted() // kube-scheduler goes first.
	f.later(1)
	f.wantEvicted("?a5", "a5") // 4 + 5 are enough; the victim with the least memory is chosen.
	f.later(evictInterval)
	f.wantEvicted("?a5", "a5") // No other pod is evicted while the watch hasn't reported the deletion.
	f.leaves(f.a5)
	f.later(evictInterval)
	f.wantEvicted("?a5", "a5")
	// The freed memory is reserved, but only for evictHold.
	f.publishGone(f.a5)
	f.awaitHeld(f.a5, "not held")
	if f.fitsFor(9, 5) || !f.fitsFor(10, 5) {
		t.Error("the freed card isn't held against pods of equal priority, or is against higher ones")
	}
	f.publishObject(edited(f.waits.DeepCopy(), label("told")))
	f.later(evictInterval)
	f.later(evictHold)
	if f.fitsFor(9, 5) {
		t.Error("the card is held no longer, too early")
	}
	f.later(evictInterval)
	if !f.fitsFor(9, 5) {
		t.Error("the card is held for ever")
	}
	f.wantEvicted("?a5", "a5")
	if got := f.counts.of("evicted " + EvictedAll); got != 1 {
		t.Errorf("%d rounds counted", got)
	}
}

func TestAnExtenderThatTakesOverGoesOnWithTheSameCard(t *testing.T) {
	f := startFragmented(t, func(f *fragmented) {
		f.a7.DeletionTimestamp, f.a7.Finalizers = &metav1.Time{Time: begin}, []string{"test/kubelet"}
	})
	f.block(f.waits)
	f.later(evictDelay)
	f.wantEvicted()
	if !f.underWay() {
		t.Error("the card of those that leave already isn't held")
	}
}

func TestNobodyIsEvictedInVain(t *testing.T) {
	never := corev1.PreemptNever
	tests := map[string]struct {
		change func(f *fragmented)
		after  func(f *fragmented)
	}{
		"its policy is never to preempt":   {change: func(f *fragmented) { f.waits.Spec.PreemptionPolicy = &never }},
		"the others are of equal priority": {change: func(f *fragmented) { ranked(f.waits, 1) }},
		"the sum has no room either":       {change: func(f *fragmented) { f.waits.Spec.Containers[0].Resources.Limits = amount(protocol.ResourceMemory, 9) }},
		"kube-scheduler has nominated a node, where a pod of lower priority is leaving": {change: func(f *fragmented) {
			f.waits.Status.NominatedNodeName, f.b12.DeletionTimestamp = "n1", &metav1.Time{Time: begin}
			f.b12.Finalizers = []string{"test/kubelet"}
		}},
		"kube-scheduler has nominated a node since": {after: func(f *fragmented) {
			f.publishObject(edited(f.waits.DeepCopy(), nominated("n1")))
			f.await("the nomination", func() bool { pod, _ := f.pods.get("default", "waits"); return pod.Status.NominatedNodeName != "" })
		}},
		"its victims are static pods": {change: func(f *fragmented) {
			for _, pod := range []*corev1.Pod{f.a7, f.a5, f.b12} {
				mirror(pod)
			}
		}},
		"it is bound meanwhile": {after: func(f *fragmented) {
			f.publishObject(boundPod("waits", 8, "n1", 0))
			f.awaitHeld(f.waits, "bound n1 card 0")
		}},
		"it is gone meanwhile": {after: func(f *fragmented) {
			f.publishGone(f.waits)
			f.await("it to be gone", func() bool { _, known := f.pods.get("default", "waits"); return !known })
		}},
		"a card has room meanwhile": {after: func(f *fragmented) {
			f.publishGone(f.a7)
			f.awaitHeld(f.a7, "not held")
		}},
		"what filter was offered is long ago": {after: func(f *fragmented) { f.clock.Step(evictFresh) }},
		"filter has passed it":                {after: func(f *fragmented) { f.Passed("uid-waits") }},
		"this replica doesn't lead": {after: func(f *fragmented) {
			f.leads.set(errors.New("standing by"))
		}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := startFragmented(t, func(f *fragmented) {
				if test.change != nil {
					test.change(f)
				}
			})
			f.block(f.waits)
			if test.after != nil {
				test.after(f)
			}
			f.later(evictDelay)
			f.wantEvicted()
		})
	}
}

func TestEvictionRefused(t *testing.T) {
	for name, test := range map[string]struct {
		refusal error
		result  string
	}{
		"by a budget":                  {apierrors.NewTooManyRequests("the budget", 0), EvictionRefused},
		"by a webhook":                 {apierrors.NewForbidden(podResource, "a5", errors.New("denied")), EvictionFailed},
		"for several budgets of a pod": {apierrors.NewInternalError(errors.New("this pod has more than one PodDisruptionBudget")), EvictionFailed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := startFragmented(t)
			f.server.with(func(s *server) {
				s.onEvict = func(pod gpu.Pod, _ bool) error {
					if pod.Name == "a5" {
						return test.refusal
					}
					return nil
				}
			})
			f.block(f.waits)
			f.later(evictDelay)
			f.wantEvicted("?a5")
			if f.underWay() {
				t.Error("a card is held that isn't freed")
			}
			if got := f.counts.of("evicted " + test.result); got != 1 {
				t.Errorf("%d rounds counted as %s", got, test.result)
			}
			f.later(evictInterval)
			f.wantEvicted("?a5") // It is not retried every second.
			f.later(evictPause)
			f.wantEvicted("?a5", "?a7", "a7") // The next best victim, while the first one is spared.
		})
	}
}

// A pod for which no card can be freed doesn't block pods of lower priority.
func TestEvictionGoesOnWithTheNextPod(t *testing.T) {
	second := ranked(newPod("second", 8), 8)
	f := startFragmented(t, withSecondNode(second))
	f.server.with(func(s *server) {
		s.onEvict = func(pod gpu.Pod, _ bool) error {
			if pod.Name == "c12" {
				return nil
			}
			return apierrors.NewForbidden(podResource, pod.Name, errors.New("denied"))
		}
	})
	f.block(f.waits)
	f.Blocked(second, slices.Values([]string{"n2"}), f.clock.Now())
	f.later(evictDelay)
	f.wantEvicted("?a5", "?c12", "c12")
}

func TestEvictionStopsWhileTheServerIsAway(t *testing.T) {
	second := ranked(newPod("second", 8), 8)
	f := startFragmented(t, withSecondNode(second))
	f.server.with(func(s *server) { s.onEvict = func(gpu.Pod, bool) error { return errLost } })
	f.block(f.waits)
	f.Blocked(second, slices.Values([]string{"n2"}), f.clock.Now())
	f.later(evictDelay)
	f.wantEvicted("?a5")
	f.later(evictInterval)
	f.wantEvicted("?a5", "?c12") // The other pod's turn.
	f.later(evictPause)
	f.wantEvicted("?a5", "?c12", "?a5") // No victim is spared because of an unavailable server.
}

// withSecondNode adds the pod and a node n2 of two cards of 16, with a pod with 12 of priority 1 on one and a pod with
// 12 of priority 2 on the other.
func withSecondNode(pod *corev1.Pod) func(*fragmented) {
	return func(f *fragmented) {
		f.others = append(f.others, fragmentedNode(f.t, "n2", 16, 16),
			ranked(boundPod("c12", 12, "n2", 0), 1), ranked(boundPod("d12", 12, "n2", 1), 2), pod)
	}
}

// The API server evicts no pod with several budgets.
func TestEvictionSparesPodsWithSeveralBudgets(t *testing.T) {
	f := startFragmented(t, func(f *fragmented) {
		label("x")(f.a5)
		f.others = append(f.others, newBudget("one", "x", 9), newBudget("two", "x", 9))
	})
	f.block(f.waits)
	f.later(evictDelay)
	f.wantEvicted("?a7", "a7")
}

// kube-scheduler doesn't clear a nomination if only fragmentation prevents the placement.
func TestEvictionForAVoidNomination(t *testing.T) {
	f := startFragmented(t, func(f *fragmented) {
		f.waits.Status.NominatedNodeName = "n2"
		f.others = append(f.others, fragmentedNode(f.t, "n2", 16, 16))
		f.others = append(f.others, boundPod("c9", 9, "n2", 0), edited(boundPod("d9", 9, "n2", 1), leavingSince(time.Hour)))
	})
	f.block(f.waits)
	f.later(evictDelay)
	f.wantEvicted("?a5", "a5")
	f.publishGone(f.a5)
	f.awaitHeld(f.a5, "not held")
	f.publishObject(edited(f.waits.DeepCopy(), label("changed")))
	f.await("the change", func() bool { pod, _ := f.pods.get("default", "waits"); return pod.Labels["app"] == "changed" })
	f.later(evictInterval)
	if f.fitsFor(9, 5) {
		t.Error("the freed card isn't held: the void nomination counts")
	}
	f.publishObject(edited(f.waits.DeepCopy(), nominated("n3")))
	f.await("a new nomination to count", func() bool { return f.fitsFor(9, 5) })
}

// A nomination to a node with room that doesn't admit the pod, such as a cordoned one, doesn't prevent a round.
func TestEvictionForANominationToACordonedNode(t *testing.T) {
	f := startFragmented(t, func(f *fragmented) {
		f.waits.Status.NominatedNodeName = "n2"
		cordoned := fragmentedNode(f.t, "n2", 16)
		cordoned.Spec.Unschedulable = true
		f.others = append(f.others, cordoned)
	})
	f.block(f.waits)
	f.later(evictDelay)
	f.wantEvicted("?a5", "a5")
}

// With more guarded nodes than maxPlans, the node on which a card can be freed still gets its turn.
func TestEvictionBehindManyGuardedNodes(t *testing.T) {
	var names []string
	f := startFragmented(t, func(f *fragmented) {
		f.others = append(f.others, newBudget("all", "x", 0))
		for i := range maxPlans {
			name := fmt.Sprint("guarded-", i)
			names = append(names, name)
			f.others = append(f.others, fragmentedNode(f.t, name, 16, 16),
				edited(boundPod("c-"+name, 12, name, 0), label("x")), edited(boundPod("d-"+name, 12, name, 1), label("x")))
		}
	})
	names = append(names, "n1")
	for range 100 {
		f.Blocked(f.waits, slices.Values(names), f.clock.Now())
		f.later(evictDelay)
		if f.underWay() {
			return
		}
		f.clock.Step(planPause)
	}
	t.Error("no card is freed")
}

// A filter call with a new nomination gives kube-scheduler time to delete its victims.
func TestEvictionWaitsAfterANomination(t *testing.T) {
	f := startFragmented(t)
	f.block(f.waits)
	f.clock.Step(evictDelay)
	waits := edited(f.waits.DeepCopy(), nominated("n1"))
	f.publishObject(waits)
	f.await("the nomination", func() bool { pod, _ := f.pods.get("default", "waits"); return pod.Status.NominatedNodeName != "" })
	f.block(waits)
	f.later(evictDelay - 1)
	f.wantEvicted()
	f.later(1)
	f.wantEvicted("?a5", "a5")
}

// Pods for which there is no plan give up their places among the remembered pods.
func TestEvictionOfManyBlockedPods(t *testing.T) {
	second := ranked(newPod("second", 8), 2)
	var hopeless []*corev1.Pod
	f := startFragmented(t, withSecondNode(second), func(f *fragmented) {
		for i := range maxBlocked {
			hopeless = append(hopeless, ranked(newPod(fmt.Sprint("hopeless-", i), 8), 1+int32(i)))
			f.others = append(f.others, hopeless[i])
		}
		ranked(f.a7, 200)
		ranked(f.a5, 200)
		ranked(f.b12, 200)
	})
	for _, pod := range hopeless {
		f.block(pod)
	}
	f.clock.Step(evictDelay)
	for range maxBlocked/maxTries + 1 {
		f.later(evictInterval)
	}
	f.Blocked(second, slices.Values([]string{"n2"}), f.clock.Now())
	f.later(evictDelay)
	f.wantEvicted("?c12", "c12")
}

func TestAnEvictionWhoseAnswerIsLostIsWaitedFor(t *testing.T) {
	f := startFragmented(t)
	f.server.with(func(s *server) {
		s.onEvict = func(_ gpu.Pod, dryRun bool) error {
			if dryRun {
				return nil
			}
			return errLost
		}
	})
	f.block(f.waits)
	f.later(evictDelay)
	f.wantEvicted("?a5", "a5")
	f.later(evictInterval)
	f.wantEvicted("?a5", "a5")
	f.server.with(func(s *server) { s.onEvict = nil })
	f.later(f.settler.fence())
	f.wantEvicted("?a5", "a5") // The eviction wasn't made.
	f.block(f.waits)
	f.later(evictPause)
	f.wantEvicted("?a5", "a5", "?a5", "a5")
}

// The card's remaining free memory isn't given to other pods while the eviction is in progress.
func TestEvictionHoldsTheCardFromTheStart(t *testing.T) {
	f := startFragmented(t)
	var where []int
	f.server.with(func(s *server) {
		s.onEvict = func(gpu.Pod, bool) error {
			holder, err := f.ledger.Reserve("n1", gpu.Pod{UID: "other", Priority: 9, Request: 3}, placement.Binpack, begin)
			if err != nil {
				return err
			}
			where = append(where, holder.Placement[0].Card)
			f.ledger.Remove("other")
			return nil
		}
	})
	f.block(f.waits)
	f.later(evictDelay)
	f.wantEvicted("?a5", "a5")
	if !slices.Equal(where, []int{1, 1}) {
		t.Errorf("another pod gets cards %v, want 1 each time", where)
	}
}

// The answer is lost, but the eviction was made: the freed memory is reserved for the round's pod.
func TestEvictionLostAnswerKeepsTheCard(t *testing.T) {
	f := startFragmented(t)
	f.server.with(func(s *server) {
		s.onEvict = func(_ gpu.Pod, dryRun bool) error {
			if dryRun {
				return nil
			}
			return errLost
		}
	})
	f.block(f.waits)
	f.later(evictDelay)
	f.leaves(f.a5)
	f.publishGone(f.a5)
	f.awaitHeld(f.a5, "not held")
	f.later(evictInterval)
	if f.fitsFor(9, 5) {
		t.Error("a pod of equal priority gets the freed card")
	}
}

// The victim is already gone when it is evicted, and the watch lags.
func TestEvictionOfAPodThatHasGone(t *testing.T) {
	f := startFragmented(t)
	f.server.with(func(s *server) {
		s.onEvict = func(pod gpu.Pod, _ bool) error { return apierrors.NewNotFound(podResource, pod.Name) }
	})
	f.block(f.waits)
	f.later(evictDelay)
	f.later(evictInterval)
	if !f.underWay() {
		t.Error("the round is over, though its victim has gone")
	}
}

// A victim that stays, for any reason, doesn't keep the card from other pods forever.
func TestARoundEndsWhereSomebodyStays(t *testing.T) {
	for name, test := range map[string]struct {
		leave func(f *fragmented)
		// patience is how long the round lasts. next are the evictions of the round after it.
		patience time.Duration
		next     []string
	}{
		"though its grace period is over": {func(f *fragmented) { f.leaves(f.a5) }, evictHold, []string{"?a7", "a7"}},
		"and isn't leaving at all":        {func(*fragmented) {}, 2*patient + settleMargin, []string{"?a5", "a5"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := startFragmented(t)
			f.block(f.waits)
			f.later(evictDelay)
			f.wantEvicted("?a5", "a5")
			test.leave(f)
			f.later(test.patience)
			if !f.underWay() {
				t.Error("the round is over too early")
			}
			f.later(evictInterval)
			f.later(evictInterval)
			if f.underWay() {
				t.Error("the round goes on for ever")
			}
			f.publishGone(f.b12)
			f.awaitHeld(f.b12, "not held")
			if !f.fitsFor(9, 16) {
				t.Error("room is still kept")
			}
			f.publishObject(f.b12)
			f.awaitHeld(f.b12, "bound n1 card 1")
			f.block(f.waits)
			f.later(evictDelay)
			f.wantEvicted("?a5", "a5") // There is no second round at once.
			f.clock.Step(evictRest)
			f.block(f.waits)
			f.later(0)
			f.later(evictDelay)
			f.wantEvicted(append([]string{"?a5", "a5"}, test.next...)...)
		})
	}
}

// If a pod of higher priority takes the freed card, another card is freed soon.
func TestEvictionOfACardThatAnotherPodTook(t *testing.T) {
	f := startFragmented(t, withSecondNode(newPod("second", 8)))
	blockOnBoth := func() { f.Blocked(f.waits, slices.Values([]string{"n1", "n2"}), f.clock.Now()) }
	blockOnBoth()
	f.later(evictDelay)
	f.publishGone(f.a5)
	f.awaitHeld(f.a5, "not held")
	high := ranked(boundPod("high", 9, "n1", 0), 10)
	f.publishObject(high)
	f.awaitHeld(high, "bound n1 card 0")
	f.later(evictInterval)
	if f.underWay() {
		t.Error("the round goes on, though its card is taken")
	}
	f.clock.Step(evictPause)
	blockOnBoth()
	f.later(evictDelay)
	f.wantEvicted("?a5", "a5", "?c12", "c12")
}

func TestATermsRoundsEndWithIt(t *testing.T) {
	f := startFragmented(t)
	f.block(f.waits)
	f.later(evictDelay)
	f.publishGone(f.a5)
	f.awaitHeld(f.a5, "not held")
	if f.fitsFor(9, 5) {
		t.Fatal("the freed card isn't held")
	}
	f.leads.set(errors.New("standing by"))
	f.later(evictInterval)
	if !f.fitsFor(9, 5) {
		t.Error("the card is still held by who leads no longer")
	}
	f.leads.set(nil)
	f.later(evictInterval)
	if f.underWay() || !f.fitsFor(9, 5) {
		t.Error("a later term goes on with what is long over")
	}
}

func TestACardIsHeldThoughAnotherNodeWasNominatedInBetween(t *testing.T) {
	f := startFragmented(t)
	f.block(f.waits)
	f.later(evictDelay)
	f.publishGone(f.a5)
	f.awaitHeld(f.a5, "not held")
	nominated := f.waits.DeepCopy()
	nominated.Status.NominatedNodeName = "n2"
	f.publishObject(nominated)
	f.await("the other node to count", func() bool { return f.fitsFor(9, 5) })
	f.publishObject(f.waits.DeepCopy())
	f.await("the card to be held again", func() bool { return !f.fitsFor(9, 5) })
}

// The Pod object of a request isn't kept: it can be as large as a request.
func TestABlockedPodIsNotKept(t *testing.T) {
	f := startFragmented(t)
	asked := weak.Make(func() *corev1.Pod {
		pod := f.waits.DeepCopy()
		f.block(pod)
		return pod
	}())
	f.await("the pod of the request to be collected", func() bool { goruntime.GC(); return asked.Value() == nil })
	f.later(evictDelay)
	f.wantEvicted("?a5", "a5")
	f.Blocked(f.waits, func(yield func(string) bool) {
		for yield("n1") {
		}
	}, f.clock.Now()) // The loop over the names ends at a limit.
}
