package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
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
	"github.com/gpushare/gpushare/pkg/reasons"
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
	rule     rule
	// constraints are those of pods, by what they ask for.
	constraints map[tracePod]unique.Handle[string]
	// allocated and all are thousandths of cards.
	allocated, all int
	now            time.Time
}

// newCluster returns the cluster without pods, with the nodes in this order.
func newCluster(nodes []traceNode, order []int, policy placement.Policy, rule rule, ties *rand.Rand) *cluster {
	eligible := eligibility.NewCluster()
	c := &cluster{
		ledger: ledger.NewWithResources(eligible, nil), arrivals: arrivals.NewCounter(), eligible: eligible, scheduler: newScheduler(nodes, order, ties),
		view: ledger.View{Card: placement.Binpack, Node: policy}, rule: rule,
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
	if free, all, revision, known := c.eligible.FreeBeside(node); known {
		c.ledger.SetBeside(node, free, all, revision)
	}
}

// expect tells the ledger which kinds of pods come.
func (c *cluster) expect() {
	if c.view.Node.ByCost() {
		c.ledger.Expect(c.arrivals.Kinds(), c.arrivals.Turnover(), c.view.Card, c.eligible.Names)
	}
}

// object returns the Node object.
func (n *traceNode) object() *corev1.Node {
	object := framework.MakeNode(n.name).Cards(n.cards, cardMemory).Label(modelLabel, n.model).Obj()
	object.Status.Allocatable[corev1.ResourceCPU] = *resource.NewMilliQuantity(n.cpu, resource.DecimalSI)
	object.Status.Allocatable[corev1.ResourceMemory] = *resource.NewQuantity(n.memory*mebibyte, resource.BinarySI)
	return object
}

// arrive implements world.
func (c *cluster) arrive(pod *tracePod, number int) (node string, ok bool) {
	c.now = c.now.Add(time.Second)
	use := c.use(pod, number)
	c.eligible.SetPod(&use)
	if c.arrivals.Add(use.Shape(), sourceOf(&use), c.now) {
		c.expect()
	}
	node, ok = c.choose(pod, &use)
	if !ok {
		c.eligible.DeletePod(use.UID)
		return "", false
	}
	c.bound(node, pod, use)
	return node, true
}

// sourceOf returns the pod's owner, of which it is the only pod.
func sourceOf(use *eligibility.PodUse) unique.Handle[string] { return unique.Make(string(use.UID)) }

// wait implements world.
func (c *cluster) wait(pod *tracePod, number int) { c.countWaiting(pod, number, 1) }

func (c *cluster) countWaiting(pod *tracePod, number, change int) {
	if use := c.use(pod, number); pod.gpu() > 0 {
		c.arrivals.Wait(use.Shape(), sourceOf(&use), change)
	}
}

func (c *cluster) bound(node string, pod *tracePod, use eligibility.PodUse) {
	use.Node = node
	c.eligible.SetPod(&use)
	c.reportFree(node)
	c.take(node, pod)
	c.allocated += pod.gpu()
	if pod.gpu() > 0 && c.arrivals.Place() {
		c.expect()
	}
}

// placeOn implements world.
func (c *cluster) placeOn(node string, pod *tracePod, number int) bool {
	if !c.nodes[node].fits(pod) {
		return false
	}
	use := c.use(pod, number)
	if pod.gpu() > 0 {
		if !slices.Contains(c.eligible.Names(use.Constraints), node) {
			return false
		}
		if _, err := c.ledger.Reserve(node, use.Pod, c.view.Card, c.now); err != nil {
			return false
		}
	}
	c.countWaiting(pod, number, -1)
	c.bound(node, pod, use)
	return true
}

// end implements world.
func (c *cluster) end(node string, pod *tracePod, number int) {
	uid := gpu.PodUID(fmt.Sprint(number))
	if pod.gpu() > 0 {
		c.arrivals.End()
	}
	c.ledger.Remove(uid)
	c.eligible.DeletePod(uid)
	c.reportFree(node)
	c.give(node, pod)
	c.allocated -= pod.gpu()
}

// used implements world.
func (c *cluster) used() float64 { return float64(c.allocated) / float64(c.all) }

// foretell implements world. The extender sees the pods that come.
func (c *cluster) foretell([]tracePod) {}

// choose returns the pod's node. A pod with GPU memory gets its cards there too.
func (c *cluster) choose(pod *tracePod, use *eligibility.PodUse) (node string, ok bool) {
	switch {
	case pod.gpu() > 0:
	case c.rule == byPolicy && c.view.Node.ByCost():
		return c.leastCost(pod, use)
	default:
		return c.leastAllocated(pod, c.rule == away)
	}
	candidates := c.fitting(pod, c.eligible.Names(use.Constraints))
	best := placement.Best{K: 1}
	c.ledger.Rank(c.view, use.Pod, candidates, func(i int, suits placement.Suitability, reason reasons.Reason) {
		if reason == reasons.Fits {
			best.Add(placement.Candidate{Node: i, Suits: suits})
		}
	})
	chosen := best.Candidates()
	if len(chosen) == 0 {
		return "", false
	}
	node = candidates[chosen[0].Node]
	if _, err := c.ledger.Reserve(node, use.Pod, c.view.Card, c.now); err != nil {
		panic(err) // Rank has just returned that it fits.
	}
	return node, true
}

// leastCost returns the first of the nodes on which a pod without GPU costs the least.
func (c *cluster) leastCost(pod *tracePod, use *eligibility.PodUse) (node string, ok bool) {
	shape, least := use.Shape(), math.Inf(1)
	for _, name := range c.fitting(pod, c.names) {
		cost, _ := c.ledger.Cost(name, &shape)
		if cost < least {
			node, least = name, cost
		}
		if least == 0 {
			break
		}
	}
	return node, node != ""
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
