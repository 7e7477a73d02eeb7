package allocation

import (
	"fmt"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// selectCard selects the card for the container of the decision. It never allocates more of a card than there is: every other
// pod counts once, with its whole request, as in its spec.
//
// The annotated card is selected if it has room beside the pods that were given memory on it. Pods that were not served yet don't
// count there, although their annotations name the card: annotations can be forged, and such a pod is checked in the same way at
// its own Allocate call. If selectCard has to choose another card, the annotations of those pods do count. If it chose another card
// at GetPreferredAllocation, that choice stays, even if the annotated card has room by now.
//
// A pod has one card: if one of its containers has a card, the other containers get the same card or a rejection. For a
// container that runs no card is selected, because it has one.
func (s *Snapshot) selectCard(d Decision) Decision {
	pod, container := d.Pod, d.Container.Name
	index, own := s.expected(pod, container)
	d.Card = gpu.Card{Index: index}
	if index != NoCard {
		card, ok := s.card(index)
		switch {
		case !ok:
			return d.reject(RefusedUnknownCard, "pod %s was assigned card %d, which this node doesn't have", pod, index)
		case !card.Healthy():
			return d.reject(RefusedUnhealthy, "pod %s was assigned card %d, which is unhealthy: %s", pod, index, card.Unhealthy)
		case s.has(pod.UID, container, index):
			return d.give(card, ResultKept) // The call is repeated. The card gets no more load.
		case !own && s.preferredOther(pod, container):
			// The annotated card had no room at GetPreferredAllocation, or the annotations named another card then.
		case s.fits(card, pod.UID, pod.Request, false):
			return d.give(card, ResultKept)
		case own:
			d = d.reject(RefusedFull, "pod %s has card %d for other containers, and other pods leave no room there for the rest of it", pod, index)
			d.Rejection.NoRoom = true
			return d
		}
	}
	if pod.runs(container) {
		return d.reject(RefusedUnknownCard, "container %s of pod %s runs, and it is not known which card it has", container, pod)
	}
	card, reason := s.place(pod.UID, pod.Request)
	switch {
	case reason != placement.Fits:
		result := RefusedFull
		if reason == placement.Unhealthy {
			result = RefusedUnhealthy
		}
		d = d.reject(result, "pod %s: no card for %s units of GPU memory: %s", pod, pod.Request, reason)
		d.Rejection.NoRoom = true
		return d
	case index == NoCard:
		return d.give(card, ResultPlaced)
	}
	d.Moved = fmt.Sprintf("card %d, which was chosen for the pod, has no room left for it beside the pods that hold it", index)
	if annotated, ok := s.card(index); ok && s.fits(annotated, pod.UID, pod.Request, false) {
		d.Moved = fmt.Sprintf("the kubelet chose its devices when card %d had no room for the pod, or wasn't the pod's", index)
	}
	return d.give(card, ResultMoved)
}

func (d Decision) give(card gpu.Card, result Result) Decision {
	d.Card, d.Result = card, result
	return d
}

// expected returns the card that a container is to get, or NoCard: the card that it was given before, else the one that other
// containers of its pod were given, else the annotated card. own reports whether the pod was given that card.
func (s *Snapshot) expected(pod *Pod, container string) (card int, own bool) {
	given := s.Given[pod.UID]
	if before, ok := given[container]; ok && before.HasCard() {
		return before.Card, true
	}
	if other, ok := given.Lasting(pod); ok {
		return other.Card, true
	}
	if pod.Assumed {
		return pod.Assignment.Cards[0].Index, false
	}
	return NoCard, false
}

func (s *Snapshot) has(uid gpu.PodUID, container string, card int) bool {
	a, ok := s.Given[uid][container]
	return ok && a.Card == card
}

// preferredOther reports whether the preceding GetPreferredAllocation call returned devices of another card than the annotated
// one for this container, and that card still has room.
func (s *Snapshot) preferredOther(pod *Pod, container string) bool {
	card, room := s.preferred(pod.UID, pod.Request)
	return room && s.Preferred.Container == ContainerKey{pod.UID, container} && card.Index != pod.Assignment.Cards[0].Index
}

// preferred returns the card of the devices that the preceding GetPreferredAllocation call returned. It returns false if there
// is no such card or if the card has no room for the request.
func (s *Snapshot) preferred(uid gpu.PodUID, request gpu.Memory) (gpu.Card, bool) {
	if s.Preferred.Match == "" {
		return gpu.Card{}, false
	}
	card, ok := s.card(s.Preferred.Card)
	return card, ok && s.fits(card, uid, request, true)
}

// place selects a card for a request: the preferred card if it has room, so that the kubelet's checkpoint names the card that
// the container has, and otherwise the fullest card that fits.
func (s *Snapshot) place(uid gpu.PodUID, request gpu.Memory) (gpu.Card, placement.Reason) {
	if card, ok := s.preferred(uid, request); ok {
		return card, placement.Fits
	}
	used := s.used(uid, true)
	cards := make([]placement.Card, len(s.Cards))
	for i, c := range s.Cards {
		cards[i] = placement.NewCard(c, used[c.Index])
	}
	placed, reason := placement.Place(placement.Expected, cards, gpu.Demand{Cards: 1, Memory: request})
	if reason != placement.Fits {
		return gpu.Card{}, reason
	}
	card, _ := s.card(placed[0].Card)
	return card, reason
}

// fits reports whether a card has room for a request beside the memory that all pods but except hold. If annotated is set, the
// memory that annotations name counts too.
func (s *Snapshot) fits(card gpu.Card, except gpu.PodUID, request gpu.Memory, annotated bool) bool {
	return placement.Fit([]placement.Card{placement.NewCard(card, s.used(except, annotated)[card.Index])}, gpu.Demand{Cards: 1, Memory: request}) == placement.Fits
}

// Held returns the memory that pods hold on each card, with what the annotations of pods name that were not served yet.
func (s *Snapshot) Held() map[int]gpu.Memory { return s.used("", true) }

// used returns the memory that all pods but except hold on each card, with what annotations name if annotated is set.
func (s *Snapshot) used(except gpu.PodUID, annotated bool) map[int]gpu.Memory {
	used := map[int]gpu.Memory{}
	add := func(card int, memory gpu.Memory) {
		if card >= 0 {
			used[card] = used[card].Add(memory)
		}
	}
	seen := map[gpu.PodUID]bool{except: true}
	for i := range s.Pods {
		pod := &s.Pods[i]
		if seen[pod.UID] {
			continue
		}
		seen[pod.UID] = true
		if pod.Terminal {
			continue
		}
		given := s.Given[pod.UID]
		if card, own := s.expected(pod, ""); own {
			add(card, pod.Request)
			// A container on another card than the rest of its pod holds its own request there as well.
			for _, a := range given {
				if a.Card != card {
					add(a.Card, a.Request)
				}
				if a.Instance != "" && a.Next != card {
					add(a.Next, a.Request)
				}
			}
			continue
		}
		if annotated || (pod.Ran || len(given) > 0) && !given.withoutCard() {
			for _, share := range pod.Placement {
				add(share.Card, share.Memory)
			}
		}
	}
	// Pods that the watch has not delivered yet.
	for uid, containers := range s.Given {
		if !seen[uid] {
			for _, a := range containers {
				add(a.Card, a.Request)
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
