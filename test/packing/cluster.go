package main

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/arrivals"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
)

// modelLabel is the node label with the model of the cards.
const modelLabel = "model"

const mebibyte = 1 << 20

// cluster is the cluster of the trace. The ledger and eligibility, which are those of the extender, decide about pods with GPU memory.
type cluster struct {
	ledger   *ledger.Ledger
	eligible *eligibility.Cluster
	scheduler
	arrivals *arrivals.Counter
	view     ledger.View
	// constraints are those of pods, by what they ask for.
	constraints map[tracePod]unique.Handle[string]
	// allocated and all are thousandths of cards.
	allocated, all int
	now            time.Time
}

// newCluster returns the cluster without pods, with the nodes in this order.
func newCluster(nodes []traceNode, order []int, policy placement.Policy, ties *rand.Rand) *cluster {
	eligible := eligibility.NewCluster()
	c := &cluster{
		ledger: ledger.NewWithResources(eligible, nil), arrivals: arrivals.NewCounter(), eligible: eligible, scheduler: newScheduler(nodes, order, ties),
		view:        ledger.View{Card: placement.Binpack, Node: policy},
		constraints: map[tracePod]unique.Handle[string]{}, now: time.Unix(1_800_000_000, 0),
	}
	for i := range nodes {
		if nodes[i].cards == 0 {
			continue
		}
		object := nodes[i].object()
		spec, _ := eligibility.Spec(object, protocol.ParseNode(object))
		c.eligible.SetNode(object, &spec)
		c.ledger.SetNode(object.Name, spec)
		c.reportFree(object.Name)
		c.all += nodes[i].cards * cardMemory
	}
	c.expect()
	return c
}

// reportFree tells the ledger what a node has free beside its cards, as the extender's event handlers do.
func (c *cluster) reportFree(node string) {
	if free, all, known := c.eligible.FreeResources(node); known {
		c.ledger.SetNodeResources(node, free, all)
	}
}

// expect tells the ledger which kinds of pods come.
func (c *cluster) expect() {
	if c.view.Node.NeedsOutlook() {
		c.ledger.Expect(c.arrivals.Kinds(), c.arrivals.Turnover(), c.view.Card, c.eligible.UsableNodes)
	}
}

// object returns the Node object.
func (n *traceNode) object() *corev1.Node {
	object := framework.MakeNode(n.name).Cards(n.cards, cardMemory).Label(modelLabel, n.model).Obj()
	object.Status.Allocatable[corev1.ResourceCPU] = *resource.NewMilliQuantity(n.cpu, resource.DecimalSI)
	object.Status.Allocatable[corev1.ResourceMemory] = *resource.NewQuantity(n.memory*mebibyte, resource.BinarySI)
	return object
}

// arrive places a new pod, unless it fits nowhere.
func (c *cluster) arrive(pod *tracePod, number int) {
	c.now = c.now.Add(time.Second)
	use := c.use(pod, number)
	c.eligible.SetPod(&use)
	if c.arrivals.Add(use.Shape(), sourceOf(&use), c.now) {
		c.expect()
	}
	node, ok := c.choose(pod, &use)
	if !ok {
		c.eligible.DeletePod(use.UID)
		return
	}
	use.Node = node
	c.eligible.SetPod(&use)
	c.reportFree(node)
	c.take(node, pod)
	c.allocated += pod.gpu()
	if pod.gpu() > 0 && c.arrivals.Place() {
		c.expect()
	}
}

// sourceOf returns the pod's owner, of which it is the only pod.
func sourceOf(use *eligibility.PodUse) unique.Handle[string] { return unique.Make(string(use.UID)) }

// used returns which part of the cards is allocated.
func (c *cluster) used() float64 { return float64(c.allocated) / float64(c.all) }

// choose returns the pod's node. A pod with GPU memory gets its cards there too.
func (c *cluster) choose(pod *tracePod, use *eligibility.PodUse) (node string, ok bool) {
	if pod.gpu() == 0 {
		return c.leastAllocated(pod)
	}
	candidates := c.fitting(pod, c.eligible.UsableNodes(use.Constraints))
	fitting, _, _ := c.ledger.Rank(c.view, use.Pod, candidates)
	chosen := placement.Best(fitting, 1)
	if len(chosen) == 0 {
		return "", false
	}
	node = candidates[chosen[0].Node]
	if _, err := c.ledger.Reserve(node, use.Pod, c.view.Card, c.now); err != nil {
		panic(err) // Rank has just returned that it fits.
	}
	return node, true
}

// use returns the pod as the extender's cache would have it.
func (c *cluster) use(pod *tracePod, number int) eligibility.PodUse {
	requests := eligibility.Amounts{corev1.ResourceCPU: pod.cpu, corev1.ResourceMemory: pod.memory * mebibyte}
	use := eligibility.PodUse{Requests: requests, Pod: gpu.Pod{
		UID: gpu.PodUID(fmt.Sprint(number)), Namespace: "trace", Name: fmt.Sprintf("%s-%d", pod.name, number),
		Request: gpu.Memory(pod.gpu()), Cards: pod.cards, Containers: 1,
	}}
	if pod.gpu() > 0 {
		use.Constraints = c.constraintsOf(pod)
	}
	return use
}

func (c *cluster) constraintsOf(pod *tracePod) unique.Handle[string] {
	key := tracePod{cards: pod.cards, milli: pod.milli, models: pod.models}
	constraints, known := c.constraints[key]
	if !known {
		constraints = eligibility.ConstraintsOf(pod.object())
		c.constraints[key] = constraints
	}
	return constraints
}

// object returns the Pod object, with what decides which nodes the pod can use.
func (p *tracePod) object() *corev1.Pod {
	object := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{protocol.LabelCount: fmt.Sprint(p.cards)}}}
	object.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{
		Limits: corev1.ResourceList{protocol.ResourceMemory: *resource.NewQuantity(int64(p.gpu()), resource.DecimalSI)},
	}}}
	if p.models == "" {
		return object
	}
	term := corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{
		{Key: modelLabel, Operator: corev1.NodeSelectorOpIn, Values: strings.Split(p.models, "|")},
	}}
	object.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
		RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{term}},
	}}
	return object
}
