package allocation

import (
	"fmt"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// selectCards selects the cards for the container of the decision. It never allocates more of a card than there is, neither of its
// memory nor of its cores, nor to more containers than it takes: every other pod counts once, with its whole request, as in its spec.
//
// The annotated cards are selected if each has room beside the pods that were given a share of it. Pods that were not served yet
// don't count there, although their annotations name the card: annotations can be forged, and such a pod is checked in the same way
// at its own Allocate call. If selectCards has to choose other cards, the annotations of those pods do count.
//
// All containers of a pod have the same cards: if one of them has cards, the other containers get the same or a rejection. A
// container that runs already keeps its cards: nothing is selected for it.
func (s *Snapshot) selectCards(d Decision) Decision {
	pod, container := d.Pod, d.Container.Name
	expected, own := s.expected(pod, container)
	for _, index := range expected {
		d.Cards = append(d.Cards, gpu.Card{Index: index})
	}
	if len(expected) > 0 {
		cards, rejected := s.usable(d)
		demand := pod.DemandOver(len(expected))
		switch {
		case rejected.Rejection != nil:
			return rejected
		case !d.Container.even(len(expected)):
			return d.Reject(RefusedInvalid, "container %s of pod %s: its request can't be divided evenly over %s", container, pod, demand.On(expected...))
		case s.has(pod.UID, container, expected):
			return d.give(cards, ResultAssumed) // The call is repeated. The cards get no more load.
		case s.lacksAdapter(pod, cards):
			return d.rejectWithoutPort()
		case s.fits(cards, pod.UID, demand):
			return d.give(cards, ResultAssumed)
		case own:
			return d.noRoom(RefusedFull, "pod %s has %s for other containers, and other pods leave no room there for the rest of it", pod, demand.On(expected...))
		}
	}
	if pod.runs(container) {
		return d.Reject(RefusedUnknownCard, "container %s of pod %s runs, and it is not known which card it has", container, pod)
	}
	return s.selectOther(d, expected)
}

// selectOther selects cards for a pod that can't have the expected ones, or for which none are expected.
func (s *Snapshot) selectOther(d Decision, expected []int) Decision {
	pod := d.Pod
	if pod.Invalid != nil && len(expected) == 0 {
		return d.Reject(RefusedInvalid, "pod %s: %v", pod, pod.Invalid)
	}
	demand := pod.Demand()
	cards, reason := s.place(pod.UID, demand)
	switch {
	case reason == reasons.Unhealthy:
		return d.noRoom(RefusedUnhealthy, "pod %s: no card for %s: %s", pod, describe(demand), reason.TextFor(demand, ""))
	case reason != reasons.Fits:
		return d.noRoom(RefusedFull, "pod %s: no card for %s: %s", pod, describe(demand), reason.TextFor(demand, ""))
	case len(expected) == 0:
		return d.give(cards, ResultPlaced)
	}
	d.Moved = fmt.Sprintf("the choice for the pod was %s, and pods that have a share there leave it no room", demand.On(expected...))
	return d.give(cards, ResultMoved)
}

// describe returns what a pod asks for, for messages.
func describe(d gpu.Demand) string {
	text := d.Memory.String() + " units of GPU memory"
	if d.Cores > 0 {
		text += fmt.Sprintf(" and %s%% of its cores", d.Cores)
	}
	if d.Cards > 1 {
		text += fmt.Sprintf(" on each of %d cards", d.Cards)
	}
	return text
}

// Indexes returns the indexes of the cards.
func (d Decision) Indexes() []int {
	out := make([]int, len(d.Cards))
	for i, card := range d.Cards {
		out[i] = card.Index
	}
	return out
}

func (d Decision) give(cards []gpu.Card, result Result) Decision {
	d.Cards, d.Result = cards, result
	return d
}

func (d Decision) noRoom(result Result, text string, args ...any) Decision {
	d = d.Reject(result, text, args...)
	d.Rejection.NoRoom = true
	return d
}

// expected returns the cards that a container is to get, or none: those that it was given before, else those that other containers
// of its pod were given, else the annotated ones. own reports whether the pod was given them.
func (s *Snapshot) expected(pod *Pod, container string) (cards []int, own bool) {
	given := s.Given[pod.UID]
	if before, ok := given[container]; ok && before.HasCard() {
		return before.Cards.Cards(), true
	}
	if other, ok := given.FirstWithCard(pod); ok {
		return other.Cards.Cards(), true
	}
	if pod.Assumed {
		return pod.Assignment.Indexes(), false
	}
	return nil, false
}

// usable returns the cards of the decision as the node has them, or the decision with a rejection if no pod may be placed on one of
// them.
func (s *Snapshot) usable(d Decision) ([]gpu.Card, Decision) {
	var cards []gpu.Card
	for _, c := range d.Cards {
		card, ok := s.card(c.Index)
		switch {
		case !ok:
			return nil, d.Reject(RefusedUnknownCard, "pod %s was assigned card %d, which this node doesn't have", d.Pod, c.Index)
		case !card.Healthy():
			return nil, d.Reject(RefusedUnhealthy, "pod %s was assigned card %d, which is unhealthy: %s", d.Pod, c.Index, card.Unhealthy)
		}
		cards = append(cards, card)
	}
	return cards, d
}

func (s *Snapshot) has(uid gpu.PodUID, container string, cards []int) bool {
	a, ok := s.Given[uid][container]
	return ok && slices.Equal(a.Cards.Cards(), cards)
}

// place selects the fullest cards that fit a demand.
func (s *Snapshot) place(uid gpu.PodUID, demand gpu.Demand) ([]gpu.Card, reasons.Reason) {
	all := s.used(uid, true).on(s.Cards)
	placed, reason := placement.Place(placement.Expected, all, demand)
	switch {
	case reason == reasons.Fits:
	case !slices.ContainsFunc(all, func(c placement.Card) bool { return !c.Lacks(&demand) }):
		return nil, reasons.NoAdapter
	default:
		return nil, reason
	}
	var cards []gpu.Card
	for _, index := range placed.Cards() {
		card, _ := s.card(index)
		cards = append(cards, card)
	}
	return cards, reason
}

// fits reports whether each of the cards has room for its part of a demand beside what all pods but except were given.
func (s *Snapshot) fits(cards []gpu.Card, except gpu.PodUID, demand gpu.Demand) bool {
	return placement.Fit(s.used(except, false).on(cards), demand) == reasons.Fits
}

// InUse returns the memory that pods hold on each card, with what the annotations of pods name that were not served yet.
func (s *Snapshot) InUse() map[int]gpu.Memory {
	held := map[int]gpu.Memory{}
	for card, share := range s.used("", true) {
		held[card] = share.Memory
	}
	return held
}

// load is what pods hold of each card, by index.
type load map[int]gpu.Share

func (l load) add(shares ...gpu.Share) {
	for _, share := range shares {
		sum := l[share.Card]
		l[share.Card] = gpu.Share{
			Card: share.Card, Memory: sum.Memory.Add(share.Memory), Cores: sum.Cores.Add(share.Cores), Containers: sum.Containers + share.Containers,
		}
	}
}

// on returns the cards with what pods hold of them.
func (l load) on(cards []gpu.Card) []placement.Card {
	out := make([]placement.Card, len(cards))
	for i, c := range cards {
		out[i] = placement.NewCard(c, 0)
		out[i].Add(l[c.Index])
	}
	return out
}

// addOther adds what a container holds on cards that aren't the pod's. If the container has another number of cards than the pod,
// its share of a card can exceed the pod's, so all its shares are added, also those on the pod's cards.
func (l load) addOther(pod, container gpu.Placement) {
	for _, share := range container {
		if len(container) != len(pod) || !slices.Contains(pod.Cards(), share.Card) {
			l.add(share)
		}
	}
}

// used returns what all pods but except hold of each card, with what annotations name if annotated is set.
func (s *Snapshot) used(except gpu.PodUID, annotated bool) load {
	used := load{}
	seen := map[gpu.PodUID]bool{except: true}
	for i := range s.Pods {
		pod := &s.Pods[i]
		if seen[pod.UID] {
			continue
		}
		seen[pod.UID] = true
		if pod.Ended {
			continue
		}
		given := s.Given[pod.UID]
		if cards, own := s.expected(pod, ""); own {
			shares := pod.DemandOver(len(cards)).On(cards...)
			used.add(shares...)
			// A container on other cards than the rest of its pod holds its own request there as well.
			for _, a := range given {
				used.addOther(shares, a.Cards)
				if a.Instance != "" {
					used.addOther(shares, a.Next)
				}
			}
			continue
		}
		if annotated || (pod.Ran || len(given) > 0) && !given.withoutCard() {
			used.add(pod.Placement...)
		}
	}
	if s.Freshness == Live {
		return used // A pod that the API server's list lacks was deleted.
	}
	for uid, containers := range s.Given { // Pods that the watch has not delivered yet.
		if !seen[uid] {
			for _, a := range containers {
				used.add(a.Cards...)
			}
		}
	}
	return used
}

func (s *Snapshot) card(index int) (gpu.Card, bool) {
	for _, c := range s.Cards {
		if c.Index == index {
			return c, true
		}
	}
	return gpu.Card{}, false
}
