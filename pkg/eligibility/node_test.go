package eligibility

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
)

func TestClosed(t *testing.T) {
	condition := func(kind corev1.NodeConditionType, status corev1.ConditionStatus) func(*corev1.Node) {
		return func(n *corev1.Node) {
			n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: kind, Status: status})
		}
	}
	memory := func(capacity, allocatable string) func(*corev1.Node) {
		return func(n *corev1.Node) {
			n.Status.Capacity = corev1.ResourceList{protocol.ResourceMemory: resource.MustParse(capacity)}
			n.Status.Allocatable = corev1.ResourceList{protocol.ResourceMemory: resource.MustParse(allocatable)}
		}
	}
	const notConnected = "the device plugin is not connected: nothing of aliyun.com/gpu-mem is allocatable"
	for name, test := range map[string]struct {
		node func(*corev1.Node)
		want []string
	}{
		"no condition yet":         {func(*corev1.Node) {}, nil},
		"ready, with a plugin":     {func(n *corev1.Node) { condition(corev1.NodeReady, corev1.ConditionTrue)(n); memory("16", "16")(n) }, nil},
		"another condition":        {condition(corev1.NodeDiskPressure, corev1.ConditionFalse), nil},
		"not ready":                {condition(corev1.NodeReady, corev1.ConditionUnknown), []string{"the node is not ready"}},
		"cordoned":                 {func(n *corev1.Node) { n.Spec.Unschedulable = true }, []string{"the node is cordoned"}},
		"the plugin has just gone": {memory("16", "0"), []string{notConnected}},
		"the plugin has been gone for longer": {func(n *corev1.Node) {
			memory("0", "0")(n)
			n.Annotations = map[string]string{protocol.AnnotationInventory: "{}"}
		}, []string{notConnected}},
		"it never shared GPU memory": {memory("0", "0"), nil},
	} {
		t.Run(name, func(t *testing.T) {
			var node corev1.Node
			test.node(&node)
			check.Equal(t, "the result", test.want, texts(Closed(&node, protocol.Node{})))
			if got, want := disconnected(&node), len(test.want) > 0 && test.want[0] == notConnected; got != want {
				t.Errorf("disconnected: %v, want %v", got, want)
			}
			if got := Closed(&node, protocol.Node{WholeCards: true}); len(got) != len(test.want)+1 {
				t.Errorf("with whole cards: %q", got)
			}
			unhealthy := protocol.Node{Cards: []gpu.Card{{Unhealthy: "Xid 79"}}}
			if got := texts(Closed(&node, unhealthy)); slices.Contains(got, notConnected) {
				t.Errorf("with unhealthy cards only: %q", got)
			}
		})
	}
}

// TestExclusionOfTolerantPod: pods of a DaemonSet can use a node that is cordoned or isn't ready, unless its device plugin is not connected. Unhealthy
// cards alone have nothing allocatable either, and their pods wait for the cards.
func TestExclusionOfTolerantPod(t *testing.T) {
	p := &corev1.Pod{}
	p.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	for name, test := range map[string]struct {
		allocatable string
		unhealthy   string
		want        string
	}{
		"the plugin is connected":     {"16", "", ""},
		"the plugin is not connected": {"0", "", "the device plugin is not connected: nothing of aliyun.com/gpu-mem is allocatable"},
		"all cards are unhealthy":     {"0", "Xid 79", ""},
	} {
		for state, change := range map[string]func(*corev1.Node){
			"cordoned": func(n *corev1.Node) { n.Spec.Unschedulable = true },
			"not ready": func(n *corev1.Node) {
				n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionFalse}}
			},
		} {
			object := &corev1.Node{}
			object.Status.Capacity = corev1.ResourceList{protocol.ResourceMemory: resource.MustParse("16")}
			object.Status.Allocatable = corev1.ResourceList{protocol.ResourceMemory: resource.MustParse(test.allocatable)}
			change(object)
			node := Node{Object: object, Closed: Closed(object, protocol.Node{Cards: []gpu.Card{{Unhealthy: test.unhealthy}}})[0].Text}
			if got := node.Exclusion(Parse(ConstraintsOf(p))); got.Reason != test.want {
				t.Errorf("%s, %s: excluded by %q, want %q", name, state, got.Reason, test.want)
			}
		}
	}
}

// Once a pod is bound, the cards that it has count for the nodes that it could use, and not its label.
func TestConstraintsOfBoundPods(t *testing.T) {
	constraints := func(label, node, cards string) string {
		p := &corev1.Pod{Spec: corev1.PodSpec{NodeName: node}}
		p.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{
			Limits: corev1.ResourceList{protocol.ResourceMemory: *resource.NewQuantity(4, resource.DecimalSI)},
		}}}
		p.Labels = map[string]string{protocol.LabelCount: label}
		if cards != "" {
			p.Annotations = map[string]string{protocol.AnnotationIndex: cards}
		}
		return ConstraintsOf(p).Value()
	}
	one, two := constraints("1", "", ""), constraints("2", "", "")
	if one == two {
		t.Fatal("the label of a pending pod doesn't count")
	}
	for _, tc := range []struct{ name, want, got string }{
		{"a card, and another label now", one, constraints("2", "n1", "0")},
		{"two cards, and another label now", two, constraints("1", "n1", "0,1")},
		{"unknown cards", one, constraints("2", "n1", "")},
	} {
		if tc.got != tc.want {
			t.Errorf("%s: got %q, want %q", tc.name, tc.got, tc.want)
		}
	}
}

// texts returns the texts of problems; nil if there are none.
func texts(problems []reasons.NodeProblem) (texts []string) {
	for _, problem := range problems {
		texts = append(texts, problem.Text)
	}
	return texts
}

// TestPool: the page can show the nodes of a pool. gpushare's own label counts first.
func TestPool(t *testing.T) {
	node := &corev1.Node{}
	node.Labels = map[string]string{protocol.LabelShared: "true"}
	pool := func() string {
		spec, _ := Spec(node, protocol.ParseNode(node))
		return spec.Pool
	}
	if got := pool(); got != "" {
		t.Errorf("pool %q of a node without a label", got)
	}
	node.Labels["cloud.google.com/gke-nodepool"] = "a100-spot"
	if got := pool(); got != "a100-spot" {
		t.Errorf("pool %q", got)
	}
	node.Labels[protocol.LabelPool] = "training"
	if got := pool(); got != "training" {
		t.Errorf("pool %q with a label of gpushare", got)
	}
}
