package extender

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/test/fake"
)

// fuzzed is the router over a cluster whose pods are all bound, or ask for no GPU memory. So no input may change the
// ledger.
type fuzzed struct {
	*cluster
	observer *fakeObserver
	handler  http.Handler
	before   []ledger.Node
}

// startFuzzed has the filter figure of the existing extender's design document. n1 has 4069 MiB free in total, n2 has 4069
// MiB free on each card, and n3 has 8138 MiB free on one card.
func startFuzzed(f *testing.F) *fuzzed {
	f.Helper()
	c := startCluster(f)
	for _, name := range []string{"n1", "n2", "n3"} {
		c.addNode(name, cardMemory, cardMemory)
	}
	for _, pod := range []*corev1.Pod{
		fake.Pod("plain", 0), fake.Pod("a", 16276, fake.Bound("n1", 0)), fake.Pod("b", 12207, fake.Bound("n1", 1)), fake.Pod("c", 12207, fake.Bound("n2", 0)),
		fake.Pod("d", 12207, fake.Bound("n2", 1)), fake.Pod("e", 8138, fake.Bound("n3", 0)), fake.Pod("f", 16276, fake.Bound("n3", 1)),
	} {
		c.addPod(pod)
	}
	c.awaitNode(f, "n3", 2)
	observer := newObserver()
	server := newServer(c.Scheduler, func(o *Options) { o.Observer = observer })
	return &fuzzed{cluster: c, observer: observer, handler: server.Handler(), before: c.Nodes()}
}

// post sends the body and returns the answer. The request must neither panic nor change the ledger.
func (f *fuzzed) post(t *testing.T, verb string, body []byte) *httptest.ResponseRecorder {
	t.Helper()
	w := post(f.handler, verb, string(body))
	if f.observer.count(verb+" panic") > 0 {
		t.Fatal("panic")
	}
	if diff := cmp.Diff(f.before, f.Nodes()); diff != "" {
		t.Fatalf("the ledger changed (-before +after):\n%s", diff)
	}
	if w.Body.Len() == 0 {
		t.Error("an empty answer")
	}
	return w
}

func FuzzFilter(f *testing.F) {
	fuzzed := startFuzzed(f)
	f.Fuzz(func(t *testing.T, body []byte) {
		got := answer[filterResult](t, fuzzed.post(t, "filter", body), 200)
		if got.Error == "" && got.NodeNames == nil && got.Nodes == nil {
			// kube-scheduler reads an answer without nodes as "no node fits". That is correct only if the request has no
			// nodes.
			var args extenderv1.ExtenderArgs
			if err := json.Unmarshal(body, &args); err != nil || len((&nodesArgs{args}).names()) > 0 {
				t.Errorf("neither nodes nor an error")
			}
		}
	})
}

func FuzzPrioritize(f *testing.F) {
	fuzzed := startFuzzed(f)
	f.Fuzz(func(t *testing.T, body []byte) {
		w := fuzzed.post(t, "prioritize", body)
		if w.Code == http.StatusBadRequest {
			return
		}
		for _, score := range answer[extenderv1.HostPriorityList](t, w, 200) {
			if score.Score < extenderv1.MinExtenderPriority || score.Score > extenderv1.MaxExtenderPriority {
				t.Errorf("score %+v", score)
			}
		}
	})
}

func FuzzPreempt(f *testing.F) {
	fuzzed := startFuzzed(f)
	f.Fuzz(func(t *testing.T, body []byte) {
		w := fuzzed.post(t, "preempt", body)
		if w.Code == http.StatusBadRequest {
			return
		}
		for node, victims := range answer[extenderv1.ExtenderPreemptionResult](t, w, 200).NodeNameToMetaVictims {
			if len(victims.Pods) == 0 {
				t.Errorf("no victims on node %q", node)
			}
		}
	})
}

func FuzzBind(f *testing.F) {
	fuzzed := startFuzzed(f)
	f.Fuzz(func(t *testing.T, body []byte) { answer[bindResult](t, fuzzed.post(t, "bind", body), 200) })
}
