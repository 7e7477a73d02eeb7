package scheduling

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// startFilter starts a Scheduler of an empty cluster. A test adds nodes to its ledger.
func startFilter(t *testing.T, filterBest int) *fixture {
	t.Helper()
	return start(t, Options{FilterBest: filterBest})
}

// addNode adds a node with cards of the given sizes; a negative size makes an unhealthy card.
func (f *fixture) addNode(name string, cards ...gpu.Memory) {
	spec := ledger.NodeSpec{Unit: gpu.MiB}
	for i, memory := range cards {
		card := gpu.Card{Index: i, Memory: max(memory, -memory), NUMANode: gpu.NoNUMANode}
		if memory < 0 {
			card.Unhealthy = "Xid 79"
		}
		spec.Cards = append(spec.Cards, card)
	}
	f.ledger.SetNode(name, spec)
}

// allocate binds a pod to a card of the node.
func (f *fixture) allocate(node string, card int, memory gpu.Memory) {
	uid := gpu.PodUID(fmt.Sprintf("%s-%d", node, card))
	f.ledger.SetBound(node, gpu.Pod{UID: uid, Request: memory}, gpu.On(card, memory), time.Unix(1, 0))
}

// wantPassed expects these nodes, in this order.
func (f *fixture) wantPassed(pod *corev1.Pod, nodes []string, want ...string) {
	f.t.Helper()
	if got := f.filter(pod, nodes...).Names(); !slices.Equal(got, want) {
		f.t.Errorf("%s: %q pass, want %q", pod.Name, got, want)
	}
}

func TestFilterReasons(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := startFilter(t, 0)
		f.addNode("fits", 100)
		f.addNode("full", 100)
		f.allocate("full", 0, 60)
		f.addNode("fragmented", 100, 100)
		f.allocate("fragmented", 0, 75)
		f.allocate("fragmented", 1, 70)
		f.addNode("small", 49, 49)
		f.addNode("ill", 49, -100)
		f.ledger.SetNode("whole", ledger.NodeSpec{WholeCards: true})
		nodes := []string{"fits", "full", "fragmented", "small", "ill", "whole", "unknown"}
		want := []reasons.Reason{
			reasons.Fits, reasons.Full, reasons.Fragmented, reasons.TooLarge, reasons.Unhealthy, reasons.WholeCards, reasons.NotShared,
		}
		for i, request := range []int64{50, 51} { // The reasons don't depend on the size of the request.
			got := f.filter(fake.Pod("p", request), nodes...)
			if diff := cmp.Diff(want, got.Reasons); diff != "" || !slices.Equal(got.Names(), nodes[:1]) {
				t.Errorf("request %d: %q pass, reasons (-want +got):\n%s", request, got.Names(), diff)
			}
			for _, reason := range want {
				if n := f.observer.Count("filtered " + reason.Text()); n != i+1 {
					t.Errorf("%d nodes counted as %q, want %d", n, reason, i+1)
				}
			}
		}
	})
}

// With FilterBest, filter names the best nodes only, and gives no reasons. It names all nodes, and gives all reasons, if
// there are no more candidate nodes than that, or if none fits.
func TestFilterBest(t *testing.T) {
	// For a request of 50: half and twin leave their card full (9 points), empty and vacant leave half of it (4).
	all := []string{"empty", "half", "full", "fuller", "twin", "vacant", "unknown"}
	for name, test := range map[string]struct {
		best    int
		request int64
		nodes   []string
		want    []string
		reasons bool
	}{
		"all of the best score":                  {5, 50, all, []string{"fuller", "half", "twin"}, false},
		"the most suitable of them":              {2, 50, all, []string{"fuller", "half"}, false},
		"one":                                    {1, 50, all, []string{"fuller"}, false},
		"the best of the candidate nodes":        {2, 50, []string{"empty", "full", "vacant"}, []string{"empty", "vacant"}, false},
		"few candidate nodes":                    {7, 60, all, []string{"empty", "half", "fuller", "twin", "vacant"}, true},
		"no node fits":                           {1, 60, []string{"full", "unknown"}, []string{}, true},
		"no limit":                               {0, 60, []string{"full", "empty"}, []string{"empty"}, true},
		"a pod that has an allocation on a node": {5, 50, all, []string{"half"}, false},
	} {
		t.Run(name, bubble(func(t *testing.T) {
			f := startFilter(t, test.best)
			for _, node := range []string{"empty", "vacant", "half", "twin", "fuller"} {
				f.addNode(node, 100, 100)
			}
			f.addNode("full", 50)
			f.allocate("full", 0, 50)
			f.allocate("half", 0, 50)
			f.allocate("twin", 1, 50)
			f.allocate("fuller", 0, 50)
			f.allocate("fuller", 1, 30)
			pod := fake.Pod("p", test.request)
			if slices.Equal(test.want, []string{"half"}) {
				pod.UID = "half-0"
			}
			got := f.filter(pod, test.nodes...)
			if diff := cmp.Diff(test.want, got.Names()); diff != "" || (got.Reasons != nil) != test.reasons {
				t.Errorf("reasons: %v, nodes (-want +got):\n%s", got.Reasons, diff)
			}
		}))
	}
}

func TestFilterWithoutGPUMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for name, f := range map[string]*fixture{"synced": startFilter(t, 1), "not synced": newFixture(t, Options{FilterBest: 1})} {
			f.wantPassed(fake.Pod("p", 0), []string{"a", "b"}, "a", "b")
			scores, err := f.Prioritize(fake.Pod("p", 0), []string{"a", "b"})
			if err != nil || !slices.Equal(scores, []int64{0, 0}) {
				t.Errorf("%s: scores %v, %v", name, scores, err)
			}
		}
	})
}

func TestFilterNotSynced(t *testing.T) {
	f := newFixture(t, Options{FilterBest: 1})
	if _, err := f.Filter(fake.Pod("p", 1), []string{"a"}); !errors.Is(err, clustercache.ErrNotSynced) {
		t.Errorf("Filter: %v", err)
	}
	if _, err := f.Prioritize(fake.Pod("p", 1), []string{"a"}); !errors.Is(err, clustercache.ErrNotSynced) {
		t.Errorf("Prioritize: %v", err)
	}
}

// The nodes that filter names are those with the highest score of prioritize.
func TestFilterAgreesWithPrioritize(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := []string{"n1", "n2", "n3", "n4", "n5", "unknown"}
		best, every := startFilter(t, len(all)-1), startFilter(t, 0)
		for _, f := range []*fixture{best, every} {
			f.addNode("n1", 100, 60)
			f.addNode("n2", 100)
			f.allocate("n2", 0, 35)
			f.addNode("n3", 80, 100)
			f.allocate("n3", 0, 40)
			f.addNode("n4", 20, 20)
			f.addNode("n5", 100)
			f.allocate("n5", 0, 34)
		}
		for request := int64(1); request <= 100; request++ {
			pod := fake.Pod("p", request)
			scores, err := every.Prioritize(pod, all)
			check.Must(t, err)
			var want []string
			for _, candidate := range every.filter(pod, all...).Passed {
				if scores[candidate.Node] == slices.Max(scores) {
					want = append(want, all[candidate.Node])
				}
			}
			got := best.filter(pod, all...).Names()
			best.requeue.BindStarted("uid-p") // Without it, the next call would name all nodes.
			slices.Sort(got)
			if !slices.Equal(want, got) {
				t.Errorf("request %d: %q, want %q", request, got, want)
			}
		}
	})
}

// Between filter and bind of a pod, filter names other nodes for other pods, if there are any.
func TestFilterTentative(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := startFilter(t, 1)
		f.addNode("near", 100)
		f.allocate("near", 0, 30)
		f.addNode("far", 100)
		f.allocate("far", 0, 10)
		nodes := []string{"near", "far"}
		first, second, third := fake.Pod("first", 60), fake.Pod("second", 60), fake.Pod("third", 60)
		passed := func(pod *corev1.Pod, want ...string) {
			t.Helper()
			f.wantPassed(pod, nodes, want...)
			f.requeue.BindStarted(gpu.PodUID(pod.UID)) // Without it, the next call would name all nodes.
		}
		passed(first, "near")
		passed(first, "near") // A pod's own tentative placement doesn't count for it.
		passed(second, "far")
		passed(third, "near") // No other node is left, and the first pod's bind may never arrive.
		for pod, node := range map[*corev1.Pod]string{first: "near", second: "far"} {
			if _, err := f.ledger.Reserve(node, protocol.Pod(pod), placement.Binpack, f.Clock.Now()); err != nil {
				t.Fatal(err)
			}
		}
		passed(third)
	})
}

// Filter decides from the cache only if this has the pod in the state of the call.
func TestFilterStateOfPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		version := func(v string) fake.PodEdit { return func(pod *corev1.Pod) { pod.ResourceVersion = v } }
		pod := fake.Pod("p", 60, version("7"))
		f := start(t, Options{}, fake.Node("n1", 100), pod)
		for v, want := range map[string][]string{"7": {"n1"}, "8": {}} {
			// In another state, the pod asks for two cards, which the node doesn't have.
			check.Equal(t, "nodes for version "+v, want, f.filter(fake.Edited(pod, fake.Cards(2), version(v)), "n1").Names())
		}
	})
}
