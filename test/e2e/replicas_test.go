package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// shortLease lets another replica lead soon. A killed leader is replaced when its Lease and the bind timeout are over.
var shortLease = []string{
	"--bind-timeout=1s", "--leader-elect-lease-duration=3s", "--leader-elect-renew-deadline=2s", "--leader-elect-retry-period=200ms",
}

// TestReplicas changes the leader during a stream of pods. No pod may be lost and no card allocated twice.
func TestReplicas(t *testing.T) {
	c := replicated.Start(t)

	play(t, c, "all replicas are ready, and one answers", func(s *scene) {
		leader := s.waitLeader(-1)
		for i, url := range c.ReplicaURLs {
			if _, err := framework.Fetch(s.Context(), url+"/readyz"); err != nil {
				s.Errorf("replica %d: %v", i, err)
			}
			switch rejection := s.rejection(url); {
			case i == leader && rejection != "":
				s.Errorf("the leader rejects the call: %s", rejection)
			case i != leader && !strings.Contains(rejection, "doesn't lead"):
				s.Errorf("replica %d is on standby and answers %q", i, rejection)
			}
		}
	})

	play(t, c, "a killed leader is replaced", func(s *scene) {
		pods := newStream(s, 6)
		leader := s.waitLeader(-1)
		pods.next(20)
		start := time.Now()
		must(s, c.Replicas[leader].Kill())
		pods.next(20)
		next := s.waitLeader(leader)
		s.Logf("replica %d answered %v after replica %d was killed", next, time.Since(start).Round(time.Millisecond), leader)
		pods.waitAll()
		s.CheckLedger()
		must(s, c.Replicas[leader].Start(s.Context()))
	})

	play(t, c, "a rolling update", func(s *scene) {
		pods := newStream(s, 6)
		for range controlplane.Times(2, 20) { // The leader first each time, which is the worst order.
			leader := s.waitLeader(-1)
			pods.next(5)
			start := time.Now()
			terminate(s, c.Replicas[leader])
			pods.next(5)
			next := s.waitLeader(leader)
			s.Logf("replica %d answered %v after replica %d was terminated", next, time.Since(start).Round(time.Millisecond), leader)
			must(s, c.Replicas[leader].Start(s.Context()))
		}
		pods.waitAll()
	})

	play(t, c, "a frozen leader rejects calls when it resumes", func(s *scene) {
		pods := newStream(s, 6)
		leader := s.waitLeader(-1)
		pods.next(20)
		must(s, c.Replicas[leader].Pause())
		pods.next(20)
		s.waitLeader(leader)
		pods.next(10)
		must(s, c.Replicas[leader].Resume())
		if rejection := s.rejection(c.ReplicaURLs[leader]); !strings.Contains(rejection, "doesn't lead") {
			s.Errorf("the former leader answers %q", rejection)
		}
		pods.next(10)
		pods.waitAll()
	})
}

// TestLateBinding freezes a leader between its last check of the Lease and its write. The write arrives when the next leader
// has given the card to another pod. The node rejects the late pod.
func TestLateBinding(t *testing.T) {
	c := replicated.Start(t)
	gpu := addMachine(t, c, framework.NodeSpec{Name: "node"})
	playOn(t, c, gpu, "the node rejects the late pod", func(s *scene) {
		leader := s.waitLeader(-1)
		// All three pods together request what the node has, so that its kubelet, which compares only sums, admits them.
		s.Place(s.Pod("other", 12207).OnNode(gpu.Name))
		late := c.Proxy.Inject(func(r *http.Request) bool {
			return strings.HasSuffix(r.URL.Path, "/pods/late/binding")
		}, 1, controlplane.Late)
		defer late.Lift()
		s.Create(s.Pod("late", 12207).OnNode(gpu.Name))
		s.waitHits(late)
		must(s, c.Replicas[leader].Pause())
		// From now on only the write in flight can bind the late pod to the node.
		const taint = "example.com/first"
		tainted := []byte(`{"spec":{"taints":[{"key":"` + taint + `","effect":"NoSchedule"}]}}`)
		_, err := c.Client.CoreV1().Nodes().Patch(s.Context(), gpu.Name, types.StrategicMergePatchType, tainted, metav1.PatchOptions{})
		must(s, err)
		s.Create(s.Pod("first", 8138).OnNode(gpu.Name).Tolerate(taint))
		s.waitLeader(leader)
		s.WaitAssigned("first")
		s.checkContainers(gpu, "first")

		late.Lift()
		s.WaitPod("late", "is bound, and rejected by its node", func(pod *corev1.Pod) bool {
			return pod.Spec.NodeName == gpu.Name && pod.Status.Phase == corev1.PodFailed
		})
		s.WaitEvent("late", "GPUCardRefused")
		s.checkContainers(gpu, "first")
		s.CheckLedger()
		must(s, c.Replicas[leader].Resume())
		if rejection := s.rejection(c.ReplicaURLs[leader]); !strings.Contains(rejection, "doesn't lead") {
			s.Errorf("the former leader answers %q", rejection)
		}
	})
}

// waitLeader waits until another replica than not is published and answers, and returns it.
func (s *scene) waitLeader(not int) (leader int) {
	s.Helper()
	s.Eventually("a replica leads", func(ctx context.Context) error {
		leader = s.Cluster.Leader(ctx)
		if leader < 0 || leader == not {
			return fmt.Errorf("replica %d is published", leader)
		}
		if rejection := s.rejection(s.Cluster.ReplicaURLs[leader]); rejection != "" {
			return errors.New(rejection)
		}
		return nil
	})
	return leader
}

// rejection returns the error with which an extender answers a filter call, or "".
func (s *scene) rejection(url string) string {
	s.Helper()
	body, err := json.Marshal(extenderv1.ExtenderArgs{Pod: s.Pod("asked", 1).UID("asked").Obj(), NodeNames: &[]string{}})
	must(s, err)
	request, err := http.NewRequestWithContext(s.Context(), http.MethodPost, url+"/gpushare-scheduler/filter", bytes.NewReader(body))
	must(s, err)
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err.Error()
	}
	defer response.Body.Close()
	var answer extenderv1.ExtenderFilterResult
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil || response.StatusCode != http.StatusOK {
		return fmt.Sprintf("%s: %v", response.Status, err)
	}
	return answer.Error
}
