package clustercache

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/fake"
)

func TestLookups(t *testing.T) {
	f := start(t, fake.Node("n1", 100), fake.Node("n2"), fake.Pod("a", 10), fake.Budget("budget", "a", 3, "x"))
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
	await.True(t, "the disruption budgets", f.BudgetsSynced)
	budgets := f.Budgets("default")
	if len(budgets) != 1 || budgets[0].Status.DisruptionsAllowed != 3 || len(budgets[0].Status.DisruptedPods) != 1 ||
		budgets[0].Spec.Selector.MatchLabels["app"] != "a" || len(f.Budgets("other")) != 0 {
		t.Errorf("disruption budgets %+v", budgets)
	}
}

func TestPodsOn(t *testing.T) {
	f := start(t,
		fake.Pod("bound", 10, fake.Bound("n1", 0)), fake.Pod("no GPU", 0, fake.Bound("n1", 0)), fake.Pod("terminating", 10, fake.Bound("n1", 0), fake.Terminating(begin)),
		fake.Pod("nominated", 10, fake.Nominated("n1")), fake.Pod("bound to another", 10, fake.Bound("n2", 0), fake.Nominated("n1")),
		fake.Pod("ended", 10, fake.Bound("n1", 0), fake.Phase(corev1.PodSucceeded)), fake.Pod("pending", 10))
	wantEqual(t, "pods", map[string]bool{"bound": true, "no GPU": true, "terminating": true, "nominated": true}, names(f.PodsOn("n1")))
	if got := f.PodsOn("n3"); len(got) != 0 {
		t.Errorf("pods of an unknown node: %v", names(got))
	}
}

func TestWatchVersions(t *testing.T) {
	node := fake.Node("n1", 100)
	node.ResourceVersion = "41"
	f := start(t, node)
	f.want(f.got.nodes, "updated n1")
	if got := f.WatchVersions()["nodes"]; got > 41 {
		t.Errorf("the watch of nodes has reached %d before any change", got)
	}
	node = fake.Node("n1", 200)
	node.ResourceVersion = "57"
	f.publishNode(node)
	f.want(f.got.nodes, "updated n1")
	await.True(t, "the version of the change", func() bool { return f.WatchVersions()["nodes"] == 57 })
}
