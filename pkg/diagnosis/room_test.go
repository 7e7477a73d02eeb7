package diagnosis

import (
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/fake"
)

// Pods that all have constraints of their own, and can use each of thousands of nodes, don't fill the memory.
func TestChoicesKept(t *testing.T) {
	diagnoser := NewDiagnoser(manyNodes(10), nil, now)
	for i := range 3 * maxEligible {
		diagnoser.Diagnose(pod(8, func(p *corev1.Pod) {
			p.Spec.Tolerations = []corev1.Toleration{{Key: fmt.Sprint("k", i), Operator: corev1.TolerationOpExists}}
		}), nil)
		if kept := len(diagnoser.eligible); kept > maxEligible {
			t.Fatalf("%d lists are kept for %d pods", kept, i+1)
		}
	}
}

// A rejection names three nodes and counts the others.
func TestRejectedNodes(t *testing.T) {
	var nodes []Node
	for _, name := range []string{"a", "b", "c", "d", "e", "f"} {
		nodes = append(nodes, node(name, gpu.GiB, card(0, 16, 0)))
	}
	nodes[1].Closed, nodes[5].Closed = "the node is cordoned", "the node is cordoned"
	labelled := func(names ...string) func(*corev1.Pod) {
		return fake.RequiredAffinity(corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "name", Operator: corev1.NodeSelectorOpIn, Values: names}}})
	}
	const tooLarge, noNode = "no node is large enough for 20 GiB on one card: the largest card has 16 GiB, on ", "no node that shares GPU memory can take the pod"
	const excluded = " excluded by the pod's node selector or node affinity"
	for _, test := range []struct {
		pod  *Pod
		want string
	}{
		{pod(20), tooLarge + "a; b, f: the node is cordoned"},
		{pod(20, labelled("b", "c")), tooLarge + "c; 4 nodes are" + excluded + "; b: the node is cordoned"},
		{pod(20, ofDaemonSet("a"), func(p *corev1.Pod) { p.Spec.NodeSelector = nil }), tooLarge + "a; 5 nodes are" + excluded},
		{pod(20, ofDaemonSet("b"), func(p *corev1.Pod) { p.Spec.NodeSelector = nil }), noNode + "; 5 nodes are" + excluded + "; b: the node is cordoned"},
		{pod(20, ofDaemonSet("a")), noNode + "; 6 nodes are" + excluded},
		{pod(20, ofDaemonSet("x")), noNode + "; 6 nodes are" + excluded},
		{pod(20, fake.OntoNode("x")), noNode + "; 6 nodes are" + excluded},
	} {
		if got := NewDiagnoser(nodes, nil, now).Diagnose(test.pod, nil).Message; got != test.want {
			t.Errorf("%q, want %q", got, test.want)
		}
	}
	if names := slices.Repeat([]string{"n"}, 5); FirstOf(names[:3]) != "n, n, n" || FirstOf(names) != "n, n, n and 2 more" {
		t.Error(FirstOf(names))
	}
}
