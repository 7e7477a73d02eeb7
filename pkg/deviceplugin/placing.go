package deviceplugin

import (
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// outcome is how a container came to its card, or why to none; for logs and metrics.
type outcome string

const (
	kept   outcome = "assumed" // The card that the scheduler's half chose, or that the pod has already.
	moved  outcome = "moved"   // Another one: the chosen card was taken.
	placed outcome = "placed"  // Nobody had chosen.

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

// refusal is why a container gets no card, in words for the pod's owner: the kubelet shows them in the pod's status.
type refusal struct {
	outcome outcome
	code    codes.Code
	text    string
}

func (r *refusal) Error() string { return r.text }

// GRPCStatus makes gRPC send the code along.
func (r *refusal) GRPCStatus() *status.Status { return status.New(r.code, r.text) }

// Card decides which card a container of a pod is given. It never gives out more of a card than is there: every other
// pod counts with its whole request, once, as its spec has it.
//
// A promised card is given unless pods that really hold it leave no room; promises to pods not served yet don't stand
// against it, because annotations can be forged, and such a pod meets this same check when its turn comes. Where a
// card is chosen here, they do; and what was chosen so when the kubelet asked which devices to take stays, though the
// promised card should have room by now. A pod has one card: what one of its containers was given is what the others
// get, or nothing. For one that runs no card is chosen: it has one.
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
			return card, kept, nil // Once more what it had: the kubelet has lost its books, and nothing is added to the card.
		case !own && s.alreadyMoved(pod, container):
			// The promised card had no room then; or it wasn't promised yet, and a wrong guess has changed the annotations since.
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

// fits says whether a card has room for a request beside what pods other than this one hold, or are to have.
func (s *snapshot) fits(card gpu.Card, except gpu.PodUID, request gpu.Memory, promises bool) bool {
	return placement.Fit([]placement.Card{placement.NewCard(card, s.used(except, promises)[card.Index])}, request) == placement.Fits
}

// alreadyMoved says whether a moment ago the kubelet was told to take devices of another card than the promised one for
// this very container, which still has room there.
func (s *snapshot) alreadyMoved(pod *podView, container string) bool {
	told, room := s.preferred(pod.UID, pod.Request)
	return room && s.Preferred.container == containerKey{pod.UID, container} && told.Index != pod.Assignment.Card
}

// preferred returns the card whose devices the kubelet was told to take a moment ago, if it has room for a request.
func (s *snapshot) preferred(uid gpu.PodUID, request gpu.Memory) (gpu.Card, bool) {
	if s.Preferred.by == "" {
		return gpu.Card{}, false
	}
	card, ok := s.card(s.Preferred.card)
	return card, ok && s.fits(card, uid, request, true)
}

// place chooses a card for a request.
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

// promised returns the card that a container is to have, or noCard: the one that it was given before, else the one that
// others of its pod were, else the one chosen for the pod. own says that the pod was given it.
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

// has says whether a container was given this card.
func (s *snapshot) has(uid gpu.PodUID, container string, card int) bool {
	serving, ok := s.Served[uid][container]
	return ok && serving.Card == card
}

// used returns how much of each card pods other than this one hold, and with promises, are to have.
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
			// Containers that ended up on another card than the rest hold their part there as well.
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
	// Pods that the informer hasn't heard of yet.
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
