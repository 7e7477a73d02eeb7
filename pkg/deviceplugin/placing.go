package deviceplugin

import (
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/types"

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
	refusedUnavailable outcome = "refused_unavailable"
	refusedInvalid     outcome = "refused_invalid"
)

func outcomes() []outcome {
	return []outcome{kept, moved, placed, refusedFull, refusedUnhealthy, refusedUnknownCard, refusedUnavailable, refusedInvalid}
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

// Card decides which card the next container of a pod is given. It never gives out more of a card than is there:
// every other pod counts with its whole request, once, as its spec has it.
//
// A promised card is given unless pods that really hold it leave no room; promises to pods not served yet don't stand
// against it, because annotations can be forged, and such a pod meets this same check when its turn comes. Where a
// card is chosen here, they do.
func (s *snapshot) Card(pod *podView) (gpu.Card, outcome, error) {
	promised, own := s.promised(pod)
	if promised != noCard {
		card, ok := s.card(promised)
		switch {
		case !ok:
			return gpu.Card{}, "", &refusal{refusedUnknownCard, codes.FailedPrecondition,
				fmt.Sprintf("pod %s was assigned card %d, which this node doesn't have", pod, promised)}
		case !card.Healthy():
			return gpu.Card{}, "", &refusal{refusedUnhealthy, codes.FailedPrecondition,
				fmt.Sprintf("pod %s was assigned card %d, which is unhealthy: %s", pod, promised, card.Unhealthy)}
		case own || placement.Fit([]placement.Card{{Card: card, Used: s.used(pod.UID, false)[promised]}}, pod.Request) == placement.Fits:
			return card, kept, nil
		}
	}
	if promised == noCard && s.Preferred != nil {
		card, ok := s.card(*s.Preferred)
		if ok && placement.Fit([]placement.Card{{Card: card, Used: s.used(pod.UID, true)[card.Index]}}, pod.Request) == placement.Fits {
			return card, placed, nil
		}
	}
	card, err := s.place(pod.UID, pod.Request)
	if err != nil {
		return gpu.Card{}, "", fmt.Errorf("pod %s: %w", pod, err)
	}
	if promised != noCard {
		return card, moved, nil
	}
	return card, placed, nil
}

// place chooses a card for a request.
func (s *snapshot) place(uid gpu.PodUID, request gpu.Memory) (gpu.Card, error) {
	used := s.used(uid, true)
	cards := make([]placement.Card, len(s.Cards))
	for i, c := range s.Cards {
		cards[i] = placement.Card{Card: c, Used: used[c.Index]}
	}
	where, reason := placement.Place(placement.Binpack, cards, request)
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

// promised returns the card that the pod is to have, or noCard. own says that containers of it have that card already:
// then its memory is the pod's.
func (s *snapshot) promised(pod *podView) (card int, own bool) {
	for _, container := range pod.Containers {
		if serving, ok := s.Served[pod.UID][container.Name]; ok && serving.HasCard() {
			return serving.Card, true
		}
	}
	if pod.Assumed {
		return pod.Assignment.Card, false
	}
	return noCard, false
}

// forgetDeleted drops what was given to pods that had an object, as the informer still has it, and are not among the
// live pods any more: they are gone, and the record hasn't heard of it. What was given to static pods stays: their
// mirrors come and go while they run.
func (s *snapshot) forgetDeleted(cached []podView) {
	live := map[gpu.PodUID]bool{}
	for i := range s.Pods {
		live[s.Pods[i].UID] = true
	}
	for i := range cached {
		pod := &cached[i]
		if !live[pod.UID] && types.UID(pod.UID) == pod.ObjectUID {
			delete(s.Served, pod.UID)
		}
	}
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
		if card, own := s.promised(pod); own {
			add(card, pod.Request)
			// Containers that ended up on another card than the rest hold their part there as well.
			for _, serving := range s.Served[pod.UID] {
				if serving.Card != card {
					add(serving.Card, serving.Request)
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
	// Pods without an object: static pods whose mirror hasn't appeared.
	for uid, containers := range s.Served {
		if seen[uid] {
			continue
		}
		for _, serving := range containers {
			add(serving.Card, serving.Request)
		}
	}
	for _, serving := range s.Nameless {
		add(serving.Card, serving.Request)
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
