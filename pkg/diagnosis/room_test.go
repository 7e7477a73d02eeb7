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
	const n = 5000
	diagnoser := NewDiagnoser(manyNodes(n), nil, now)
	for i := range 2 * maxEligible / n {
		diagnoser.Diagnose(pod(8, func(p *corev1.Pod) {
			p.Spec.Tolerations = []corev1.Toleration{{Key: fmt.Sprint("k", i), Operator: corev1.TolerationOpExists}}
		}), nil)
		kept := 0
		for _, eligible := range diagnoser.eligible {
			kept += len(eligible.nodes)
		}
		if kept > maxEligible+n {
			t.Fatalf("%d nodes are kept for %d pods", kept, i+1)
		}
	}
}

// The message doesn't depend on the order in which a node selector's labels are looked up.
func TestEqualChoices(t *testing.T) {
	var nodes []Node
	for _, name := range []string{"a", "b", "c", "d"} {
		nodes = append(nodes, node(name, gpu.GiB, card(0, 16, 0)))
	}
	nodes[0].Object.Labels["x"], nodes[1].Object.Labels["y"] = "1", "1"
	p := pod(1, func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"x": "1", "y": "1"} })
	const want = "no node that shares GPU memory can take the pod; a, b, c and 1 more: excluded by the pod's node selector (x=1,y=1)"
	for range 30 {
		if got := NewDiagnoser(nodes, nil, now).Diagnose(p, nil).Message; got != want {
			t.Fatalf("%q, want %q", got, want)
		}
	}
}

// A rejection names three labels of the node selector and counts the others.
func TestExcludedBySelector(t *testing.T) {
	nodes := []Node{node("a", gpu.GiB, card(0, 16, 0))}
	p := pod(1, func(p *corev1.Pod) {
		p.Spec.NodeSelector = map[string]string{}
		for i := range 100 {
			p.Spec.NodeSelector[fmt.Sprintf("k%02d", i)] = "v"
		}
	})
	const want = "no node that shares GPU memory can take the pod; a: excluded by the pod's node selector (k00=v,k01=v,k02=v and 97 more)"
	if got := NewDiagnoser(nodes, nil, now).Diagnose(p, nil).Message; got != want {
		t.Errorf("%q, want %q", got, want)
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
	const only, pinned = "; the pod's node affinity names ", ", as for each pod of a DaemonSet"
	const tooLarge = "no card is large enough for 20 GiB: the largest has 16 GiB, on "
	for _, test := range []struct {
		pod  *Pod
		want string
	}{
		{pod(20), tooLarge + "a; b, f: the node is cordoned"},
		{pod(20, labelled("b", "c")), tooLarge + "c; a, d, e and 1 more: excluded by the pod's node affinity; b: the node is cordoned"},
		{pod(20, ofDaemonSet("a"), func(p *corev1.Pod) { p.Spec.NodeSelector = nil }), tooLarge + "a" + only + "a only" + pinned},
		{pod(20, ofDaemonSet("b"), func(p *corev1.Pod) { p.Spec.NodeSelector = nil }), "no node that shares GPU memory can take the pod; b: the node is cordoned" + only + "b only" + pinned},
		{pod(20, ofDaemonSet("a")), "no node that shares GPU memory can take the pod; a: excluded by the pod's node selector (gpushare=true) or its node affinity" + only + "a only" + pinned},
		{pod(20, ofDaemonSet("x")), "no node that shares GPU memory can take the pod: its node affinity names x, which shares none"},
		{pod(20, fake.OntoNode("x")), "no node that shares GPU memory can take the pod; a, b, c and 3 more: excluded by the pod's node selector (name=x)"},
	} {
		if got := NewDiagnoser(nodes, nil, now).Diagnose(test.pod, nil).Message; got != test.want {
			t.Errorf("%q, want %q", got, test.want)
		}
	}
	if names := slices.Repeat([]string{"n"}, 3); listed(names, 3) != "n, n, n" || listed(names, 5) != "n, n, n and 2 more" {
		t.Error(listed(names, 5))
	}
}
