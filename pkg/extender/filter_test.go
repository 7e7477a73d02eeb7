package extender

import (
	"bytes"
	"fmt"
	"net/http"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/cluster"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// best makes filter pass only the best k nodes, however often it is called for a pod.
func (f *fixture) best(k int) { f.bestOver(forgetful{f.cluster}, k) }

func (f *fixture) bestOver(c Cluster, k int) {
	options := f.options(c)
	options.FilterBest = k
	f.handler = NewServer(options).Handler()
}

// forgetful is a Cluster that never requires filter to name all nodes, even if no bind followed the last call.
type forgetful struct{ *cluster.Cluster }

func (forgetful) NameAll(gpu.PodUID) bool { return false }

// A later request can be read into the buffer of an earlier one. No name of the earlier request may appear in the answer,
// neither from the buffer nor from the cached list of names.
func TestFilterRemembersNoNamesThatWereOverwritten(t *testing.T) {
	f := start(t, newNode(t, "free-1", 100), newNode(t, "free-2", 100), newNode(t, "full-1", 40), newNode(t, "full-2", 40))
	options := f.options(f.cluster)
	options.FilterBest, options.FilterBestAbove = 2, 1
	f.handler = NewServer(options).Handler()
	free, full := names("free-1", "free-2"), names("full-1", "full-2")
	for range 3 {
		for asked, want := range map[*[]string]*[]string{free: free, full: {}} {
			got := answer[filterResult](t, f.post("filter", extenderv1.ExtenderArgs{Pod: newPod("p", 50), NodeNames: asked}), http.StatusOK)
			if diff := cmp.Diff(want, got.NodeNames); diff != "" {
				t.Fatalf("%v (-want +got):\n%s", *asked, diff)
			}
		}
	}
}

func TestFewAndSmallBuffersAreKept(t *testing.T) {
	b := newBodies()
	var all []*bytes.Buffer
	for range 2 * keptBuffers {
		all = append(all, b.buffer(1))
	}
	large := b.buffer(1)
	large.Grow(maxKept + 1)
	b.keep(large)
	if n := len(b.buffers); n != 0 {
		t.Errorf("%d are kept, one of %d bytes", n, large.Cap())
	}
	for _, buffer := range all {
		buffer.WriteString("something")
		b.keep(buffer)
	}
	if n := len(b.buffers); n != keptBuffers {
		t.Errorf("%d are kept, want %d", n, keptBuffers)
	}
	if again := b.buffer(1); again.Len() != 0 {
		t.Errorf("%q is left in one", again)
	}
}

func TestFilterPassesTheBest(t *testing.T) {
	// For a request of 50: half and twin leave their card full (9 points), empty and vacant leave half of it (4).
	f := start(t, newNode(t, "empty", 100, 100), newNode(t, "vacant", 100, 100), newNode(t, "full", 50), boundPod("a", 50, "full", 0),
		newNode(t, "half", 100, 100), boundPod("b", 50, "half", 0), newNode(t, "twin", 100, 100), boundPod("c", 50, "twin", 1),
		newNode(t, "fuller", 100, 100), boundPod("d", 50, "fuller", 0), boundPod("e", 30, "fuller", 1))
	all := names("empty", "half", "full", "fuller", "twin", "vacant", "unknown")
	for name, test := range map[string]struct {
		best  int
		asked *[]string
		want  filterResult
	}{
		"all of the best score":              {5, all, filterResult{NodeNames: names("fuller", "half", "twin")}},
		"the most suitable of them":          {2, all, filterResult{NodeNames: names("fuller", "half")}},
		"one":                                {1, all, filterResult{NodeNames: names("fuller")}},
		"where the best are not in question": {2, names("empty", "full", "vacant"), filterResult{NodeNames: names("empty", "vacant")}},
		"all that fit where few are on offer, and the others": {7, all, filterResult{NodeNames: names("empty", "half", "fuller", "twin", "vacant"), FailedNodes: extenderv1.FailedNodesMap{}, FailedAndUnresolvableNodes: extenderv1.FailedNodesMap{"full": placement.TooLarge.String(), "unknown": placement.NotShared.String()}}},
		"where nothing fits every reason":                     {1, names("full", "unknown"), filterResult{NodeNames: &[]string{}, FailedNodes: extenderv1.FailedNodesMap{}, FailedAndUnresolvableNodes: extenderv1.FailedNodesMap{"full": placement.TooLarge.String(), "unknown": placement.NotShared.String()}}},
		"without a limit all, and the others":                 {0, names("full", "empty"), filterResult{NodeNames: names("empty"), FailedNodes: extenderv1.FailedNodesMap{}, FailedAndUnresolvableNodes: extenderv1.FailedNodesMap{"full": placement.TooLarge.String()}}},
	} {
		t.Run(name, func(t *testing.T) {
			f.best(test.best)
			request := int64(50)
			if test.want.FailedNodes != nil {
				request = 60
			}
			got := answer[filterResult](t, f.post("filter", extenderv1.ExtenderArgs{Pod: newPod("p", request), NodeNames: test.asked}), 200)
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	t.Run("whole nodes", func(t *testing.T) {
		f.best(2)
		asked := &corev1.NodeList{}
		for _, name := range *all {
			asked.Items = append(asked.Items, corev1.Node{})
			asked.Items[len(asked.Items)-1].Name = name
		}
		got := answer[filterResult](t, f.post("filter", extenderv1.ExtenderArgs{Pod: newPod("p", 50), Nodes: asked}), 200)
		if len(got.Nodes.Items) != 2 || got.Nodes.Items[0].Name != "fuller" || got.Nodes.Items[1].Name != "half" {
			t.Errorf("got %v", got.Nodes.Items)
		}
	})
	t.Run("a pod that may be on a node already", func(t *testing.T) {
		f.best(5)
		got := answer[filterResult](t, f.post("filter", extenderv1.ExtenderArgs{Pod: boundPod("b", 50, "half", 0), NodeNames: all}), 200)
		if diff := cmp.Diff(filterResult{NodeNames: names("half")}, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}

// The nodes that filter passes are those with the highest score of prioritize.
func TestFilterAndPrioritizeAgree(t *testing.T) {
	f := start(t, newNode(t, "n1", 100, 60), newNode(t, "n2", 100), boundPod("a", 35, "n2", 0), newNode(t, "n3", 80, 100),
		boundPod("b", 40, "n3", 0), newNode(t, "n4", 20, 20), newNode(t, "n5", 100), boundPod("c", 34, "n5", 0))
	all := names("n1", "n2", "n3", "n4", "n5", "unknown")
	for request := int64(1); request <= 100; request++ {
		args := extenderv1.ExtenderArgs{Pod: newPod("p", request), NodeNames: all}
		f.best(0)
		fits := answer[filterResult](t, f.post("filter", args), 200)
		scores, top := map[string]int64{}, int64(-1)
		for _, score := range answer[extenderv1.HostPriorityList](t, f.post("prioritize", args), 200) {
			scores[score.Host] = score.Score
		}
		var want []string
		for _, name := range *fits.NodeNames {
			switch {
			case scores[name] > top:
				top, want = scores[name], []string{name}
			case scores[name] == top:
				want = append(want, name)
			}
		}
		f.best(len(*all) - 1)
		got := answer[filterResult](t, f.post("filter", args), 200)
		slices.Sort(*got.NodeNames)
		if diff := cmp.Diff(want, *got.NodeNames); diff != "" {
			t.Errorf("request %d (-want +got):\n%s", request, diff)
		}
	}
}

// noted records what filter reports to the cluster about its answer, except Passed and Refused.
type noted struct {
	Cluster
	notes []string
}

func (n *noted) Sampled(_ gpu.PodUID, asked int) {
	n.notes = append(n.notes, fmt.Sprint("sampled ", asked))
}

func (n *noted) NamedFew(uid gpu.PodUID) {
	n.notes = append(n.notes, "named few")
	n.Cluster.NamedFew(uid)
}

func TestFilterNotesWhatMayFailAfterwards(t *testing.T) {
	for name, test := range map[string]struct {
		best  int
		pod   *corev1.Pod
		asked *[]string
		want  []string
	}{
		"some of the nodes that fit": {1, newPod("some", 60), names("near", "far", "full"), []string{"named few"}},
		"the only node that fits":    {1, newPod("only", 60), names("near", "full"), nil},
		"every node that fits":       {0, newPod("every", 60), names("near", "far"), nil},
		"none":                       {1, newPod("none", 60), names("full", "unknown"), []string{"sampled 2"}},
		"no GPU memory":              {1, newPod("other", 0), names("near", "far"), nil},
	} {
		t.Run(name, func(t *testing.T) {
			f := start(t, newNode(t, "near", 100), boundPod("a", 30, "near", 0), newNode(t, "far", 100), newNode(t, "full", 50))
			state := &noted{Cluster: f.cluster}
			f.bestOver(state, test.best)
			answer[filterResult](t, f.post("filter", extenderv1.ExtenderArgs{Pod: test.pod, NodeNames: test.asked}), 200)
			if diff := cmp.Diff(test.want, state.notes); diff != "" {
				t.Errorf("notes (-want +got):\n%s", diff)
			}
		})
	}
}

// Filter names only the best of the nodes that fit. A later phase of kube-scheduler may reject these. If filter is called
// for the pod again without a bind in between, it names all nodes that fit. After a failed bind, it names only the best
// again.
func TestFilterNamesEveryNodeAfterTheBestWasRejected(t *testing.T) {
	pod := newPod("p", 60)
	f := start(t, pod, newNode(t, "near", 100), boundPod("a", 30, "near", 0), newNode(t, "far", 100), boundPod("full", 60, "other", 0), newNode(t, "other", 100))
	f.bestOver(f.cluster, 1)
	args := extenderv1.ExtenderArgs{Pod: pod, NodeNames: names("near", "far", "other")}
	expect := func(want ...string) {
		t.Helper()
		if diff := cmp.Diff(&want, answer[filterResult](t, f.post("filter", args), 200).NodeNames); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
	expect("near")
	expect("near", "far")
	expect("near", "far")
	if got := answer[extenderv1.ExtenderBindingResult](t, f.post("bind", bindArgs(pod, "other")), 200); got.Error == "" {
		t.Fatal("bound to a full node")
	}
	expect("near")
}

// Between filter and bind of a pod, filter passes other nodes for other pods, if there are any.
func TestPodsInFlightDoNotMeet(t *testing.T) {
	first, second, third := newPod("first", 60), newPod("second", 60), newPod("third", 60)
	f := start(t, first, second, third, newNode(t, "near", 100), boundPod("a", 30, "near", 0), newNode(t, "far", 100), boundPod("b", 10, "far", 0))
	f.best(1)
	passed := func(pod *corev1.Pod) *[]string {
		return answer[filterResult](t, f.post("filter", extenderv1.ExtenderArgs{Pod: pod, NodeNames: names("near", "far")}), 200).NodeNames
	}
	expect := func(pod *corev1.Pod, want ...string) {
		t.Helper()
		if diff := cmp.Diff(&want, passed(pod)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", pod.Name, diff)
		}
	}
	expect(first, "near")
	expect(first, "near") // A pod's own tentative placement doesn't count for it.
	expect(second, "far")
	expect(third, "near") // No other node is left, and the first pod's bind may never arrive.
	for pod, node := range map[*corev1.Pod]string{first: "near", second: "far"} {
		if got := answer[extenderv1.ExtenderBindingResult](t, f.post("bind", bindArgs(pod, node)), 200); got.Error != "" {
			t.Fatal(got.Error)
		}
	}
	if got := passed(third); len(*got) != 0 {
		t.Errorf("third: %v, though both are taken", *got)
	}
}

// The same holds with few candidate nodes, when filter passes every node that fits and the score decides.
func TestPodsInFlightDoNotMeetWhereTheScoreDecides(t *testing.T) {
	f := start(t, newNode(t, "near", 100), boundPod("a", 30, "near", 0), newNode(t, "far", 100), boundPod("b", 10, "far", 0))
	f.best(32)
	expect := func(name string, want ...string) {
		t.Helper()
		args := extenderv1.ExtenderArgs{Pod: newPod(name, 60), NodeNames: names("near", "far")}
		got := answer[filterResult](t, f.post("filter", args), 200).NodeNames
		if diff := cmp.Diff(&want, got); diff != "" {
			t.Fatalf("%s (-want +got):\n%s", name, diff)
		}
		if len(*got) > 1 { // kube-scheduler calls prioritize only for more than one node.
			args.NodeNames = got
			if scores := answer[extenderv1.HostPriorityList](t, f.post("prioritize", args), 200); scores[0].Score <= scores[1].Score {
				t.Fatalf("scores %v, want the first to win", scores)
			}
		}
	}
	expect("first", "near", "far")
	expect("second", "far") // kube-scheduler doesn't call prioritize for a single node.
	expect("third", "near", "far")
}
