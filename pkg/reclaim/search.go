package reclaim

import (
	"cmp"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

const (
	// maxSteps limits all searches of one decision together, to some tenths of a second.
	maxSteps = 200_000
	// maxStepsOnCards limits the search on one set of cards. It is enough to try all sets of ten victims.
	maxStepsOnCards = 1000
)

// This file finds the cheapest victims for one pod: on each node (cheapest), there on each card or on several cards (cheapestOn), and among the
// candidates that have memory on these cards (decide).

// victimSet is a set of victims that makes room for a pod on a node, with its cost.
type victimSet struct {
	node    string
	victims []int
	memory  gpu.Memory
	// oldest is when the oldest victim started.
	oldest time.Time
}

// compare returns a negative number if s costs less than o, and a positive one if it costs more.
func (s *victimSet) compare(o *victimSet) int {
	return cmp.Or(cmp.Compare(s.memory, o.memory), o.oldest.Compare(s.oldest), cmp.Compare(len(s.victims), len(o.victims)))
}

// undercuts reports whether s is cheaper than every set that has at least this memory and whose oldest victim started no later than newest. This is
// true if memory is more than that of s, or if both are equal and the oldest victim of s started after newest. A nil s undercuts nothing.
func (s *victimSet) undercuts(memory gpu.Memory, newest time.Time) bool {
	return s != nil && (memory > s.memory || memory == s.memory && newest.Before(s.oldest))
}

// cheapest returns the cheapest victims for the pod; nil if there are none.
func (t *trial) cheapest(pod Pod) (best *victimSet) {
	for _, node := range t.order {
		if _, usable := slices.BinarySearch(pod.Nodes, node); usable && t.steps > 0 {
			best = t.cheapestOn(node, &pod.Pod, best)
		}
	}
	return best
}

// cheapestOn returns the cheapest victims on the node if they cost less than best, otherwise best. For a demand of several cards it considers
// only the set of cards that are the cheapest to free one by one.
func (t *trial) cheapestOn(node string, pod *gpu.Pod, best *victimSet) *victimSet {
	demand := pod.Demand()
	one := demand
	one.Cards = 1
	newest := t.need.Victims[t.on[node][0]].Started
	var cards []int // Those that can be freed for a part of the demand, with the victims of each.
	sets := map[int]*victimSet{}
	for i := range t.cluster.Cards[node] {
		switch c := &t.cluster.Cards[node][i]; {
		case c.Unhealthy, c.Lacks(&one), c.Memory < one.Memory:
		case demand.Cards > 1:
			if sets[i] = t.search(node, nil, []int{i}, &one, nil); sets[i] != nil {
				cards = append(cards, i)
			}
		case !best.undercuts(one.Memory.Sub(c.Free()), newest):
			best = t.search(node, pod, []int{i}, &demand, best)
		}
	}
	if demand.Cards == 1 || len(cards) < demand.Cards {
		return best
	}
	slices.SortStableFunc(cards, func(a, b int) int { return sets[a].compare(sets[b]) })
	return t.search(node, pod, cards[:demand.Cards], &demand, best)
}

// search finds the cheapest victims on a set of cards by branch and bound: it takes one candidate after the other, the newest first, and tries to evict
// it, and to keep it.
type search struct {
	*trial
	node   string
	pod    *gpu.Pod
	cards  []int
	demand *gpu.Demand
	// pool are the candidates with memory on the cards. shares is what each of them has on the first card.
	pool   []int
	shares []gpu.Memory
	steps  int
	best   *victimSet
	// chosen are the victims so far, the newest first, and memory is what they have.
	chosen []int
	memory gpu.Memory
}

// search returns the cheapest victims on the cards if they cost less than best, otherwise best. cards are positions. If pod is nil, only the
// cards count, not the other resources.
func (t *trial) search(node string, pod *gpu.Pod, cards []int, demand *gpu.Demand, best *victimSet) *victimSet {
	s := &search{trial: t, node: node, pod: pod, cards: cards, demand: demand, best: best, steps: maxStepsOnCards}
	var indexes []int
	for _, c := range cards {
		indexes = append(indexes, t.cluster.Cards[node][c].Index)
	}
	for _, v := range t.on[node] {
		if t.isGone(v) {
			continue
		}
		onFirst, onAny := gpu.Memory(0), false
		for _, p := range t.need.Victims[v].Pods {
			place := t.cluster.Places[p.UID]
			if place.Node != node {
				continue
			}
			for _, share := range place.On {
				onAny = onAny || slices.Contains(indexes, share.Card)
				if share.Card == indexes[0] {
					onFirst = onFirst.Add(share.Memory)
				}
			}
		}
		if onAny {
			s.pool, s.shares = append(s.pool, v), append(s.shares, onFirst)
		}
	}
	s.decide(0)
	return s.best
}

// decide decides about the candidates from position i on. It gives up where no better victims can follow.
func (s *search) decide(i int) {
	s.steps--
	s.trial.steps--
	if s.fits() {
		s.record()
		return
	}
	first := &s.cluster.Cards[s.node][s.cards[0]]
	lacks := max(s.demand.Memory.Sub(first.Free()), 1) // At least one more victim is needed, for another card or resource if not for this card.
	switch {
	case i == len(s.pool), s.steps <= 0, s.trial.steps <= 0:
		return
	case s.best.undercuts(s.memory.Add(lacks), s.need.Victims[s.pool[i]].Started):
		return
	case first.Memory.Sub(s.demand.Memory) < first.Used.Sub(s.freeable(i)): // All remaining candidates together don't free enough.
		return
	}
	if v := s.pool[i]; s.mayEvict(v) {
		memory := s.need.Victims[v].Memory()
		s.evict(v)
		s.chosen, s.memory = append(s.chosen, v), s.memory+memory
		s.decide(i + 1)
		s.chosen, s.memory = s.chosen[:len(s.chosen)-1], s.memory-memory
		s.restore(v)
	}
	s.decide(i + 1)
}

// freeable returns what the candidates from position i on have on the first card, as far as their tenants can lose it beside the victims so far.
func (s *search) freeable(i int) (sum gpu.Memory) {
	of := map[string]gpu.Memory{}
	for j, v := range s.pool[i:] {
		if !s.isGone(v) { // Otherwise a member of the group is a victim by itself.
			of[s.need.Victims[v].Tenant] += s.shares[i+j]
		}
	}
	for tenant, memory := range of {
		sum += min(memory, s.need.Tenants[tenant].Excess.Sub(s.lost[tenant]))
	}
	return sum
}

// fits reports whether the pod fits the cards now.
func (s *search) fits() bool {
	cards := s.cluster.Cards[s.node]
	if slices.ContainsFunc(s.cards, func(i int) bool { return !cards[i].Fits(s.demand) }) {
		return false
	}
	return s.pod == nil || s.fitsResources(s.node, *s.pod)
}

// record makes the victims so far the best ones, if they cost less than these.
func (s *search) record() {
	found := &victimSet{node: s.node, victims: slices.Clone(s.chosen), memory: s.memory}
	if n := len(s.chosen); n > 0 {
		found.oldest = s.need.Victims[s.chosen[n-1]].Started
	}
	if s.best == nil || found.compare(s.best) < 0 {
		s.best = found
	}
}
