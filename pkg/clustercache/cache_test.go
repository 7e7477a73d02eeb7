package clustercache

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
)

func TestLookups(t *testing.T) {
	f := start(t, newNode(t, "n1", 100), newNode(t, "n2"), newPod("a", 10), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "budget"},
		Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "a"}}},
		Status:     policyv1.PodDisruptionBudgetStatus{DisruptionsAllowed: 3, DisruptedPods: map[string]metav1.Time{"x": {}}},
	})
	if pod, ok := f.Pod("default", "a"); !ok || pod.UID != "uid-a" || pod.Request != 10 {
		t.Errorf("Pod: %+v, %v", pod, ok)
	}
	if pod, ok := f.Pod("default", "b"); ok || pod != nil {
		t.Errorf("Pod of an unknown name: %+v", pod)
	}
	if node, ok := f.Node("n1"); !ok || node.Name != "n1" {
		t.Errorf("Node: %+v, %v", node, ok)
	}
	if node, ok := f.Node("n3"); ok {
		t.Errorf("Node of an unknown name: %+v", node)
	}
	if got := len(f.Nodes()); got != 2 {
		t.Errorf("%d nodes, want 2", got)
	}
	await(t, "the disruption budgets", f.BudgetsSynced)
	budgets := f.Budgets("default")
	if len(budgets) != 1 || budgets[0].Status.DisruptionsAllowed != 3 || len(budgets[0].Status.DisruptedPods) != 1 ||
		budgets[0].Spec.Selector.MatchLabels["app"] != "a" || len(f.Budgets("other")) != 0 {
		t.Errorf("disruption budgets %+v", budgets)
	}
}

func TestPodsOn(t *testing.T) {
	f := start(t,
		newPod("bound", 10, bound("n1", 0)), newPod("no GPU", 0, bound("n1", 0)), newPod("terminating", 10, bound("n1", 0), terminating),
		newPod("nominated", 10, nominated("n1")), newPod("bound to another", 10, bound("n2", 0), nominated("n1")),
		newPod("ended", 10, bound("n1", 0), phase(corev1.PodSucceeded)), newPod("pending", 10))
	wantEqual(t, "pods", map[string]bool{"bound": true, "no GPU": true, "terminating": true, "nominated": true}, names(f.PodsOn("n1")))
	if got := f.PodsOn("n3"); len(got) != 0 {
		t.Errorf("pods of an unknown node: %v", names(got))
	}
}

func TestWatchVersions(t *testing.T) {
	node := newNode(t, "n1", 100)
	node.ResourceVersion = "41"
	f := start(t, node)
	f.want(f.got.nodes, "updated n1")
	if got := f.WatchVersions()["nodes"]; got > 41 {
		t.Errorf("the watch of nodes has reached %d before any change", got)
	}
	node = newNode(t, "n1", 200)
	node.ResourceVersion = "57"
	f.publishNode(node)
	f.want(f.got.nodes, "updated n1")
	await(t, "the version of the change", func() bool { return f.WatchVersions()["nodes"] == 57 })
}

func TestNodesWithoutPlugin(t *testing.T) {
	node := newNode(t, "n1", 100)
	node.Status.Allocatable = node.Status.Capacity.DeepCopy()
	f := start(t, node, newNode(t, "n2"))
	f.want(f.got.nodes, "updated n1")
	f.want(f.got.nodes, "updated n2")
	if got := f.NodesWithoutPlugin(); got != 0 {
		t.Errorf("%d nodes without a plugin, want none", got)
	}
	node = node.DeepCopy()
	node.Status.Allocatable = amount(protocol.ResourceMemory, 0) // The kubelet reports this once a plugin is gone.
	f.publishNode(node)
	f.want(f.got.nodes, "updated n1")
	if got := f.NodesWithoutPlugin(); got != 1 {
		t.Errorf("%d nodes without a plugin, want 1", got)
	}
}
