package placement

import "github.com/gpushare/gpushare/pkg/gpu"

// MaxScore is the best score of a node, kube-scheduler's limit for extenders
// (k8s.io/kube-scheduler/extender/v1 MaxExtenderPriority).
const MaxScore = 10

// Score says how well a node suits a request, from 0 to MaxScore: cardPolicy chooses the card, as Place would, and
// nodePolicy judges what the request leaves over, eight points by what is left of that card and two by what is left of
// the node. A node on which nothing fits scores 0, and so may one that is the worst that fits.
func Score(cardPolicy, nodePolicy Policy, cards []Card, request gpu.Memory) int {
	best, reason := choose(cardPolicy, cards, request)
	if reason != Fits {
		return 0
	}
	var total, free gpu.Memory
	for i := range cards {
		total = total.Add(cards[i].Memory)
		free = free.Add(cards[i].Free())
	}
	card := fullness(cards[best].Memory, cards[best].Free().Sub(request))
	node := fullness(total, free.Sub(request))
	// fullness 1 is best for a policy that prefers little left over, 0 for one that prefers much.
	if !nodePolicy.better(0, 1) {
		card, node = 1-card, 1-node
	}
	return int(card*8 + node*2)
}

// fullness is the part of total that is taken, 0 to 1.
func fullness(total, free gpu.Memory) float64 {
	if total == 0 {
		return 0
	}
	return 1 - float64(free)/float64(total)
}
