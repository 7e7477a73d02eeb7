package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync/atomic"
	"testing"

	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// TestNeighbours shows another extender that makes a pod fail although a node has room, while nothing happens in the cluster.
// The pod must not stay pending for the five minutes after which kube-scheduler retries it by itself, which is longer than
// framework.Patience.
func TestNeighbours(t *testing.T) {
	// Another extender rejects one node for every pod.
	var rejects atomic.Pointer[string]
	rejects.Store(new(string))
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var args extenderv1.ExtenderArgs
		if err := json.NewDecoder(r.Body).Decode(&args); err != nil || args.NodeNames == nil {
			http.Error(w, "no names", http.StatusBadRequest)
			return
		}
		answer := extenderv1.ExtenderFilterResult{FailedNodes: extenderv1.FailedNodesMap{}}
		left := slices.DeleteFunc(slices.Clone(*args.NodeNames), func(node string) bool { return node == *rejects.Load() })
		if answer.NodeNames = &left; len(left) < len(*args.NodeNames) {
			answer.FailedNodes[*rejects.Load()] = "the other extender rejects it"
		}
		_ = json.NewEncoder(w).Encode(answer)
	}))
	defer other.Close()
	c := framework.StartForTest(t, framework.Options{ControlPlane: controlplane.Options{Scheduler: controlplane.SchedulerOptions{
		Edits: []controlplane.ConfigEdit{func(config map[string]any) error {
			config["extenders"] = append(config["extenders"].([]any), map[string]any{
				"urlPrefix": other.URL, "filterVerb": "filter", "nodeCacheCapable": true,
			})
			return nil
		}},
	}}})

	play(t, c, "another extender rejects the node that filter returns", func(s *scene) {
		var nodes []*framework.NodeWrapper
		for i := range 40 {
			nodes = append(nodes, node(fmt.Sprintf("n%d", i), cardMiB))
		}
		s.AddNodes(nodes[:39]...)
		s.AddNodes(nodes[39])
		s.fill("n39", cardMiB) // From here on kube-scheduler knows all nodes: its watch has them in the order in which they were made.
		best := s.NodeName("n7")
		s.fill("n7", 8138)
		rejects.Store(&best)
		if pod := s.Place(s.Pod("pod", 8138)); pod.Spec.NodeName == best {
			s.Errorf("the pod is on %s, which the other extender rejects", best)
		}
		s.WaitEvent("pod", "FailedScheduling", "the other extender rejects it")
	})
}
