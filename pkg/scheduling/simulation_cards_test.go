package scheduling

import (
	"maps"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/fake"
)

// TestSimulationOfCards runs worlds whose nodes have different isolation modes and device plugins, which change, and whose pods ask
// for several cards, cores, or several containers. Their labels change at any time. No card may have more of anything allocated
// than it has, whatever the label says while the extenders restart, and each pod gets what its spec and one of its labels ask for.
func TestSimulationOfCards(t *testing.T) {
	total := simulate(t, 200_000, mixedWorld)
	for _, what := range []string{
		"several cards", "cores", "cores of several cards", "several containers", "containers by MPS", "an adapter required", "an adapter required of several cards", "an adapter required of a member", "an adapter required of a preemptor", "an adapter preferred",
		"the label changed while the pod was pending", "the label changed while the pod was bound", "another adapter label", "node changed",
	} {
		if total.cards[what] == 0 {
			t.Errorf("no world had %s: %v", what, total.cards)
		}
	}
}

// extras is what a pod of a mixed world asks for besides memory.
type extras struct {
	cores int64
	// two is true if the pod has two containers, with half the memory each.
	two bool
	// rdma is the value of protocol.LabelRDMA; empty if the pod doesn't have the label.
	rdma string
}

func (e extras) apply(spec *corev1.PodSpec) {
	main := &spec.Containers[0]
	if e.two {
		quantity := main.Resources.Limits[protocol.ResourceMemory]
		half := fake.Amount(protocol.ResourceMemory, quantity.Value()/2)
		main.Resources.Limits = maps.Clone(half)
		spec.Containers = append(spec.Containers, corev1.Container{Name: "side", Resources: corev1.ResourceRequirements{Limits: half}})
	}
	if e.cores > 0 {
		main.Resources.Limits[protocol.ResourceCores] = quantity(e.cores)
	}
}

// randomDemand lets a pod of a mixed world ask for more than memory. What it asks for is valid with one card and with two.
func (w *world) randomDemand(spec *podSpec) {
	if !w.mixed || spec.memory%4 != 0 || spec.memory == 0 {
		return
	}
	spec.two = w.chance(0.3)
	if w.chance(0.4) {
		spec.cores = 2 * (1 + int64(w.random.IntN(50)))
	}
	if w.chance(0.6) {
		spec.rdma = []string{protocol.RDMAPreferred, protocol.RDMARequired, protocol.RDMARequired}[w.random.IntN(3)]
	}
	if spec.rdma == protocol.RDMARequired && w.chance(0.3) { // So that pods are evicted for some.
		spec.priority = 100
	}
	if !spec.twoCards && spec.group == "" {
		spec.twoCards = w.chance(0.3) || spec.rdma == protocol.RDMARequired && w.chance(0.5)
	}
}

// nodeMode is what a node of a mixed world takes. The zero value takes anything.
type nodeMode struct {
	mixed bool
	// limit is how many containers a card takes in mode mps; zero for another mode.
	limit int32
	// old is true if the device plugin understands neither several cards nor cores.
	old bool
	// near are the cards near an adapter.
	near map[int]bool
	// since is when the mode changed. Extenders learn it late.
	since time.Duration
	// cores and containers are what is bound of each card.
	cores      map[int]gpu.Cores
	containers map[int]int32
}

func (m *nodeMode) apply(inventory *protocol.Inventory) {
	switch {
	case !m.mixed:
		return
	case m.old:
		inventory.Features = nil
	default:
		inventory.Features = []string{protocol.FeatureCards, protocol.FeatureCores, protocol.FeatureRDMA}
	}
	for i := range inventory.Cards {
		if !m.old && m.near[i] {
			inventory.Cards[i].RDMAPorts = "mlx5_0:1"
		}
	}
	if m.limit > 0 {
		inventory.Isolation = protocol.IsolationMPS
		for i := range inventory.Cards {
			inventory.Cards[i].MaxContainers = int(m.limit)
		}
	}
}

// count adds a share to what is bound, or subtracts it.
func (m *nodeMode) count(share gpu.Share, sign int32) {
	if m.mixed {
		m.cores[share.Card] += gpu.Cores(sign) * share.Cores
		m.containers[share.Card] += sign * share.Containers
	}
}

// randomMode gives a node of a mixed world a mode.
func (w *world) randomMode(n *apiNode) {
	if !w.mixed {
		return
	}
	if !n.mixed {
		n.nodeMode = nodeMode{mixed: true, cores: map[int]gpu.Cores{}, containers: map[int]int32{}}
	}
	n.limit, n.old, n.since = 0, w.chance(0.2), w.now
	if w.chance(0.4) {
		n.limit = 1 + w.random.Int32N(4)
	}
	n.near = map[int]bool{}
	for i := range n.cards {
		n.near[i] = w.chance(0.7)
	}
	w.api.setNode(n)
}

// mix changes the mode of a node, or labels of pods, again and again.
func (w *world) mix() {
	if w.calm {
		w.endMix()
		return
	}
	w.after(w.between(100*time.Millisecond, 5*time.Second), w.mix)
	if n := w.api.nodes[w.random.IntN(len(w.api.nodes))]; n.exists && w.chance(0.01) {
		w.stats.cards["node changed"]++
		w.randomMode(n)
		return
	}
	existing := slices.DeleteFunc(slices.Clone(w.api.order), func(p *apiPod) bool { return !p.exists || p.info.Ended })
	if len(existing) == 0 {
		return
	}
	p := existing[w.random.IntN(len(existing))]
	label, own, others := protocol.LabelCount, "1", []string{"1", "2", "2", "4", "none", "3"}
	if p.twoCards {
		own = "2"
	}
	if w.chance(0.2) {
		label, own, others = protocol.LabelRDMA, p.rdma, []string{"", protocol.RDMAPreferred, protocol.RDMARequired}
	}
	w.relabel(p, label, others[w.random.IntN(len(others))])
	if w.chance(0.7) { // Most are set back soon.
		w.after(w.between(0, 2*time.Second), func() { w.relabel(p, label, own) })
	}
}

// relabel changes a label of a pod that says how many cards it asks for, or whether near an adapter. An empty text removes the label.
func (w *world) relabel(p *apiPod, label, text string) {
	if !p.exists {
		return
	}
	state := "pending"
	if p.bound() {
		state = "bound"
	}
	w.stats.cards["the label changed while the pod was "+state]++
	if label == protocol.LabelRDMA && text != p.object.Labels[label] {
		w.stats.cards["another adapter label"]++
	}
	w.trace("api: %s has the label %s=%s while it is %s", p.name(), label, text, state)
	if p.counts == nil {
		p.counts = map[int]bool{}
	}
	p.counts[p.info.NumCards()] = true
	w.api.edit(p, func(object *corev1.Pod) {
		object.Labels = maps.Clone(object.Labels) // A copy of the pod shares it.
		metav1.SetMetaDataLabel(&object.ObjectMeta, label, text)
		if text == "" {
			delete(object.Labels, label)
		}
	})
	p.counts[p.info.NumCards()] = true
	p.relabelled = w.now
	if p.info.RequestError != "" {
		w.api.missing(p)
	}
}

// endMix deletes the pending pods whose label has changed.
func (w *world) endMix() {
	for _, p := range slices.Clone(w.api.order) {
		if p.counts != nil && p.exists && !p.bound() {
			w.api.delete(p)
		}
	}
}

// modeKnown is how long after a change of a node's mode each extender knows it.
const modeKnown = 5 * time.Minute

// labelKnown is how long after a change of a label each extender that isn't blind knows it, and no bind from before is in flight.
const labelKnown = 15 * time.Second

// checkCards checks a pod of a mixed world that was bound to the node just now. The memory of each card is checked without it.
func (w *world) checkCards(p *apiPod, n *apiNode) {
	if !n.mixed || p.memory == 0 {
		return
	}
	assigned, err := protocol.ParseAssignment(p.object.Annotations)
	where, request := p.info.Placement, len(assigned.Cards)
	total, cores := where.Total(), gpu.Cores(0)
	for _, share := range where {
		cores += share.Cores
	}
	switch counts := p.counts; {
	case err != nil, len(where) != request, total != gpu.Memory(p.memory), int64(cores) != p.cores:
		w.fail("%s is bound to %v of %s, %d and %d%% in total: %v, %v", p.name(), where, n.name, total, cores, p.object.Annotations, err)
	case counts == nil && request != p.info.NumCards(), counts != nil && !counts[request]:
		w.fail("%s is bound to %v of %s, and never asked for as many cards", p.name(), where, n.name)
	}
	for _, share := range where {
		if used := n.cores[share.Card]; used > gpu.CardCores {
			w.fail("card %d of %s has %d%% bound: the last is %s", share.Card, n.name, used, p.name())
		}
	}
	if w.now-n.since < modeKnown {
		return
	}
	for _, share := range where {
		if used := n.containers[share.Card]; n.limit > 0 && used > n.limit {
			w.fail("card %d of %s has %d of %d containers bound: the last is %s", share.Card, n.name, used, n.limit, p.name())
		}
	}
	required := p.info.RDMA == gpu.RDMARequired && (p.counts == nil || w.now > max(p.relabelled, w.blind)+labelKnown)
	for _, share := range where {
		if required && (n.old || !n.near[share.Card]) {
			w.fail("%s is bound to %v of %s, and card %d isn't near an adapter", p.name(), where, n.name, share.Card)
		}
	}
	if request > 1 && (n.limit > 0 || n.old) || cores > 0 && n.old {
		w.fail("%s is bound to %v of %s, which doesn't take such pods", p.name(), where, n.name)
	}
	for what, reached := range map[string]bool{
		"several cards": request > 1, "cores": cores > 0, "cores of several cards": request > 1 && cores > 0, "several containers": p.two,
		"containers by MPS": n.limit > 0, "an adapter required": required, "an adapter preferred": p.rdma == protocol.RDMAPreferred,
		"an adapter required of several cards": required && request > 1,
		"an adapter required of a member":      required && p.group != "",
	} {
		if reached {
			w.stats.cards[what]++
		}
	}
}

// checkVictims checks the extender's answer for a preemptor that requires an adapter: without the victims of a node, enough cards near an adapter
// must have room. A pod that has its cards already is checked by checkPromise.
func (w *world) checkVictims(r *replica, p *schedPod, proposed map[string]preemption.Victims) {
	if _, _, allocated := r.scheduler.ledger.Lookup(p.info.UID); allocated || p.info.RDMA != gpu.RDMARequired {
		return
	}
	demand := p.info.Demand()
	for _, name := range slices.Sorted(maps.Keys(proposed)) {
		w.stats.cards["an adapter required of a preemptor"]++
		node, _ := r.scheduler.ledger.Node(name)
		used := map[int]gpu.Memory{}
		for _, a := range node.Allocations {
			for _, share := range a.Placement {
				if !slices.Contains(proposed[name].Pods, a.UID) {
					used[share.Card] += share.Memory
				}
			}
		}
		near := 0
		for _, card := range node.Cards {
			if card.RDMAPorts != "" && used[card.Index]+demand.Memory <= card.Memory {
				near++
			}
		}
		if near < demand.Cards {
			w.fail("%s proposes %v of %s for %s: %d of %d cards near an adapter then have room", r.name, proposed[name].Pods, name, p.name(), near, demand.Cards)
		}
	}
}
