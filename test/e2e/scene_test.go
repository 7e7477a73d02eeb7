package e2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// cardMiB is the memory of a card in the figures of the gpushare design.
const cardMiB = 16276

// stopWithin is the time within which a program must end after SIGTERM: what docs/node.md promises for the device plugin, and half of the grace
// period of the extender's pods. Both take a second at most on an idle machine.
const stopWithin = 9 * time.Second

// shared is a cluster without faults, replicated one with three extenders. Starting one takes seconds.
var (
	shared     = &framework.Shared{}
	replicated = &framework.Shared{Options: faulty(framework.Options{Replicas: 3, ExtenderArgs: shortLease})}
)

var must = check.Must

func TestMain(m *testing.M) { os.Exit(framework.RunShared(m, shared, replicated)) }

// scene is a part of a test in its own namespace.
type scene struct{ *framework.Namespace }

// play runs a scene and then checks the ledger.
func play(t *testing.T, c *framework.Cluster, title string, act func(s *scene)) {
	t.Helper()
	t.Run(title, func(t *testing.T) {
		s := &scene{c.NewNamespace(t)}
		act(s)
		s.CheckLedger()
	})
}

// node builds a node without kubelet that has cards with these sizes in MiB.
func node(name string, cards ...int64) *framework.NodeWrapper {
	n := framework.MakeNode(name)
	for _, memory := range cards {
		n.Cards(1, memory)
	}
	return n
}

// fill places pods of these sizes on a node, one after the other. They are named after the node: n1-0, n1-1, ...
func (s *scene) fill(name string, sizes ...int64) {
	s.Helper()
	for i, size := range sizes {
		s.Place(s.Pod(fmt.Sprintf("%s-%d", name, i), size).OnNode(s.NodeName(name)))
	}
}

// remove deletes pods and waits until the extender knows.
func (s *scene) remove(names ...string) {
	s.Helper()
	s.Delete(names...)
	s.CheckLedger()
}

// rejected waits until kube-scheduler has rejected the pod for this reason, which a node gave.
func (s *scene) rejected(name, reason string) {
	s.Helper()
	s.WaitEvent(name, "FailedScheduling", reason)
	if pod := s.Get(name); pod.Spec.NodeName != "" || pod.Status.Phase != corev1.PodPending {
		s.Errorf("pod %s is %s on node %q, want it pending", name, pod.Status.Phase, pod.Spec.NodeName)
	}
}

// rejectedWithoutPlugin creates a pod for a node without device plugin, and checks that it is rejected. It returns the pod's name. kube-scheduler can
// see the node's change later than the test, and bind a pod, which then fails.
func (s *scene) rejectedWithoutPlugin(m machine) string {
	s.Helper()
	for i := 0; ; i++ {
		name := fmt.Sprint("meanwhile-", i)
		s.Create(s.Pod(name, 5000).OnNode(m.Name))
		pod := s.WaitPod(name, "is bound or rejected", func(pod *corev1.Pod) bool {
			return pod.Spec.NodeName != "" || strings.Contains(framework.SchedulerMessage(pod), "1 Insufficient "+string(protocol.ResourceMemory))
		})
		if pod.Spec.NodeName == "" {
			return name
		}
		s.WaitPhase(name, corev1.PodFailed)
	}
}

// terminate ends a program by SIGTERM and checks that it ends in time, with status 0.
func terminate(t testing.TB, p *controlplane.Process) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), stopWithin)
	defer cancel()
	if err := p.Terminate(ctx); err != nil {
		t.Errorf("%s didn't end within %s of SIGTERM: %v\n%s", p.Name, stopWithin, err, p.Tail(10))
		must(t, p.Kill())
		return
	}
	if code := p.ExitCode(); code != 0 {
		t.Errorf("%s ended with status %d after SIGTERM, want 0\n%s", p.Name, code, p.Tail(10))
	}
}

// waitHits waits until a request has met the fault.
func (s *scene) waitHits(injection *controlplane.Injection) {
	s.Helper()
	s.Eventually("a request meets the fault", func(context.Context) error {
		if injection.Hits() == 0 {
			return fmt.Errorf("none has; the Events are %s", strings.Join(s.Events(s.Context(), ""), "; "))
		}
		return nil
	})
}
