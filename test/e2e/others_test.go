package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// sampledScheduler is a profile of kube-scheduler that looks for feasible nodes only until it has found 100.
const sampledScheduler = "sampled"

// What a kube-scheduler is configured with beside gpushare can make a pod fail that has room, in a cluster in which nothing
// happens. It must not wait for the five minutes after which kube-scheduler retries it by itself, which is longer than patience.
func TestBesideOtherConfiguration(t *testing.T) {
	// A second extender, which rejects one node of every pod.
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
	bed := framework.StartForTest(t, framework.Options{ControlPlane: controlplane.Options{Scheduler: controlplane.SchedulerOptions{
		Edits: []controlplane.ConfigEdit{func(config map[string]any) error {
			config["extenders"] = append(config["extenders"].([]any), map[string]any{
				"urlPrefix": other.URL, "filterVerb": "filter", "nodeCacheCapable": true,
			})
			config["profiles"] = []any{
				map[string]any{"schedulerName": corev1.DefaultSchedulerName},
				map[string]any{"schedulerName": sampledScheduler, "percentageOfNodesToScore": 1},
			}
			return nil
		}},
	}}})

	play(t, bed, "another extender rejects the node that filter names", func(s *scene) {
		var nodes []controlplane.Node
		for i := range 40 {
			nodes = append(nodes, controlplane.Node{Name: fmt.Sprintf("n%d", i), Cards: mebibytes(cardMiB)})
		}
		s.addNodes(nodes...)
		best := s.at("n7")
		s.fill(best, 8138)
		rejects.Store(&best)
		s.create("asks-8138", 8138)
		if pod := s.bound("asks-8138"); pod.Spec.NodeName == best {
			s.Errorf("the pod is on %s, which the other extender rejects", best)
		}
		s.event("asks-8138", "FailedScheduling", "the other extender rejects it")
	})

	play(t, bed, "a sample of the nodes has no card with room, another node has", func(s *scene) {
		nodes := []controlplane.Node{{Name: "roomy", Cards: mebibytes(cardMiB)}}
		for i := range 450 {
			nodes = append(nodes, controlplane.Node{Name: fmt.Sprintf("n%d", i), Cards: mebibytes(cardMiB/2, cardMiB/2)})
		}
		s.addNodes(nodes...)
		const wakes = "gpushare_extender_queue_wakes_total"
		for i := range 20 {
			name, before := fmt.Sprintf("asks-%d", i), s.metric(wakes)
			s.create(name, 12207, func(pod *corev1.Pod) { pod.Spec.SchedulerName = sampledScheduler })
			s.sits(s.bound(name), s.at("roomy"), 0)
			if s.metric(wakes) > before {
				return
			}
			// It was in the sample of the first attempt, or of the second, which follows when the pod's condition has changed. For
			// the next pod kube-scheduler begins with another node.
			s.remove(name)
		}
		s.Error("the node with room was always in the sample: this scene shows nothing")
	})
}
