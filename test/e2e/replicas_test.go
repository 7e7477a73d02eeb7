package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
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

// Several extenders of which one answers: hand-overs lose no pod and give no card away twice.
func TestReplicas(t *testing.T) {
	bed := framework.StartForTest(t, framework.Options{
		Replicas: 3, ThroughProxy: true,
		// A leader that dies is missed for the rest of its Lease, and for as long as a write of its may appear.
		ExtenderArgs: []string{
			"--bind-timeout=1s", "--leader-elect-lease-duration=3s", "--leader-elect-renew-deadline=2s", "--leader-elect-retry-period=200ms",
		},
	})
	load := func(s *scene) *stream {
		var nodes []controlplane.Node
		for i := range 6 {
			nodes = append(nodes, controlplane.Node{Name: fmt.Sprintf("n%d", i), Cards: mebibytes(cardMiB, cardMiB, cardMiB, cardMiB)})
		}
		s.addNodes(nodes...)
		return &stream{scene: s, random: rand.New(rand.NewPCG(1, 2))}
	}

	play(t, bed, "every replica is ready, one is published, and only that one answers", func(s *scene) {
		leader := s.awaitLeader(-1)
		for i, url := range bed.ReplicaURLs {
			if _, err := framework.Fetch(s.Context(), url+"/readyz"); err != nil {
				s.Errorf("replica %d: %v", i, err)
			}
			switch refusal := s.refusal(url); {
			case i == leader && refusal != "":
				s.Errorf("the leader refuses: %s", refusal)
			case i != leader && !strings.Contains(refusal, "doesn't lead"):
				s.Errorf("replica %d, which stands by, answers %q", i, refusal)
			}
		}
	})

	play(t, bed, "a leader that is asked to end hands over in the middle of a stream of pods", func(s *scene) {
		pods := load(s)
		leader := s.awaitLeader(-1)
		pods.next(20)
		start := time.Now()
		terminate(s, bed.Replicas[leader])
		next := s.awaitLeader(leader)
		s.Logf("replica %d answered %v after replica %d was asked to end", next, time.Since(start).Round(time.Millisecond), leader)
		pods.next(20)
		pods.awaitAll()
		s.checkBooks()
		must(s, bed.Replicas[leader].Start(s.Context()))
	})

	play(t, bed, "a leader that is killed is replaced in the middle of a stream of pods", func(s *scene) {
		pods := load(s)
		leader := s.awaitLeader(-1)
		pods.next(20)
		start := time.Now()
		must(s, bed.Replicas[leader].Kill())
		pods.next(20)
		next := s.awaitLeader(leader)
		s.Logf("replica %d answered %v after replica %d was killed", next, time.Since(start).Round(time.Millisecond), leader)
		pods.awaitAll()
		s.checkBooks()
		must(s, bed.Replicas[leader].Start(s.Context()))
	})

	play(t, bed, "a rolling update goes through in the middle of a stream of pods", func(s *scene) {
		pods := load(s)
		// The leader first each time: the worst order that there is.
		for range controlplane.Times(3, 20) {
			leader := s.awaitLeader(-1)
			pods.next(5)
			terminate(s, bed.Replicas[leader])
			pods.next(5)
			must(s, bed.Replicas[leader].Start(s.Context()))
		}
		pods.awaitAll()
		s.checkBooks()
		s.Logf("%d pods made, %d bound at the end and the others deleted", pods.made, len(pods.alive))
	})

	play(t, bed, "a leader that was frozen and wakes up late refuses", func(s *scene) {
		pods := load(s)
		leader := s.awaitLeader(-1)
		pods.next(20)
		must(s, bed.Replicas[leader].Pause())
		pods.next(20)
		s.awaitLeader(leader)
		pods.next(10)
		must(s, bed.Replicas[leader].Resume())
		if refusal := s.refusal(bed.ReplicaURLs[leader]); !strings.Contains(refusal, "doesn't lead") {
			s.Errorf("the leader that woke up late answers %q", refusal)
		}
		pods.next(10)
		pods.awaitAll()
		s.checkBooks()
	})
}

// What a leader that freezes in the instant between its last look at the clock and its write can still do: the write
// arrives when another leader has given the card away. The node doesn't give out what the card hasn't.
func TestABindingOfALeaderLongGone(t *testing.T) {
	bed := framework.StartForTest(t, framework.Options{
		Replicas: 2, ThroughProxy: true,
		ExtenderArgs: []string{
			"--bind-timeout=1s", "--leader-elect-lease-duration=3s", "--leader-elect-renew-deadline=2s", "--leader-elect-retry-period=200ms",
		},
	})
	node := addMachine(t, bed, framework.NodeSpec{Name: "node", Cards: []uint64{cardMiB, cardMiB}})
	playOn(t, bed, node, "is caught at the node", func(s *scene) {
		leader := s.awaitLeader(-1)
		// With this the three have just what the node has: its kubelet, which sees the sum alone, has nothing against them.
		s.place("other", 12207, on(node.Name))
		late := bed.Proxy.Inject(func(r *http.Request) bool {
			return strings.HasSuffix(r.URL.Path, "/pods/late/binding")
		}, 1, controlplane.Late)
		defer late.Lift()
		s.create("late", 12207, on(node.Name))
		eventually(s, "the Binding is under way", func(context.Context) error {
			if late.Hits() == 0 {
				return errors.New("not yet")
			}
			return nil
		})
		must(s, bed.Replicas[leader].Pause())
		// Only the write that is under way can bring the late one to the node now.
		closed := []byte(`{"spec":{"taints":[{"key":"example.com/first","effect":"NoSchedule"}]}}`)
		_, err := bed.Client.CoreV1().Nodes().Patch(s.Context(), node.Name, types.StrategicMergePatchType, closed, metav1.PatchOptions{})
		must(s, err)
		s.create("first", 8138, on(node.Name), func(pod *corev1.Pod) {
			pod.Spec.Tolerations = []corev1.Toleration{{Key: "example.com/first", Operator: corev1.TolerationOpExists}}
		})
		s.awaitLeader(leader)
		first := s.assigned("first")
		s.handed(node, first)

		late.Lift()
		s.await("late", "bound, and refused by its node", func(pod *corev1.Pod) bool {
			return pod.Spec.NodeName == node.Name && pod.Status.Phase == corev1.PodFailed
		})
		s.event("late", "GPUCardRefused")
		s.handed(node, s.get("first"))
		s.checkBooks()
		must(s, bed.Replicas[leader].Resume())
		if refusal := s.refusal(bed.ReplicaURLs[leader]); !strings.Contains(refusal, "doesn't lead") {
			s.Errorf("the leader that woke up late answers %q", refusal)
		}
	})
}

// awaitLeader waits until another replica than that one is published and answers, and returns it.
func (s *scene) awaitLeader(not int) (leader int) {
	s.Helper()
	eventually(s, "a replica leads", func(ctx context.Context) error {
		leader = s.bed.Leader(ctx)
		if leader < 0 || leader == not {
			return fmt.Errorf("published is %d", leader)
		}
		if refusal := s.refusal(s.bed.ReplicaURLs[leader]); refusal != "" {
			return errors.New(refusal)
		}
		return nil
	})
	return leader
}

// refusal returns the error with which an extender answers a filter call, or "".
func (s *scene) refusal(url string) string {
	s.Helper()
	names := []string{}
	pod := s.pod("asked", 1)
	pod.UID, pod.Namespace = "asked", s.name
	body, err := json.Marshal(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &names})
	must(s, err)
	status, text := request(s.T, http.MethodPost, url+"/gpushare-scheduler/filter", string(body))
	var answer extenderv1.ExtenderFilterResult
	if err := json.Unmarshal([]byte(text), &answer); err != nil || status != http.StatusOK {
		return fmt.Sprintf("status %d: %s", status, text)
	}
	return answer.Error
}
