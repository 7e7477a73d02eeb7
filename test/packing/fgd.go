package main

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
)

// fgd is a cluster whose pods are placed by the best published policy, "fragmentation gradient descent" ("Beware of Fragmentation", USENIX ATC
// 2023, section 4): each pod goes where the expected fragmentation grows the least.
type fgd struct {
	scheduler
	rule rule
	// nodesWithCards has the nodes that have cards, in the order of the run.
	nodesWithCards []*fgdNode
	byName         map[string]*fgdNode
	// typical are the kinds of pods that come.
	typical []typicalPod
	// scores has a score of each node for each kind of pods, computed again if the node has changed.
	scores map[tracePod][]fgdScore
	// cards are those of pods that run, by number.
	cards          map[int][]int
	allocated, all int
}

// fgdNode is a node with the free part of each card, in thousandths.
type fgdNode struct {
	*schedulerNode
	name, model string
	free        []int
	revision    int
	// fragments is the expected fragmentation.
	fragments float64
}

// typicalPod is a kind of pods, and which part of all pods are of this kind.
type typicalPod struct {
	tracePod
	part float64
}

// fgdScore is how good a node is for a kind of pods, -1 if they don't fit, and the cards that they get.
type fgdScore struct {
	revision, score int
	cards           []int
}

func newFGD(nodes []traceNode, order []int, workload []tracePod, rule rule, ties *rand.Rand) *fgd {
	f := &fgd{
		scheduler: newScheduler(nodes, order, ties), rule: rule, nodesWithCards: make([]*fgdNode, len(nodes)), byName: map[string]*fgdNode{},
		typical: typicalPods(workload), scores: map[tracePod][]fgdScore{}, cards: map[int][]int{},
	}
	for i := range nodes {
		n := &fgdNode{schedulerNode: f.nodes[nodes[i].name], name: nodes[i].name, model: nodes[i].model, revision: 1}
		for range nodes[i].cards {
			n.free = append(n.free, cardMemory)
		}
		n.fragments = f.fragments(n)
		f.nodesWithCards[order[i]], f.byName[n.name] = n, n
		f.all += nodes[i].cards * cardMemory
	}
	f.nodesWithCards = slices.DeleteFunc(f.nodesWithCards, func(n *fgdNode) bool { return len(n.free) == 0 })
	return f
}

// wait implements world.
func (f *fgd) wait(*tracePod, int) {}

// foretell implements world.
func (f *fgd) foretell(workload []tracePod) {
	f.typical, f.scores = typicalPods(workload), map[tracePod][]fgdScore{}
	for _, n := range f.nodesWithCards {
		n.fragments = f.fragments(n)
	}
}

// typicalPods returns the most frequent kinds of pods that make up 95% of all.
func typicalPods(pods []tracePod) (typical []typicalPod) {
	counts := map[tracePod]int{}
	for i := range pods {
		counts[pods[i].kind()]++
	}
	for kind, count := range counts {
		typical = append(typical, typicalPod{kind, float64(count) / float64(len(pods))})
	}
	slices.SortFunc(typical, func(a, b typicalPod) int {
		return cmp.Or(cmp.Compare(b.part, a.part), cmp.Compare(a.cpu, b.cpu), cmp.Compare(a.gpu(), b.gpu()), strings.Compare(a.models, b.models))
	})
	sum := 0.0
	for i := range typical {
		if sum += typical[i].part; sum >= 0.95 {
			return typical[:i+1]
		}
	}
	return typical
}

// kind returns the pod without what the policy doesn't see.
func (p *tracePod) kind() tracePod {
	return tracePod{cpu: p.cpu, cards: p.cards, milli: p.milli, models: p.models}
}

// accepts reports whether the pod can use cards of the model.
func (p *tracePod) accepts(model string) bool {
	return p.models == "" || slices.Contains(strings.Split(p.models, "|"), model)
}

// fragments returns how much of the node's free cards pods of a typical kind can't use on average, in thousandths of a card.
func (f *fgd) fragments(n *fgdNode) (sum float64) {
	all := 0
	for _, free := range n.free {
		all += free
	}
	if all == 0 {
		return 0
	}
	for i := range f.typical {
		pod := &f.typical[i]
		unusable, cards := 0, 0
		for _, free := range n.free {
			if free >= pod.milli {
				cards++
			} else {
				unusable += free
			}
		}
		if pod.cards == 0 || cards < pod.cards || n.cpu-n.usedCPU < pod.cpu || !pod.accepts(n.model) {
			unusable = all
		}
		sum += pod.part * float64(unusable)
	}
	return sum
}

// take changes what the node has free by one pod, which has these cards. sign is 1, or -1 if the pod ends.
func (n *fgdNode) take(pod *tracePod, cards []int, sign int) {
	n.usedCPU, n.usedMemory = n.usedCPU+int64(sign)*pod.cpu, n.usedMemory+int64(sign)*pod.memory
	for _, card := range cards {
		n.free[card] -= sign * pod.milli
	}
}

// first returns the first cards that have room for the pod; fewer than it needs if too few have.
func (n *fgdNode) first(pod *tracePod) (cards []int) {
	for card, free := range n.free {
		if len(cards) < pod.cards && free >= pod.milli {
			cards = append(cards, card)
		}
	}
	return cards
}

// score returns how good the node is for the pod.
func (f *fgd) score(n *fgdNode, pod *tracePod) fgdScore {
	best, first := fgdScore{revision: n.revision, score: -1}, n.first(pod)
	if len(first) < pod.cards || n.cpu-n.usedCPU < pod.cpu || !pod.accepts(n.model) {
		return best
	}
	try := func(cards []int) {
		n.take(pod, cards, 1)
		grown := f.fragments(n) - n.fragments
		n.take(pod, cards, -1)
		if score := int(100 / (1 + math.Exp(grown/cardMemory))); score > best.score {
			best.score, best.cards = score, cards
		}
	}
	try(first)
	for card, free := range n.free {
		if pod.cards == 1 && card != first[0] && free >= pod.milli && free != n.free[first[0]] {
			try([]int{card})
		}
	}
	return best
}

// arrive implements world.
func (f *fgd) arrive(pod *tracePod, number int) (node string, ok bool) {
	if pod.gpu() == 0 && f.rule != byPolicy {
		if node, ok = f.leastAllocated(pod, f.rule == away); ok {
			f.put(f.byName[node], pod, number, nil)
		}
		return node, ok
	}
	kind := pod.kind()
	scores := f.scores[kind]
	if scores == nil {
		scores = make([]fgdScore, len(f.nodesWithCards))
		f.scores[kind] = scores
	}
	best := -1
	for i, n := range f.nodesWithCards {
		if scores[i].revision != n.revision {
			scores[i] = f.score(n, &kind)
		}
		if scores[i].score >= 0 && (best < 0 || scores[i].score > scores[best].score) && n.fits(pod) {
			best = i
		}
	}
	if best < 0 {
		return "", false
	}
	f.put(f.nodesWithCards[best], pod, number, scores[best].cards)
	return f.nodesWithCards[best].name, true
}

// placeOn implements world.
func (f *fgd) placeOn(node string, pod *tracePod, number int) bool {
	n, kind := f.byName[node], pod.kind()
	score := f.score(n, &kind)
	if score.score < 0 || !n.fits(pod) {
		return false
	}
	f.put(n, pod, number, score.cards)
	return true
}

func (f *fgd) put(n *fgdNode, pod *tracePod, number int, cards []int) {
	f.cards[number] = cards
	f.allocated += pod.gpu()
	f.change(n, pod, cards, 1)
}

// end implements world.
func (f *fgd) end(node string, pod *tracePod, number int) {
	f.allocated -= pod.gpu()
	f.change(f.byName[node], pod, f.cards[number], -1)
	delete(f.cards, number)
}

func (f *fgd) change(n *fgdNode, pod *tracePod, cards []int, sign int) {
	n.take(pod, cards, sign)
	n.revision++
	n.fragments = f.fragments(n)
}

// used implements world.
func (f *fgd) used() float64 { return float64(f.allocated) / float64(f.all) }
