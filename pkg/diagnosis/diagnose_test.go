package diagnosis

import (
	"cmp"
	"testing"
	"time"
	"unique"

	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

var now = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)

func terminating(priorities ...int32) []Terminating {
	var out []Terminating
	for _, priority := range priorities {
		out = append(out, Terminating{Pod: gpu.Pod{Namespace: "default", Name: "t", Priority: priority}, Due: now})
	}
	return out
}

func pod(request int64, changes ...func(*corev1.Pod)) *Pod {
	p := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{
		Limits: corev1.ResourceList{protocol.ResourceMemory: *resource.NewQuantity(request, resource.DecimalSI)},
	}}}}}
	for _, change := range changes {
		change(p)
	}
	return NewPod(p)
}

// condition gives the pod a condition of kube-scheduler.
func condition(reason, message string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: reason, Message: message}}
	}
}

// overTwo has the pod ask for two cards.
func overTwo(p *corev1.Pod) { p.Labels = map[string]string{protocol.LabelCount: "2"} }

func gated(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "quota"}} }

func node(name string, unit gpu.Unit, cards ...placement.Card) Node {
	return Node{
		Node: eligibility.Node{Object: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"name": name}}}},
		Unit: unit, Cards: cards,
	}
}

func card(index int, memory, used gpu.Memory) placement.Card {
	return placement.Card{Index: index, Memory: memory, Used: used}
}

// TestDiagnose checks that pods which differ in a relevant field get their own diagnosis, also from the cache.
func TestDiagnose(t *testing.T) {
	tainted := node("tainted", gpu.GiB, card(0, 16, 0))
	tainted.Object.Spec.Taints = []corev1.Taint{{Key: "team", Effect: corev1.TaintEffectNoSchedule}}
	closed := node("closed", gpu.GiB, card(0, 64, 0))
	closed.Closed = "the node is cordoned"
	a := node("a", gpu.GiB, card(0, 16, 9), card(1, 16, 11))
	a.Terminating = terminating(5, 3)
	diagnoser := NewDiagnoser([]Node{a, node("b", gpu.MiB, card(0, 8192, 0)), closed, tainted}, nil, now)
	tolerant := func(p *corev1.Pod) { p.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}} }
	nominated := func(name string, priority int32) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Status.NominatedNodeName, p.Spec.Priority = name, &priority }
	}
	tests := []struct {
		what string
		pod  *Pod
		want reasons.Reason
	}{
		{"counts in each node's own unit", pod(8), reasons.Fits},
		{"another request", pod(12, fake.OntoNode("a")), reasons.Fragmented},
		{"the same without the selector", pod(12), reasons.Fits},
		{"larger than the total free memory", pod(13, fake.OntoNode("a")), reasons.Full},
		{"a tainted node alone", pod(13, fake.OntoNode("tainted")), reasons.NoNode},
		{"the same, tolerated", pod(13, fake.OntoNode("tainted"), tolerant), reasons.Fits},
		{"required by affinity", pod(13, fake.RequiredAffinity(fake.NodeNamed("tainted"))), reasons.NoNode},
		{"and tolerated", pod(13, fake.RequiredAffinity(fake.NodeNamed("tainted")), tolerant), reasons.Fits},
		{"too large for the usable nodes", pod(9000), reasons.TooLarge},
		{"gated", pod(12, fake.OntoNode("a"), gated), reasons.Gated},
		{"gated, with an invalid request", pod(13, gated, overTwo), reasons.InvalidRequest},
		{"nominated, and a pod of lower priority is terminating", pod(12, fake.OntoNode("a"), nominated("a", 4)), reasons.Nominated},
		{"nominated, and only pods of higher priority are terminating", pod(12, fake.OntoNode("a"), nominated("a", 3)), reasons.Fragmented},
		{"nominated, and no pod is terminating", pod(9000, nominated("b", 9)), reasons.TooLarge},
		{"nominated to a node where it fits", pod(8192, nominated("b", 0)), reasons.Nominated},
		{"nominated to a node that is cordoned", pod(12, nominated("closed", 9)), reasons.Fits},
		{"nominated to a node whose taint it doesn't tolerate", pod(12, nominated("tainted", 9)), reasons.Fits},
		{"nominated to a node that is gone", pod(12, fake.OntoNode("a"), nominated("x", 9)), reasons.Fragmented},
	}
	for range 2 { // The second time from the cache.
		for _, test := range tests {
			if got := diagnoser.Diagnose(test.pod, nil); got.Reason != test.want || got.Message == "" {
				t.Errorf("%s: %+v, want %s", test.what, got, test.want)
			}
		}
	}
	kept := pod(8, condition("", "0/2 nodes are available: 1 free GPU memory is kept for group default/train.v1, 1 no GPU card has enough free memory."))
	want := Diagnosis{Reason: reasons.ReservedForOther, Message: "b has room for it, 8192 MiB on one card, but free GPU memory is kept for group default/train.v1, which came first"}
	if got := diagnoser.Diagnose(kept, nil); got != want {
		t.Errorf("memory is kept for a group: %+v, want %+v", got, want)
	}
	kept = pod(8, condition("", "0/2 nodes are available: 1 free CPU, memory or pods of the node are kept for pod default/large, 1 no GPU card has enough free memory."))
	want.Message = "b has room for it, 8192 MiB on one card, but free CPU, memory or pods of the node are kept for pod default/large, which came first"
	if got := diagnoser.Diagnose(kept, nil); got != want {
		t.Errorf("CPU is kept for a pod: %+v, want %+v", got, want)
	}
	if got := diagnoser.Diagnose(pod(9000), nil).Message; got != "no card is large enough for 9000 GiB: the largest has 16 GiB, on a; closed: the node is cordoned; tainted: the pod doesn't tolerate the taint team:NoSchedule" {
		t.Error(got)
	}
}

// TestMessages checks the message of each reason.
func TestMessages(t *testing.T) {
	unhealthy := func(node Node, card int) Node {
		node.Cards[card].Unhealthy = true
		return node
	}
	changed := func(node Node, change func(*Node)) Node {
		change(&node)
		return node
	}
	full := node("n2", gpu.GiB, card(0, 16, 16), card(1, 16, 16))
	split := []Node{node("n1", gpu.GiB, card(0, 16, 9), card(1, 16, 11)), full}
	nominated := func(p *corev1.Pod) { p.Status.NominatedNodeName, p.Spec.Priority = "n2", new(int32(1)) }
	cordoned := func(n *Node) { n.Closed = "the node is cordoned" }
	for name, test := range map[string]struct {
		nodes []Node
		pod   *Pod
		want  Diagnosis
	}{
		"a card has room": {split, pod(7), Diagnosis{
			Reason: reasons.Fits, Message: "n1 has room for it, 7 GiB on one card: kube-scheduler has not tried it yet"}},
		"enough free memory in total, not on one card": {split, pod(12), Diagnosis{
			Reason: reasons.Fragmented, Message: "12 GiB free on n1, but the largest piece is 7 GiB: a pod gets one card"}},
		"too little free memory": {split, pod(13), Diagnosis{
			Reason: reasons.Full, Message: "the cards that are large enough are taken: the largest free piece is 7 GiB, on n1"}},
		"no free memory": {split, pod(1, fake.OntoNode("n2")), Diagnosis{
			Reason: reasons.Full, Message: "the cards that are large enough are taken, nothing of them is free; n1: excluded by the pod's node selector (name=n2)"}},
		"the card that is large enough is unhealthy": {[]Node{unhealthy(node("n", gpu.GiB, card(0, 8, 0), card(1, 16, 0)), 1)}, pod(10), Diagnosis{
			Reason: reasons.Unhealthy, Message: "the cards that are large enough are unhealthy, on n"}},
		"a taint with effect PreferNoSchedule": {[]Node{changed(node("n", gpu.GiB, card(0, 8, 0)), func(n *Node) {
			n.Object.Spec.Taints = []corev1.Taint{{Key: "team", Effect: corev1.TaintEffectPreferNoSchedule}}
		})}, pod(9), Diagnosis{Reason: reasons.TooLarge, Message: "no card is large enough for 9 GiB: the largest has 8 GiB, on n"}},
		"nodes that can't be used": {[]Node{
			changed(node("a", gpu.GiB, card(0, 8, 0)), cordoned), changed(node("b", gpu.GiB, card(0, 8, 0)), cordoned),
			changed(node("c", gpu.GiB, card(0, 8, 0)), func(n *Node) { n.Closed = "the node is not ready" }),
		}, pod(1), Diagnosis{Reason: reasons.NoNode, Message: "no node that shares GPU memory can take the pod; a, b: the node is cordoned; c: the node is not ready"}},
		"no node shares its cards": {nil, pod(1), Diagnosis{Reason: reasons.NoNode, Message: "no node shares GPU memory"}},
		"scheduling gates": {split, pod(1, func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "a/b"}, {Name: "c"}} }), Diagnosis{
			Reason: reasons.Gated, Message: "the pod is held back by its scheduling gates: a/b, c"}},
		"evictions in progress": {[]Node{split[0], changed(full, func(n *Node) { n.Terminating = terminating(0) })}, pod(16, nominated), Diagnosis{
			Reason: reasons.Nominated, Message: "pods of lower priority are leaving n2 to make room for it"}},
	} {
		t.Run(name, func(t *testing.T) {
			check.Equal(t, "the result", test.want, NewDiagnoser(test.nodes, nil, now).Diagnose(test.pod, nil))
		})
	}
}

func TestNewPod(t *testing.T) {
	const untried = `scheduler "default-scheduler" has not tried it yet`
	created := metav1.NewTime(time.Date(2026, 7, 1, 11, 0, 0, 0, time.UTC))
	conditions := func(status corev1.ConditionStatus, reason, message string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Status.Conditions = []corev1.PodCondition{
				{Type: corev1.PodReady, Status: corev1.ConditionFalse, Message: "another condition"},
				{Type: corev1.PodScheduled, Status: status, Reason: reason, Message: message},
			}
		}
	}
	for name, test := range map[string]struct {
		change func(*corev1.Pod)
		want   Pod
	}{
		"not tried yet":         {func(*corev1.Pod) {}, Pod{Message: untried}},
		"another scheduler":     {func(p *corev1.Pod) { p.Spec.SchedulerName = "mine" }, Pod{Scheduler: "mine", Message: `scheduler "mine" has not tried it yet`}},
		"rejected":              {conditions(corev1.ConditionFalse, "Unschedulable", "no room"), Pod{Message: "no room", Tried: true, Rejected: true}},
		"without a message":     {conditions(corev1.ConditionFalse, "SchedulerError", ""), Pod{Message: "SchedulerError", Tried: true, Failed: true, Rejected: true}},
		"an unknown condition":  {conditions(corev1.ConditionUnknown, "", "asking"), Pod{Message: "asking", Tried: true}},
		"already bound":         {conditions(corev1.ConditionTrue, "", "bound"), Pod{Message: untried}},
		"nominated":             {func(p *corev1.Pod) { p.Status.NominatedNodeName = "n" }, Pod{NominatedNode: "n", Message: untried}},
		"with scheduling gates": {func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "a"}, {Name: "b"}} }, Pod{Gates: []string{"a", "b"}, Message: untried}},
	} {
		t.Run(name, func(t *testing.T) {
			got := pod(8, test.change, func(p *corev1.Pod) { p.UID, p.CreationTimestamp = "uid", created })
			test.want.Pod, test.want.Created = gpu.Pod{UID: "uid", Request: 8}, created.Time
			test.want.Constraints = pod(1).Constraints
			test.want.Scheduler = cmp.Or(test.want.Scheduler, "default-scheduler")
			check.Equal(t, "the result", &test.want, got, cmpopts.IgnoreUnexported(Pod{}), cmpopts.EquateComparable(unique.Handle[string]{}))
		})
	}
}

func TestCoarse(t *testing.T) {
	for d, want := range map[time.Duration]string{
		30 * time.Second: "30s", 59 * time.Second: "30s", time.Minute: "1m", 119 * time.Second: "1m", time.Hour: "1h", 47 * time.Hour: "47h", 49 * time.Hour: "2d",
	} {
		if got := coarse(d); got != want {
			t.Errorf("%v: %s, want %s", d, got, want)
		}
	}
}
