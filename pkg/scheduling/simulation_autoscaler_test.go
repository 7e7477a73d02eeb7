package scheduling

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// autoscaler is a model of cluster-autoscaler with one pool of nodes (k8s.io/autoscaler cluster-autoscaler/core, static_autoscaler.go). It adds
// nodes for pods that kube-scheduler reports as unschedulable and that would fit new nodes, and removes nodes that have been empty for a
// while. It asks no extender: GPU memory is a sum to it, so for a pod that only lacks room on one card it adds nothing.
type autoscaler struct {
	w *world
	autoscaling
	// nodes are all that the pool can have.
	nodes []*pooledNode
}

// autoscaling are the parameters of an autoscaler.
type autoscaling struct {
	// boot is how long it takes until a new node is there, at least half of it; empty is how long a node must have been empty to be removed.
	boot, empty time.Duration
}

// pooledNode is a place in the pool.
type pooledNode struct {
	*apiNode
	state poolState
	// since is since when the node has been empty; 0 if it isn't.
	since time.Duration
}

type poolState int

const (
	nodeAbsent poolState = iota
	nodeBooting
	nodeReady
	nodeLeaving // It is cordoned, and will be removed.
)

// autoscalerInterval is the default of cluster-autoscaler's scan-interval.
const autoscalerInterval = 10 * time.Second

// autoscale begins to scale a pool of nodes, which are all absent at first.
func (w *world) autoscale(s autoscaling, pool ...*apiNode) *autoscaler {
	a := &autoscaler{w: w, autoscaling: s}
	for _, n := range pool {
		n.pooled = true
		w.api.nodes = append(w.api.nodes, n)
		a.nodes = append(a.nodes, &pooledNode{apiNode: n})
	}
	w.after(w.between(0, autoscalerInterval), a.scan)
	return a
}

func (a *autoscaler) scan() {
	a.w.after(autoscalerInterval, a.scan)
	a.removeEmpty(a.addNeeded())
}

// addNeeded adds as few nodes as it takes for the unschedulable pods. It returns the nodes that have pods, or on which such pods fit:
// cluster-autoscaler counts these there (core/podlistprocessor, filter_out_schedulable.go).
func (a *autoscaler) addNeeded() (used map[string]bool) {
	used = map[string]bool{}
	var bins []*schedNode
	byName := map[string]*schedNode{}
	for _, n := range a.w.api.nodes {
		if n.exists {
			bins = append(bins, newBin(n))
			byName[n.name] = bins[len(bins)-1]
		}
	}
	var pending []*schedPod
	for _, p := range a.w.api.order {
		switch bin := byName[p.info.Node]; {
		case p.live() && bin != nil:
			bin.assume(&schedPod{apiPod: p})
			used[bin.name] = true
		case p.unschedulable():
			pending = append(pending, &schedPod{apiPod: p})
		}
	}
	for _, n := range a.nodes { // New nodes that aren't there yet count too.
		if n.state == nodeBooting {
			bins = append(bins, newBin(n.apiNode))
		}
	}
	for _, p := range pending {
		if i := slices.IndexFunc(bins, func(bin *schedNode) bool { return bin.take(p) }); i >= 0 {
			used[bins[i].name] = true
			continue
		}
		for _, n := range a.nodes {
			if bin := newBin(n.apiNode); n.state == nodeAbsent && bin.take(p) {
				bins = append(bins, bin)
				a.boots(n)
				break
			}
		}
	}
	return used
}

// boots adds a node.
func (a *autoscaler) boots(n *pooledNode) {
	a.w.trace("the autoscaler adds %s", n.name)
	n.state = nodeBooting
	clear(n.sick)
	n.closed = false
	a.w.after(a.w.between(a.boot/2, a.boot), func() {
		n.state, n.since = nodeReady, 0
		a.w.api.setNode(n.apiNode)
	})
}

// removeEmpty removes the nodes that have not been used for long enough.
func (a *autoscaler) removeEmpty(used map[string]bool) {
	for _, n := range a.nodes {
		switch {
		case n.state != nodeReady:
		case used[n.name]:
			n.since = 0
		case n.since == 0:
			n.since = a.w.now
		case a.w.now-n.since >= a.empty && n.exists:
			a.leaves(n)
		}
	}
}

// leaves cordons a node, and removes it unless a pod was bound to it meanwhile.
func (a *autoscaler) leaves(n *pooledNode) {
	n.state, n.closed = nodeLeaving, true
	a.w.api.setNode(n.apiNode)
	a.w.after(a.w.between(time.Second, 10*time.Second), func() {
		if slices.ContainsFunc(a.w.api.order, func(p *apiPod) bool { return p.live() && p.info.Node == n.name }) {
			n.state, n.since, n.closed = nodeReady, 0, false
			a.w.api.setNode(n.apiNode)
			return
		}
		a.w.trace("the autoscaler removes %s", n.name)
		n.state = nodeAbsent
		a.w.api.removeNode(n.apiNode)
		a.w.after(a.w.between(time.Second, 40*time.Second), func() { // A bind was under way.
			if n.state != nodeReady {
				a.w.api.deletePodsOn(n.name)
			}
		})
	})
}

// unschedulable reports whether kube-scheduler has found no node for the pod. It says nothing of gated pods.
func (p *apiPod) unschedulable() bool {
	return p.waits() && slices.ContainsFunc(p.object.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable
	})
}

// newBin returns the node without pods.
func newBin(n *apiNode) *schedNode {
	bin := &schedNode{name: n.name, zone: n.zone, closed: n.closed, size: amounts{cpu: n.cpu, ram: n.ram, pods: n.pods}}
	for i, memory := range n.cards {
		if !n.sick[i] {
			bin.size.gpu += memory
		}
	}
	return bin
}

// assume counts the pod on the node.
func (n *schedNode) assume(p *schedPod) {
	n.used = n.used.plus(p.amounts())
	n.pods = append(n.pods, p)
}

// take counts the pod on the node if it fits.
func (n *schedNode) take(p *schedPod) bool {
	if p.volume != "" || n.admits(p) != nodeFits || p.amounts().exceeds(n.size.minus(n.used)) {
		return false
	}
	n.assume(p)
	return true
}
