package eligibility

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"unique"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/fake"
)

func node(name string) *Node {
	return &Node{Object: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"name": name}}}}
}

// pod returns the constraints of a pod.
func pod(changes ...func(*corev1.Pod)) unique.Handle[string] {
	p := &corev1.Pod{Spec: corev1.PodSpec{Containers: make([]corev1.Container, 1)}}
	p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{protocol.ResourceMemory: resource.MustParse("1")}
	for _, change := range changes {
		change(p)
	}
	return ConstraintsOf(p)
}

// The lookup by names and labels finds exactly the nodes that a check of every node finds, for random constraints.
func TestNames(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	letters := func() string { return string(rune('a' + random.IntN(4))) }
	var nodes []*Node
	for i := range 12 {
		n := node(fmt.Sprintf("n%02d", i))
		n.Object.Labels["x"] = letters()
		if i%3 > 0 {
			n.Object.Labels["y"] = letters()
		}
		n.Object.Spec.Unschedulable = i%5 == 0
		if i%4 == 0 {
			n.SharedMemory = reasons.NoOwnSharedMemory
		}
		if reasons := Closed(n.Object, protocol.Node{}); len(reasons) > 0 {
			n.Closed = reasons[0].Text
		}
		nodes = append(nodes, n)
	}
	requirement := func(key string) corev1.NodeSelectorRequirement {
		operators := []corev1.NodeSelectorOperator{corev1.NodeSelectorOpIn, corev1.NodeSelectorOpIn, corev1.NodeSelectorOpNotIn}
		return corev1.NodeSelectorRequirement{Key: key, Operator: operators[random.IntN(3)], Values: []string{letters(), letters()}}
	}
	term := func() (t corev1.NodeSelectorTerm) {
		if random.IntN(3) == 0 {
			t = fake.NodeNamed(fmt.Sprintf("n%02d", random.IntN(15)))
		}
		for _, key := range []string{"x", "y"} {
			if random.IntN(2) == 0 {
				t.MatchExpressions = append(t.MatchExpressions, requirement(key))
			}
		}
		return t
	}
	index, found := NewIndex(nodes), 0
	for range 2000 {
		p := pod(func(p *corev1.Pod) {
			if random.IntN(2) == 0 {
				p.Spec.NodeSelector = map[string]string{"x": letters()}
			}
			if random.IntN(2) == 0 {
				p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{MountPath: protocol.SharedMemory}}
			}
			terms := make([]corev1.NodeSelectorTerm, random.IntN(3))
			for i := range terms {
				terms[i] = term()
			}
			if len(terms) > 0 {
				fake.RequiredAffinity(terms...)(p)
			}
		})
		want, c := []string{}, Parse(p)
		for _, n := range nodes {
			if n.Admits(c) {
				want = append(want, n.Object.Name)
			}
		}
		found += len(want)
		if diff := cmp.Diff(want, index.Names(p)); diff != "" {
			t.Fatalf("%q (-want +got):\n%s", p.Value(), diff)
		}
	}
	if found == 0 {
		t.Error("no pod can use a node")
	}
}

// The pod's constraints and the nodes' state decide.
func TestNamesOfStates(t *testing.T) {
	tainted := node("tainted")
	tainted.Object.Spec.Taints = []corev1.Taint{{Key: "team", Effect: corev1.TaintEffectNoSchedule}}
	closed := node("closed")
	closed.Closed = "the node is not ready"
	nodes := []*Node{closed, node("plain"), node("small"), tainted}
	for want, p := range map[string]unique.Handle[string]{
		"plain small": pod(),
		"small":       pod(fake.OntoNode("small")),
		"closed plain small tainted": pod(func(p *corev1.Pod) {
			p.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
		}),
	} {
		if got := strings.Join(NewIndex(nodes).Names(p), " "); got != want {
			t.Errorf("eligible nodes %q, want %q", got, want)
		}
	}
}
