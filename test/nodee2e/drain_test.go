package nodee2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/leader"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/framework"
	"github.com/gpushare/gpushare/test/pages"
)

// drainLeader drains the node of the leader with the commands of docs/operations.md, while GPU pods are created and deleted. The
// PodDisruptionBudget must allow the eviction of the leader's pod, the leader must hand the Lease over to the standby, and no
// pod may fail. The drained node has no cards, because the load's pods have no controller and kubectl drain refuses such
// pods.
func (s *installation) drainLeader(t *testing.T) {
	t.Helper()
	blocks, err := pages.Commands("docs/operations.md", "Drain a node")
	check.Must(t, err)
	drain, uncordon, _ := strings.Cut(strings.ReplaceAll(blocks[0], "NODE", s.worker.name), "\n")

	before := s.moveLeaderToWorker(t)
	load := s.startLoad(t, "drain")
	time.Sleep(2 * time.Second) // Let some load run.
	begun := time.Now()
	out := s.shell.run(t, "", drain)
	took := time.Since(begun)
	if evicted := "evicting pod kube-system/" + before.pod; !strings.Contains(out, evicted) || strings.Contains(out, "will retry") {
		t.Errorf("want %q at the first try, got:\n%s", evicted, out)
	}
	after := s.waitOtherLeader(t, before.pod)
	// A standby that isn't handed the Lease waits until it expires.
	if waited := after.since.Sub(begun); waited >= leader.DefaultLeaseDuration-leader.DefaultRetryPeriod {
		t.Errorf("it leads %v after the drain began: the Lease wasn't handed over", waited)
	}
	t.Logf("drained in %v; the other replica led %v after the drain had begun", took.Round(time.Millisecond), after.since.Sub(begun).Round(time.Millisecond))
	time.Sleep(2 * time.Second) // Let some load run under the new leader.
	for _, pod := range load(t) {
		t.Errorf("pod %s failed, %s: %s", pod.Name, pod.Status.Reason, pod.Status.Message)
	}
	s.shell.run(t, "", uncordon)
	s.awaitBudget(t)
}

// leadership is the pod that leads and the time since which it leads.
type leadership struct {
	pod   string
	since time.Time
}

// leads returns the pod that holds the extender's Lease.
func (s *installation) leads(ctx context.Context) (leadership, error) {
	var lease *coordinationv1.Lease
	lease, err := s.Client.CoordinationV1().Leases("kube-system").Get(ctx, "gpushare-extender", metav1.GetOptions{})
	if err != nil || lease.Spec.HolderIdentity == nil || lease.Spec.AcquireTime == nil {
		return leadership{}, err
	}
	pod, _, _ := strings.Cut(*lease.Spec.HolderIdentity, "_")
	return leadership{pod, lease.Spec.AcquireTime.Time}, nil
}

// moveLeaderToWorker deletes replicas until the leader is on the worker and the standby is on the other node.
func (s *installation) moveLeaderToWorker(t *testing.T) leadership {
	t.Helper()
	for range 10 {
		s.awaitBudget(t)
		leading, err := s.leads(t.Context())
		check.Must(t, err)
		nodes := map[string]string{}
		for _, pod := range s.extenders(t) {
			nodes[pod.Name] = pod.Spec.NodeName
		}
		surplus := leading.pod
		for name, node := range nodes {
			switch {
			case name == leading.pod:
			case node == nodes[leading.pod]:
				surplus = name // The next one goes to the other node.
			case node != s.worker.name:
				return leading
			}
		}
		check.Must(t, s.Client.CoreV1().Pods("kube-system").Delete(t.Context(), surplus, metav1.DeleteOptions{}))
		s.waitOtherLeader(t, surplus)
	}
	t.Fatal("no leader runs on the worker")
	return leadership{}
}

// waitOtherLeader waits until another pod leads.
func (s *installation) waitOtherLeader(t *testing.T, before string) (after leadership) {
	t.Helper()
	framework.Eventually(t, "another replica leads", func(ctx context.Context) (err error) {
		if after, err = s.leads(ctx); err == nil && (after.pod == before || after.pod == "") {
			err = fmt.Errorf("%q leads, %q led before", after.pod, before)
		}
		return err
	})
	return after
}

// extenders returns the pods of the extender's replicas.
func (s *installation) extenders(t *testing.T) []corev1.Pod {
	t.Helper()
	pods, err := s.Client.CoreV1().Pods("kube-system").List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=extender"})
	check.Must(t, err)
	return pods.Items
}

// expectSeparateNodes fails the test unless the replicas are on different nodes.
func (s *installation) expectSeparateNodes(t *testing.T) {
	t.Helper()
	where := map[string][]string{}
	for _, pod := range s.extenders(t) {
		where[pod.Spec.NodeName] = append(where[pod.Spec.NodeName], pod.Name)
	}
	if len(where) != 2 {
		t.Errorf("both replicas are on one node: %v", where)
	}
}

// awaitBudget waits until both replicas are ready and the budget allows the eviction of one.
func (s *installation) awaitBudget(t *testing.T) {
	t.Helper()
	framework.Eventually(t, "one replica may be evicted", func(ctx context.Context) error {
		pods := s.extenders(t)
		budget, err := s.Client.PolicyV1().PodDisruptionBudgets("kube-system").Get(ctx, "gpushare-extender", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if len(pods) != 2 || budget.Status.CurrentHealthy != 2 || budget.Status.DisruptionsAllowed != 1 {
			return fmt.Errorf("%d pods; the budget's status is %+v", len(pods), budget.Status)
		}
		return nil
	})
}
