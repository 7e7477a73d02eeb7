package deviceplugin

import (
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// outcome is how the card of a container was selected, or why it got none, for logs and metrics.
type outcome string

const (
	kept   outcome = "assumed" // The annotated card, or the one that the pod already has.
	moved  outcome = "moved"   // Another card, because the annotated one had no room.
	placed outcome = "placed"  // The pod's annotations named no card.

	refusedFull        outcome = "refused_full"
	refusedUnhealthy   outcome = "refused_unhealthy"
	refusedUnknownCard outcome = "refused_unknown_card"
	refusedUnknownPod  outcome = "refused_unknown_pod"
	refusedUnavailable outcome = "refused_unavailable"
	refusedInvalid     outcome = "refused_invalid"
)

func outcomes() []outcome {
	return []outcome{kept, moved, placed, refusedFull, refusedUnhealthy, refusedUnknownCard, refusedUnknownPod, refusedUnavailable, refusedInvalid}
}

// refusal is the error of a rejection: why a container gets no card. The text is for the pod's owner, because the kubelet shows
// it in the pod's status.
type refusal struct {
	outcome outcome
	code    codes.Code
	text    string
}

func (r *refusal) Error() string { return r.text }

// GRPCStatus returns the status that gRPC sends to the kubelet. It carries the code.
func (r *refusal) GRPCStatus() *status.Status { return status.New(r.code, r.text) }

// Card selects the card for a container of a pod. It never allocates more of a card than there is: every other pod counts once,
// with its whole request, as in its spec.
//
// The annotated card is selected unless pods that really hold memory on it leave no room. The annotations of pods that were not
// served yet don't count against it: annotations can be forged, and such a pod is checked in the same way at its own Allocate
// call. They do count if the card is selected here. A card that was selected here at GetPreferredAllocation stays, even if the
// annotated card has room by now.
//
// A pod has one card: if one of its containers has a card, the other containers get the same card or a rejection. For a
// container that runs no card is selected, because it has one.
func (s *snapshot) Card(pod *podView, container string) (gpu.Card, outcome, error) {
	promised, own := s.promised(pod, container)
	if promised != noCard {
		card, ok := s.card(promised)
		switch {
		case !ok:
			return gpu.Card{}, "", &refusal{refusedUnknownCard, codes.FailedPrecondition,
				fmt.Sprintf("pod %s was assigned card %d, which this node doesn't have", pod, promised)}
		case !card.Healthy():
			return gpu.Card{}, "", &refusal{refusedUnhealthy, codes.FailedPrecondition,
				fmt.Sprintf("pod %s was assigned card %d, which is unhealthy: %s", pod, promised, card.Unhealthy)}
		case s.has(pod.UID, container, promised):
			return card, kept, nil // The kubelet has lost its checkpoint and asks again. The container keeps its card, which gets no more load.
		case !own && s.alreadyMoved(pod, container):
			// The annotated card had no room at GetPreferredAllocation, or the annotations named no such card then and were
			// changed by a wrong match since.
		case s.fits(card, pod.UID, pod.Request, false):
			return card, kept, nil
		case own:
			return gpu.Card{}, "", &refusal{refusedFull, codes.ResourceExhausted,
				fmt.Sprintf("pod %s has card %d for other containers, and other pods leave no room there for the rest of it", pod, promised)}
		}
	}
	if pod.runs(container) {
		return gpu.Card{}, "", &refusal{refusedUnknownCard, codes.FailedPrecondition,
			fmt.Sprintf("container %s of pod %s runs, and which card it has can't be told", container, pod)}
	}
	card, err := s.place(placement.Binpack, pod.UID, pod.Request)
	if err != nil {
		return gpu.Card{}, "", fmt.Errorf("pod %s: %w", pod, err)
	}
	if promised != noCard {
		return card, moved, nil
	}
	return card, placed, nil
}

// fits reports whether a card has room for a request beside the memory that all pods but except hold. If promises is set, the
// memory that annotations name counts too.
func (s *snapshot) fits(card gpu.Card, except gpu.PodUID, request gpu.Memory, promises bool) bool {
	return placement.Fit([]placement.Card{placement.NewCard(card, s.used(except, promises)[card.Index])}, request) == placement.Fits
}

// alreadyMoved reports whether the preceding GetPreferredAllocation call returned devices of another card than the annotated
// one for this container, and that card still has room.
func (s *snapshot) alreadyMoved(pod *podView, container string) bool {
	told, room := s.preferred(pod.UID, pod.Request)
	return room && s.Preferred.container == containerKey{pod.UID, container} && told.Index != pod.Assignment.Card
}

// preferred returns the card of the devices that the preceding GetPreferredAllocation call returned. It returns false if there
// is no such card or if the card has no room for the request.
func (s *snapshot) preferred(uid gpu.PodUID, request gpu.Memory) (gpu.Card, bool) {
	if s.Preferred.by == "" {
		return gpu.Card{}, false
	}
	card, ok := s.card(s.Preferred.card)
	return card, ok && s.fits(card, uid, request, true)
}

// place selects a card for a request: the preferred card if it has room, otherwise a card by the policy.
func (s *snapshot) place(policy placement.Policy, uid gpu.PodUID, request gpu.Memory) (gpu.Card, error) {
	if card, ok := s.preferred(uid, request); ok {
		return card, nil
	}
	used := s.used(uid, true)
	cards := make([]placement.Card, len(s.Cards))
	for i, c := range s.Cards {
		cards[i] = placement.NewCard(c, used[c.Index])
	}
	where, reason := placement.Place(policy, cards, request)
	if reason != placement.Fits {
		outcome := refusedFull
		if reason == placement.Unhealthy {
			outcome = refusedUnhealthy
		}
		return gpu.Card{}, &refusal{outcome, codes.ResourceExhausted,
			fmt.Sprintf("no card for %s of GPU memory: %s", request, reason)}
	}
	card, _ := s.card(where[0].Card)
	return card, nil
}

// promised returns the card that a container is to get, or noCard: the card that it was given before, else the one that other
// containers of its pod were given, else the annotated card. own reports whether the pod was given that card.
func (s *snapshot) promised(pod *podView, container string) (card int, own bool) {
	given := s.Served[pod.UID]
	if before, ok := given[container]; ok && before.HasCard() {
		return before.Card, true
	}
	if other, ok := given.Lasting(pod); ok {
		return other.Card, true
	}
	if pod.Assumed {
		return pod.Assignment.Card, false
	}
	return noCard, false
}

// has reports whether a container was given this card.
func (s *snapshot) has(uid gpu.PodUID, container string, card int) bool {
	serving, ok := s.Served[uid][container]
	return ok && serving.Card == card
}

// used returns the memory that all pods but except hold on each card. If promises is set, the memory that annotations name
// counts too.
func (s *snapshot) used(except gpu.PodUID, promises bool) map[int]gpu.Memory {
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
		if card, own := s.promised(pod, ""); own {
			add(card, pod.Request)
			// A container on another card than the rest of its pod holds its own request there as well.
			for _, serving := range s.Served[pod.UID] {
				if serving.Card != card {
					add(serving.Card, serving.Request)
				}
				if serving.Instance != "" && serving.Next != card {
					add(serving.Next, serving.Request)
				}
			}
			continue
		}
		given := s.Served[pod.UID]
		if promises || (pod.Ran || len(given) > 0) && !given.Empty() {
			for _, share := range pod.Promise {
				add(share.Card, share.Memory)
			}
		}
	}
	// Pods that the informer doesn't know yet.
	for uid, containers := range s.Served {
		if seen[uid] {
			continue
		}
		for _, serving := range containers {
			add(serving.Card, serving.Request)
		}
	}
	return used
}

func (s *snapshot) card(index int) (gpu.Card, bool) {
	for _, c := range s.Cards {
		if c.Index == index {
			return c, true
		}
	}
	return gpu.Card{}, false
}
