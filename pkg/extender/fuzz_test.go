package extender

import (
	"encoding/json"
	"net/http"
	"testing"

	"github.com/google/go-cmp/cmp"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/ledger"
)

// fuzzed returns the router and the initial content of its ledger. The pods that it knows are already bound, so no input may
// change the ledger.
func fuzzed(f *testing.F) (*fixture, []ledger.Node) {
	fixture := start(f, append(seedsFigure(f), newPod("plain", 0))...)
	return fixture, fixture.cluster.Ledger().Nodes()
}

func (f *fixture) unharmed(t *testing.T, before []ledger.Node) {
	t.Helper()
	if f.observer.panics != 0 {
		t.Fatal("a verb panicked")
	}
	if diff := cmp.Diff(before, f.cluster.Ledger().Nodes()); diff != "" {
		t.Fatalf("the ledger changed (-before +after):\n%s", diff)
	}
}

func FuzzFilter(f *testing.F) {
	fixture, before := fuzzed(f)
	f.Fuzz(func(t *testing.T, body []byte) {
		got := answer[filterResult](t, fixture.call(http.MethodPost, Prefix+"/filter", string(body)), 200)
		if got.Error == "" && got.NodeNames == nil && got.Nodes == nil {
			// kube-scheduler reads an answer without nodes as "no node fits". That is correct only if the request has no
			// nodes.
			var args extenderv1.ExtenderArgs
			if err := json.Unmarshal(body, &args); err != nil || len((&nodesArgs{args}).names()) > 0 {
				t.Errorf("neither nodes nor an error")
			}
		}
		fixture.unharmed(t, before)
	})
}

func FuzzPrioritize(f *testing.F) {
	fixture, before := fuzzed(f)
	f.Fuzz(func(t *testing.T, body []byte) {
		w := fixture.call(http.MethodPost, Prefix+"/prioritize", string(body))
		if w.Code != http.StatusBadRequest {
			for _, score := range answer[extenderv1.HostPriorityList](t, w, 200) {
				if score.Score < extenderv1.MinExtenderPriority || score.Score > extenderv1.MaxExtenderPriority {
					t.Errorf("score %+v", score)
				}
			}
		} else if w.Body.Len() == 0 {
			t.Error("an error without words")
		}
		fixture.unharmed(t, before)
	})
}

func FuzzPreempt(f *testing.F) {
	fixture, before := fuzzed(f)
	f.Fuzz(func(t *testing.T, body []byte) {
		w := fixture.call(http.MethodPost, Prefix+"/preempt", string(body))
		if w.Code != http.StatusBadRequest {
			for node, victims := range answer[extenderv1.ExtenderPreemptionResult](t, w, 200).NodeNameToMetaVictims {
				if len(victims.Pods) == 0 {
					t.Errorf("no victims on node %q", node)
				}
			}
		} else if w.Body.Len() == 0 {
			t.Error("an error without words")
		}
		fixture.unharmed(t, before)
	})
}

func FuzzBind(f *testing.F) {
	fixture, before := fuzzed(f)
	f.Fuzz(func(t *testing.T, body []byte) {
		answer[extenderv1.ExtenderBindingResult](t, fixture.call(http.MethodPost, Prefix+"/bind", string(body)), 200)
		fixture.unharmed(t, before)
	})
}
