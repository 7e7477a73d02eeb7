package nodee2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/leader"
	"github.com/gpushare/gpushare/test/pages"
)

// drainTheLeader drains the node of the leader with the commands of docs/operations.md, while GPU pods come and go. The
// PodDisruptionBudget must allow the eviction of the leader's pod, the leader must hand the Lease over to the standby, and no
// pod may fail. The drained node has no cards, because the load's pods have no controller and kubectl drain refuses such
// pods.
func (s *site) drainTheLeader(t *testing.T) {
	t.Helper()
	blocks, err := pages.Commands("docs/operations.md", "Drain a node")
	must(t, err)
	drain, uncordon, _ := strings.Cut(strings.ReplaceAll(blocks[0], "NODE", s.worker.name), "\n")

	before := s.leaderOnTheWorker(t)
	load := s.startLoad(t, "drain", corev1.DefaultSchedulerName)
	time.Sleep(2 * time.Second) // Let some load run.
	begun := time.Now()
	out := s.desk.run(t, "", drain)
	took := time.Since(begun)
	if evicted := "evicting pod kube-system/" + before.pod; !strings.Contains(out, evicted) || strings.Contains(out, "will retry") {
		t.Errorf("want %q at the first try, got:\n%s", evicted, out)
	}
	var after leadership
	eventually(t, "another replica leads", func(ctx context.Context) (err error) {
		if after, err = s.leads(ctx); err == nil && (after.pod == before.pod || after.pod == "") {
			err = fmt.Errorf("%q leads, %q led before", after.pod, before.pod)
		}
		return err
	})
	// A standby that isn't handed the Lease waits until it expires.
	if waited := after.since.Sub(begun); waited >= leader.DefaultLeaseDuration-leader.DefaultRetryPeriod {
		t.Errorf("it leads %v after the drain began: the Lease wasn't handed over", waited)
	}
	t.Logf("drained in %v; the other replica led %v after the drain had begun", took.Round(time.Millisecond), after.since.Sub(begun).Round(time.Millisecond))
	time.Sleep(2 * time.Second) // Let some load run under the new leader.
	for _, pod := range load(t) {
		t.Errorf("pod %s failed, %s: %s", pod.Name, pod.Status.Reason, pod.Status.Message)
	}
	s.desk.run(t, "", uncordon)
	s.awaitBudget(t)
}

// leadership is the pod that leads and the time since which it leads.
type leadership struct {
	pod   string
	since time.Time
}

// leads returns the pod that holds the extender's Lease.
func (s *site) leads(ctx context.Context) (leadership, error) {
	var lease *coordinationv1.Lease
	lease, err := s.bed.Client.CoordinationV1().Leases("kube-system").Get(ctx, "gpushare-extender", metav1.GetOptions{})
	if err != nil || lease.Spec.HolderIdentity == nil || lease.Spec.AcquireTime == nil {
		return leadership{}, err
	}
	pod, _, _ := strings.Cut(*lease.Spec.HolderIdentity, "_")
	return leadership{pod, lease.Spec.AcquireTime.Time}, nil
}

// leaderOnTheWorker deletes replicas until the leader is on the worker and the standby is on the other node.
func (s *site) leaderOnTheWorker(t *testing.T) leadership {
	t.Helper()
	for range 10 {
		s.awaitBudget(t)
		leading, err := s.leads(t.Context())
		must(t, err)
		pods := s.extenders(t)
		nodes := map[string]string{}
		surplus := leading.pod
		for i := range pods {
			nodes[pods[i].Name] = pods[i].Spec.NodeName
		}
		for name, node := range nodes {
			if name == leading.pod {
				continue
			}
			switch {
			case nodes[leading.pod] == s.worker.name && node != s.worker.name:
				return leading
			case nodes[leading.pod] == node: // If two replicas are on one node, the next one goes to the other node.
				surplus = name
			}
		}
		must(t, s.bed.Client.CoreV1().Pods("kube-system").Delete(t.Context(), surplus, metav1.DeleteOptions{}))
		eventually(t, "it is gone, and somebody leads", func(ctx context.Context) error {
			if _, err := s.bed.Client.CoreV1().Pods("kube-system").Get(ctx, surplus, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
				return fmt.Errorf("pod %s is there, %w", surplus, err)
			}
			now, err := s.leads(ctx)
			if err == nil && (now.pod == "" || now.pod == surplus) {
				err = fmt.Errorf("%q leads", now.pod)
			}
			return err
		})
	}
	t.Fatal("no leader came to the worker")
	return leadership{}
}

// extenders returns the pods of the extender's replicas.
func (s *site) extenders(t *testing.T) []corev1.Pod {
	t.Helper()
	pods, err := s.bed.Client.CoreV1().Pods("kube-system").List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=extender"})
	must(t, err)
	return pods.Items
}

// mustBeApart fails the test unless the replicas are on different nodes and none of them is being replaced.
func (s *site) mustBeApart(t *testing.T) {
	t.Helper()
	where := map[string][]string{}
	for _, pod := range s.extenders(t) {
		where[pod.Spec.NodeName] = append(where[pod.Spec.NodeName], pod.Name)
	}
	if len(where) != 2 {
		t.Errorf("the replicas are together: %v", where)
	}
}

// awaitBudget waits until both replicas are ready and the budget allows the eviction of one.
func (s *site) awaitBudget(t *testing.T) {
	t.Helper()
	eventually(t, "one replica may be evicted", func(ctx context.Context) error {
		pods := s.extenders(t)
		budget, err := s.bed.Client.PolicyV1().PodDisruptionBudgets("kube-system").Get(ctx, "gpushare-extender", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if len(pods) != 2 || budget.Status.CurrentHealthy != 2 || budget.Status.DisruptionsAllowed != 1 {
			return fmt.Errorf("%d pods; the budget's status is %+v", len(pods), budget.Status)
		}
		return nil
	})
}
