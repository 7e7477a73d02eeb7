package extender

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/version"
)

type filterResult = extenderv1.ExtenderFilterResult

func names(of ...string) *[]string { return &of }

func TestFilterTheSeedsFigure(t *testing.T) {
	f := start(t, seedsFigure(t)...)
	got := answer[filterResult](t, f.post("filter", extenderv1.ExtenderArgs{Pod: newPod("p", 8138), NodeNames: names("n1", "n2", "n3")}), 200)
	want := filterResult{
		NodeNames: names("n3"),
		FailedNodes: extenderv1.FailedNodesMap{
			"n1": "no GPU card has enough free memory", "n2": "no GPU card has enough free memory, though the node's cards together have",
		},
		FailedAndUnresolvableNodes: extenderv1.FailedNodesMap{},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestFilterSaysWhyAndWhetherAnybodysLeavingCanHelp(t *testing.T) {
	whole := newNode(t, "whole", 100)
	whole.Status.Capacity[protocol.ResourceWholeCard] = amount("x", 1)["x"]
	f := start(t, newNode(t, "fits", 100), newNode(t, "full", 100), boundPod("a", 60, "full", 0),
		newNode(t, "small", 49, 49), newNode(t, "ill", 49, -100), whole)
	for _, request := range []int64{50, 51} { // The reasons don't depend on the size of the request.
		got := answer[filterResult](t, f.post("filter", extenderv1.ExtenderArgs{
			Pod: newPod("p", request), NodeNames: names("fits", "full", "small", "ill", "whole", "unknown"),
		}), 200)
		want := filterResult{
			NodeNames:   names("fits"),
			FailedNodes: extenderv1.FailedNodesMap{"full": placement.Full.String()},
			FailedAndUnresolvableNodes: extenderv1.FailedNodesMap{
				"small": placement.TooLarge.String(), "ill": placement.Unhealthy.String(),
				"whole": placement.WholeCards.String(), "unknown": placement.NotShared.String(),
			},
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}

func TestFilterAnswersInTheFormInWhichItIsAsked(t *testing.T) {
	f := start(t, newNode(t, "n1", 100), newNode(t, "n2", 10))
	nodes := &corev1.NodeList{Items: []corev1.Node{*newNode(t, "n1", 100), *newNode(t, "n2", 10)}}
	got := answer[filterResult](t, f.post("filter", extenderv1.ExtenderArgs{Pod: newPod("p", 50), Nodes: nodes}), 200)
	if got.NodeNames != nil || got.Nodes == nil || len(got.Nodes.Items) != 1 {
		t.Fatalf("answer %+v, want one whole node", got)
	}
	if diff := cmp.Diff(nodes.Items[0], got.Nodes.Items[0], cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("the node changed (-before +after):\n%s", diff)
	}
	if got.FailedAndUnresolvableNodes["n2"] != placement.TooLarge.String() {
		t.Errorf("of n2 it says %v", got.FailedAndUnresolvableNodes)
	}

	got = answer[filterResult](t, f.post("filter", extenderv1.ExtenderArgs{Pod: newPod("p", 50), NodeNames: names("n2")}), 200)
	if got.Nodes != nil || got.NodeNames == nil || len(*got.NodeNames) != 0 {
		t.Errorf("answer %+v, want an empty list of names", got)
	}
}

func TestPodsThatAskForNothingPassUntouched(t *testing.T) {
	f := start(t, newNode(t, "n1", 100))
	for name, handler := range map[string]http.Handler{"ready": f.handler, "not ready": f.over(unready{f.cluster})} {
		f.handler = handler
		got := answer[filterResult](t, f.post("filter", extenderv1.ExtenderArgs{Pod: newPod("p", 0), NodeNames: names("n1", "plain")}), 200)
		if diff := cmp.Diff(filterResult{NodeNames: names("n1", "plain")}, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		scores := answer[extenderv1.HostPriorityList](t, f.post("prioritize", extenderv1.ExtenderArgs{Pod: newPod("p", 0), NodeNames: names("n1", "plain")}), 200)
		if diff := cmp.Diff(extenderv1.HostPriorityList{{Host: "n1"}, {Host: "plain"}}, scores); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestPrioritizeFillsTheFullestCardFirst(t *testing.T) {
	f := start(t, newNode(t, "empty", 100, 100), newNode(t, "half", 100, 100), boundPod("a", 50, "half", 0), newNode(t, "small", 10))
	asked := names("empty", "half", "small", "unknown")
	got := answer[extenderv1.HostPriorityList](t, f.post("prioritize", extenderv1.ExtenderArgs{Pod: newPod("p", 50), NodeNames: asked}), 200)
	// half: its card is left full (8 of 8), the node half full (1 of 2). empty: half of 8, a quarter of 2.
	want := extenderv1.HostPriorityList{{Host: "empty", Score: 4}, {Host: "half", Score: 9}, {Host: "small"}, {Host: "unknown"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	// Whole nodes get the same scores.
	nodes := &corev1.NodeList{}
	for _, name := range *asked {
		nodes.Items = append(nodes.Items, corev1.Node{})
		nodes.Items[len(nodes.Items)-1].Name = name
	}
	got = answer[extenderv1.HostPriorityList](t, f.post("prioritize", extenderv1.ExtenderArgs{Pod: newPod("p", 50), Nodes: nodes}), 200)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("whole nodes (-want +got):\n%s", diff)
	}
}

func bindArgs(pod *corev1.Pod, node string) extenderv1.ExtenderBindingArgs {
	return extenderv1.ExtenderBindingArgs{PodNamespace: pod.Namespace, PodName: pod.Name, PodUID: pod.UID, Node: node}
}

func TestBindThenInspect(t *testing.T) {
	pod := newPod("p", 8138)
	f := start(t, append(seedsFigure(t), pod)...)
	for range 2 { // A repeated bind succeeds.
		if got := answer[extenderv1.ExtenderBindingResult](t, f.post("bind", bindArgs(pod, "n3")), 200); got.Error != "" {
			t.Fatal(got.Error)
		}
	}
	got := answer[inspection](t, f.call(http.MethodGet, Prefix+"/inspect/n3", ""), 200)
	want := inspection{Nodes: []nodeView{{
		Name: "n3", TotalGPU: 32552, UsedGPU: 32552,
		Devs: []cardView{
			{ID: 0, TotalGPU: 16276, UsedGPU: 16276, Pods: []podView{{"e", "default", 8138}, {"p", "default", 8138}}},
			{ID: 1, TotalGPU: 16276, UsedGPU: 16276, Pods: []podView{{"f", "default", 16276}}},
		},
	}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}

	full := newPod("q", 8138)
	if got := answer[extenderv1.ExtenderBindingResult](t, f.post("bind", bindArgs(full, "n3")), 200); !strings.Contains(got.Error, "not found") {
		t.Errorf("an unknown pod: %q", got.Error)
	}
}

// The test compares the exact text, because scripts of existing users read it.
func TestInspectKeepsItsShape(t *testing.T) {
	f := start(t, newNode(t, "n1", 100), boundPod("a", 60, "n1", 0), boundPod("b", 10, "n1", 7), newNode(t, "n2", 50))
	const want = `{"nodes":[{"name":"n1","totalGPU":100,"usedGPU":70,"devs":[` +
		`{"id":0,"totalGPU":100,"usedGPU":60,"pods":[{"name":"a","namespace":"default","usedGPU":60}]},` +
		`{"id":7,"totalGPU":0,"usedGPU":10,"pods":[{"name":"b","namespace":"default","usedGPU":10}]}]},` +
		`{"name":"n2","totalGPU":50,"usedGPU":0,"devs":[{"id":0,"totalGPU":50,"usedGPU":0,"pods":[]}]}]}` + "\n"
	if got := f.call(http.MethodGet, Prefix+"/inspect", "").Body.String(); got != want {
		t.Errorf("got  %swant %s", got, want)
	}
	got := answer[inspection](t, f.call(http.MethodGet, Prefix+"/inspect/nowhere", ""), 404)
	if len(got.Nodes) != 0 || got.Error != `node "nowhere" shares no GPU memory, or doesn't exist` {
		t.Errorf("an unknown node: %+v", got)
	}
}

// A node whose Node object was deleted is shown as long as pods are bound to it.
func TestInspectShowsWhoIsLeftOnANode(t *testing.T) {
	waits := newPod("waits", 5)
	waits.Status.NominatedNodeName = "promised"
	f := start(t, boundPod("left", 60, "deleted", 1), waits)
	want := inspection{Nodes: []nodeView{{Name: "deleted", UsedGPU: 60, Devs: []cardView{
		{ID: 1, UsedGPU: 60, Pods: []podView{{"left", "default", 60}}},
	}}}}
	for path, status := range map[string]int{"/inspect": 200, "/inspect/deleted": 200, "/inspect/promised": 404} {
		got := answer[inspection](t, f.call(http.MethodGet, Prefix+path, ""), status)
		if status == 404 {
			if len(got.Nodes) != 0 {
				t.Errorf("%s: %+v, want no node without pods", path, got)
			}
			continue
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", path, diff)
		}
	}
}

func TestBeforeTheLedgerStands(t *testing.T) {
	f := start(t, newNode(t, "n1", 100))
	f.handler = f.over(unready{f.cluster})
	const why = "the ledger is still being rebuilt from the API server"
	args := extenderv1.ExtenderArgs{Pod: newPod("p", 10), NodeNames: names("n1")}
	if got := answer[filterResult](t, f.post("filter", args), 200); got.Error != why || got.NodeNames != nil {
		t.Errorf("filter: %+v", got)
	}
	if got := answer[extenderv1.ExtenderBindingResult](t, f.post("bind", bindArgs(newPod("p", 10), "n1")), 200); got.Error != why {
		t.Errorf("bind: %+v", got)
	}
	if got := answer[inspection](t, f.call(http.MethodGet, Prefix+"/inspect", ""), 503); got.Error != why {
		t.Errorf("inspect: %+v", got)
	}
	for what, w := range map[string]*httptest.ResponseRecorder{
		"prioritize": f.post("prioritize", args), "preempt": f.post("preempt", args), "readyz": f.call(http.MethodGet, "/readyz", ""),
	} {
		if w.Code != http.StatusServiceUnavailable || strings.TrimSpace(w.Body.String()) != why {
			t.Errorf("%s: %d %s", what, w.Code, w.Body)
		}
	}
	if w := f.call(http.MethodGet, "/livez", ""); w.Code != 200 {
		t.Errorf("livez: %d: a process that waits is no reason to kill it", w.Code)
	}
}

func TestHealthVersionAndMetrics(t *testing.T) {
	f := start(t, newNode(t, "n1", 100), boundPod("a", 60, "n1", 0))
	for _, path := range []string{"/livez", "/readyz"} {
		if w := f.call(http.MethodGet, path, ""); w.Code != 200 || w.Body.String() != "ok\n" {
			t.Errorf("%s: %d %q", path, w.Code, w.Body)
		}
	}
	if got := answer[version.Info](t, f.call(http.MethodGet, "/version", ""), 200); got != version.Get() || got.Version == "" {
		t.Errorf("version %+v", got)
	}
	f.post("filter", extenderv1.ExtenderArgs{Pod: newPod("p", 50), NodeNames: names("n1", "n2")})
	f.call(http.MethodPost, Prefix+"/bind", "")
	page := f.call(http.MethodGet, "/metrics", "").Body.String()
	for _, line := range []string{
		`gpushare_extender_filtered_nodes_total{reason="full"} 1`,
		`gpushare_extender_filtered_nodes_total{reason="not_shared"} 1`,
		`gpushare_extender_request_duration_seconds_count{outcome="ok",verb="filter"} 1`,
		`gpushare_extender_request_duration_seconds_count{outcome="error",verb="bind"} 1`,
		`gpushare_extender_card_memory_allocated_units{card="0",node="n1"} 60`,
		`gpushare_extender_cache_synced 1`,
	} {
		if !strings.Contains(page, line+"\n") {
			t.Errorf("metrics lack %s:\n%s", line, page)
		}
	}
}

func TestAPanicEndsOneRequestOnly(t *testing.T) {
	f := start(t, newNode(t, "n1", 100))
	working := f.handler
	f.handler = f.over(broken{})
	const want = "internal error, see the extender's log"
	args := extenderv1.ExtenderArgs{Pod: newPod("p", 10), NodeNames: names("n1")}
	if got := answer[filterResult](t, f.post("filter", args), 200); got.Error != want {
		t.Errorf("filter: %+v", got)
	}
	if got := answer[extenderv1.ExtenderBindingResult](t, f.post("bind", bindArgs(newPod("p", 10), "n1")), 200); got.Error != want {
		t.Errorf("bind: %+v", got)
	}
	for _, verb := range []string{"prioritize", "preempt"} {
		if w := f.post(verb, args); w.Code != 500 || strings.TrimSpace(w.Body.String()) != want {
			t.Errorf("%s: %d %s", verb, w.Code, w.Body)
		}
	}
	if f.observer.panics != 4 {
		t.Errorf("%d panics counted, want 4", f.observer.panics)
	}
	f.handler = working
	if got := answer[filterResult](t, f.post("filter", args), 200); got.Error != "" || len(*got.NodeNames) != 1 {
		t.Errorf("the next request: %+v", got)
	}
}
