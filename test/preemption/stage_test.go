package preemption

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/framework"
)

var must = check.Must

var shared = &framework.Shared{Options: framework.Options{MemoryUnit: "GiB"}}

func TestMain(m *testing.M) { os.Exit(framework.RunShared(m, shared)) }

// start returns a cluster whose extender has these flags for the rest of the test, with the priority classes that pods use.
func start(t *testing.T, flags ...string) *framework.Cluster {
	t.Helper()
	c := shared.Start(t)
	if len(flags) > 0 {
		c.RestartExtenderWith(t, flags...)
	}
	for _, value := range []int32{1, 2, 3, 5, 9, 20, 30} {
		c.PriorityClass(t, value)
	}
	return c
}

// stage is a part of a test with one node, in a namespace of its own.
type stage struct {
	*framework.Namespace
	// node is the node's name.
	node string
	// slow is true if evicted pods end only when the test ends them.
	slow bool
}

// play runs a part of a test on a node with some cards of 16.
func play(t *testing.T, c *framework.Cluster, title string, cards int, act func(s *stage)) {
	t.Helper()
	t.Run(title, func(t *testing.T) {
		s := &stage{Namespace: c.NewNamespace(t)}
		s.node = s.NodeName("node")
		s.AddNodes(framework.MakeNode("node").Unit(gpu.GiB).Cards(cards, 16))
		act(s)
		s.CheckLedger()
	})
}

// pod builds a pod that requests GPU memory, or none if memory is 0. Its grace period is longer than any test.
func (s *stage) pod(name string, memory int64, priority int32) *framework.PodWrapper {
	return s.Pod(name, memory).PriorityClass(fmt.Sprint("p", priority)).GracePeriod(300)
}

// create creates a pod that requests GPU memory.
func (s *stage) create(name string, memory int64, priority int32) {
	s.Helper()
	s.Create(s.pod(name, memory, priority))
}

// place creates a pod, and checks its card.
func (s *stage) place(name string, memory int64, priority int32, card int) {
	s.Helper()
	s.create(name, memory, priority)
	s.wantCard(name, card)
}

// wantCard waits until the pod is bound, and checks its card.
func (s *stage) wantCard(name string, card int) {
	s.Helper()
	s.WantCard(s.WaitBound(name), s.node, card)
}

// started sets when pods started. Of pods with equal priority, kube-scheduler evicts those that started last.
func (s *stage) started(ago time.Duration, names ...string) {
	s.Helper()
	for _, name := range names {
		pod := s.Get(name)
		pod.Status.Phase, pod.Status.StartTime = corev1.PodRunning, new(metav1.NewTime(time.Now().Add(-ago)))
		_, err := s.Pods().UpdateStatus(s.Context(), pod, metav1.UpdateOptions{})
		must(s, err)
	}
}

// evicted waits until these pods are deleted, and ends them unless s.slow is set. It fails the test if others are deleted.
func (s *stage) evicted(names ...string) {
	s.Helper()
	for _, name := range names {
		s.Eventually("pod "+name+" is evicted", func(ctx context.Context) error {
			pod, err := s.Pods().Get(ctx, name, metav1.GetOptions{})
			switch {
			case apierrors.IsNotFound(err):
				return nil
			case err != nil:
				return err
			case pod.DeletionTimestamp == nil:
				return errors.New("it is not")
			case !s.slow:
				s.end(name)
			}
			return nil
		})
	}
	pods, err := s.List(s.Context())
	must(s, err)
	for i := range pods {
		if pods[i].DeletionTimestamp != nil && !slices.Contains(names, pods[i].Name) {
			s.Errorf("pod %s is also evicted", pods[i].Name)
		}
	}
}

// end removes a pod that is being deleted, like the kubelet when its containers have ended.
func (s *stage) end(name string) {
	s.Helper()
	err := s.Pods().Delete(s.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)})
	if err != nil && !apierrors.IsNotFound(err) {
		s.Fatal(err)
	}
}

// nominated waits until kube-scheduler has nominated the node for the pod.
func (s *stage) nominated(name string) {
	s.Helper()
	s.WaitPod(name, "is nominated", func(pod *corev1.Pod) bool { return pod.Status.NominatedNodeName == s.node })
}

// notEvicted fails the test if one of the pods is deleted.
func (s *stage) notEvicted(names ...string) {
	s.Helper()
	for _, name := range names {
		if s.Get(name).DeletionTimestamp != nil {
			s.Errorf("pod %s was evicted", name)
		}
	}
}
