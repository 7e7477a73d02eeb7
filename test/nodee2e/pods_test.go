package nodee2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/framework"
)

// longEnv selects the long forms of tests.
const longEnv = "GPUSHARE_TEST_LONG"

// inLong returns long in the long form of a test, and short otherwise.
func inLong(long, short int) int {
	if os.Getenv(longEnv) != "" {
		return long
	}
	return short
}

// TestPods runs pods on a node with equal cards, without faults.
func TestPods(t *testing.T) {
	c := startCluster(t, cardMiB, cardMiB, cardMiB, cardMiB)

	c.run(t, "pods of one size at once", func(s *scenario) { s.create(s.pods(inLong(60, 30), 1)...) })
	c.run(t, "init containers, sidecars, several containers", func(s *scenario) {
		s.create(
			s.pod(2).Container("second", 2).Container("third", 1), s.pod(2).Container("second", 2).Container("third", 1),
			s.pod(2).InitContainer("init", 2), s.pod(2).InitContainer("init", 4), s.pod(4).InitContainer("init", 1),
			s.pod(2).Sidecar("sidecar", 1), s.pod(2).Sidecar("sidecar", 2).Container("second", 2),
			s.pod(1).InitContainer("init", 1).Sidecar("sidecar", 1).Container("second", 1),
			s.pod(1).InitContainer("first", 1).InitContainer("second", 2), s.pod(2).Container("plain", 0),
			s.pod(1).InitContainer("init", 5).Sidecar("sidecar", 1).InitContainer("second", 3).Sidecar("another", 2).Container("app", 1),
			s.pod(2).Sidecar("sidecar", 1).InitContainer("init", 4).Sidecar("another", 1).InitContainer("last", 2),
		)
	})
	c.run(t, "pods that ignore SIGTERM keep their card through their grace period", func(s *scenario) {
		s.createAndWait(repeat(4, func() *framework.PodWrapper { return ignoreSIGTERM(s.pod(15), 3) })...)
		s.delete(s.names()...)
		s.create(s.pods(8, 7)...)
	})
	c.run(t, "pods with nodeName and scheduled pods at once fill the node", func(s *scenario) {
		s.otherDevices = true
		s.create(append(s.onNode(s.pods(6, 5)), s.pods(6, 5)...)...)
	})
	c.run(t, "pods of all shapes are created and deleted, a quarter of the node is free", func(s *scenario) {
		s.churn(inLong(300, 40), s.total()*3/4)
	})
	c.run(t, "a static pod is rejected, also by a kubelet that starts with it", (*scenario).testStaticPod)
}

// onNode sets the node in the pods' spec, so that no scheduler handles the pods and the extender chooses no cards for them.
func (s *scenario) onNode(pods []*framework.PodWrapper) []*framework.PodWrapper {
	for _, pod := range pods {
		pod.Node(s.node.name)
	}
	return pods
}

// churn creates the given number of pods, 8 to 40 at a time, of one size or of many, and deletes older pods to make room.
// The requests of all pods together never exceed limit.
func (s *scenario) churn(pods int, limit int64) {
	s.Helper()
	// If a quarter of four cards is free, at least one card has room for the largest pod.
	const largest = 4
	for s.made < pods {
		size := min(8+s.random.Int64N(33), int64(max(pods-s.made, 8)))
		next := func() *framework.PodWrapper { return s.randomPod(1 + s.random.Int64N(largest)) }
		if s.random.IntN(2) == 0 {
			one := 1 + s.random.Int64N(min(largest, limit/size))
			next = func() *framework.PodWrapper { return s.pod(one) }
		}
		var created []*framework.PodWrapper
		var sum int64
		for range size {
			pod := next()
			if sum+framework.GPUMemOf(pod.Obj()) > limit {
				s.made-- // This pod is not created.
				break
			}
			sum += framework.GPUMemOf(pod.Obj())
			created = append(created, pod)
		}
		s.makeRoom(limit - sum)
		if s.random.IntN(4) == 0 {
			// Such a pod doesn't wait until terminating pods are gone.
			s.waitTerminated()
			s.onNode(created)
		}
		s.create(created...)
		if s.guesses {
			s.deleteRejected(len(created) / 2)
		}
		s.waitConsistent()
	}
}

// testStaticPod: a static pod gets no memory of a card, and the pods on the node are unaffected.
func (s *scenario) testStaticPod() {
	s.createAndWait(s.pods(4, 3)...)
	stillRunning := s.expectRunning()
	static := s.pod(2).Namespace(s.ID)
	recordEnv(&static.Spec)
	static.Spec.HostNetwork = true
	remove, err := s.node.addStatic(static.Obj())
	check.Must(s, err)
	s.Cleanup(func() { check.Must(s, remove()) })
	s.Eventually("the node has an Event for the static pod", func(ctx context.Context) error {
		events, err := s.Client.CoreV1().Events(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.kind=Node,reason=GPUCardRefused"})
		if err != nil {
			return err
		}
		for _, event := range events.Items {
			if strings.Contains(event.Message, "No pod that the API server has on this node waits for 2 units of GPU memory, and static pods are not supported") {
				return nil
			}
		}
		return fmt.Errorf("%d other Events", len(events.Items))
	})
	s.waitConsistent()
	check.Must(s, s.node.kubelet.Restart(s.Context()))
	s.waitCards(s)
	// The static pod has no allocation: the node can be filled to the last unit. The large pods come first: until the
	// restarted kubelet has rejected the static pod, its units count, and the small pods would go to the other cards.
	s.createAndWait(s.pods(3, 15)...)
	s.createAndWait(s.pods(3, 1)...)
	if used := s.used(); used != s.total() {
		s.Errorf("the pods have %d of the node's %d", used, s.total())
	}
	stillRunning()
}

// TestWithoutPodResources: the plugin can't find out through PodResources for which pod the kubelet calls it, as before
// Kubernetes 1.34. Pod matching then relies on the order of the pods only, which is sometimes wrong. The containers'
// environments can't be changed, so everything else must be repaired to agree with them.
func TestWithoutPodResources(t *testing.T) {
	c := startCluster(t, cardMiB, cardMiB, cardMiB, cardMiB)
	check.Must(t, c.node.restartPlugin(t.Context(), "--pod-resources-socket=/nonexistent.sock"))
	c.waitCards(t)

	c.run(t, "16 pods of one size at once", func(s *scenario) {
		s.guesses = true
		s.create(s.pods(16, 3)...)
	})
	c.run(t, "pods of two sizes are bound while the kubelet is stopped", func(s *scenario) {
		s.guesses = true
		for range inLong(4, 1) {
			s.makeRoom(0)
			s.waitTerminated()
			// The checkpoint contains deleted pods until the kubelet writes it again. A restarted kubelet counts their devices as
			// used.
			s.createAndWait(s.pod(1))
			check.Must(s, s.node.kubelet.Kill())
			s.create(append(s.pods(10, 2), s.pods(20, 1)...)...)
			s.waitBound()
			check.Must(s, s.node.kubelet.Start(s.Context()))
			s.deleteRejected(s.made)
			s.waitConsistent()
		}
	})
	c.run(t, "pods of all shapes are created and deleted", func(s *scenario) {
		s.guesses = true
		s.churn(inLong(100, 20), s.total()*3/4)
	})
}
