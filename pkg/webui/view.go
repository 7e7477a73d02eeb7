package webui

import (
	"math"
	"time"

	"github.com/gpushare/gpushare/pkg/cluster"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/waiting"
)

// nodeView is a node as the page gets it. Amounts count the node's unit.
type nodeView struct {
	Name string `json:"name"`
	// Unit is as the node reports it, empty where it doesn't.
	Unit string `json:"unit"`
	// UnitMiB is what an amount is multiplied by to compare it with other nodes'.
	UnitMiB float64 `json:"unitMiB"`
	// Closed is why no pod can go there, whatever is free.
	Closed string `json:"closed,omitempty"`
	// Gone says that the node object is gone, or shares no memory any more, while pods still hold some there.
	Gone  bool       `json:"gone,omitempty"`
	Cards []cardView `json:"cards"`
	// Cardless are pods on the node that no card is known for.
	Cardless []podView `json:"cardless,omitempty"`
}

type cardView struct {
	ID    int        `json:"id"`
	Total gpu.Memory `json:"total"`
	Used  gpu.Memory `json:"used"`
	Model string     `json:"model,omitempty"`
	UUID  string     `json:"uuid,omitempty"`
	// Unhealthy is the reason why nothing is placed on the card.
	Unhealthy string `json:"unhealthy,omitempty"`
	// Vanished says that pods sit on a card that the node doesn't report any more.
	Vanished bool      `json:"vanished,omitempty"`
	Pods     []podView `json:"pods"`
}

type podView struct {
	Name      string     `json:"name"`
	Namespace string     `json:"namespace"`
	Memory    gpu.Memory `json:"memory"`
	// State says what is unusual: "reserved" (its bind is in flight), "presumed" (nobody told its card) or "leaving".
	State string `json:"state,omitempty"`
}

type pendingView struct {
	Name      string     `json:"name"`
	Namespace string     `json:"namespace"`
	Request   gpu.Memory `json:"request"`
	// Reason is what kube-scheduler says, cause and explanation are gpushare's own.
	Reason      string        `json:"reason"`
	Cause       waiting.Cause `json:"cause"`
	Explanation string        `json:"explanation"`
	// Created is in Unix milliseconds.
	Created int64 `json:"created"`
}

// viewNode shows the node's cards, and after them, with a total of zero, the vanished ones that pods still sit on.
func viewNode(node ledger.Node) nodeView {
	view := nodeView{
		Name: node.Name, UnitMiB: mebibytes(node), Closed: node.Closed,
		Gone: len(node.Cards) == 0 && !node.WholeCards, Cards: make([]cardView, len(node.Cards)),
	}
	if node.Unit > 0 {
		view.Unit = node.Unit.String()
	}
	at := make(map[int]int, len(node.Cards)) // Where in Cards a card is, by its index.
	for i, card := range node.Cards {
		at[card.Index] = i
		view.Cards[i] = cardView{
			ID: card.Index, Total: card.Memory, Used: node.Used[i], Model: card.Model, UUID: card.UUID,
			Unhealthy: card.Unhealthy, Pods: []podView{},
		}
	}
	for _, holder := range node.Holders {
		if len(holder.Placement) == 0 {
			view.Cardless = append(view.Cardless, viewPod(holder, holder.Request))
		}
		for _, share := range holder.Placement {
			i, ok := at[share.Card]
			if !ok {
				i = len(view.Cards)
				at[share.Card] = i
				view.Cards = append(view.Cards, cardView{ID: share.Card, Vanished: true})
			}
			card := &view.Cards[i]
			card.Pods = append(card.Pods, viewPod(holder, share.Memory))
			if card.Vanished {
				card.Used = card.Used.Add(share.Memory)
			}
		}
	}
	return view
}

func viewPod(holder ledger.Holder, memory gpu.Memory) podView {
	view := podView{Name: holder.Name, Namespace: holder.Namespace, Memory: memory}
	switch {
	case holder.State == ledger.Reserved:
		view.State = "reserved"
	case holder.Leaving:
		view.State = "leaving"
	case holder.Presumed:
		view.State = "presumed"
	}
	return view
}

func viewPending(pods []cluster.PendingPod, why []waiting.Why) []pendingView {
	views := make([]pendingView, len(pods))
	for i, pod := range pods {
		views[i] = pendingView{
			Name: pod.Name, Namespace: pod.Namespace, Request: pod.Request, Reason: pod.Reason,
			Cause: why[i].Cause, Explanation: why[i].Explanation, Created: milliseconds(pod.Created),
		}
	}
	return views
}

func milliseconds(at time.Time) int64 {
	if at.IsZero() {
		return 0
	}
	return at.UnixMilli()
}

// mebibytes is the size of the node's unit.
func mebibytes(node ledger.Node) float64 {
	return float64(gpu.UnitOf(node.Unit, node.Cards)) / float64(gpu.MiB)
}

// tally is the memory of a node or of all of them, in MiB.
type tally struct {
	total, held float64
	// whole is free on cards that nobody holds anything of, pieces is free on cards that are partly taken. Of unhealthy
	// cards, and of nodes that no pod can go to, nothing is free.
	whole, pieces float64
}

func tallyNode(node ledger.Node) tally {
	var t tally
	unit := mebibytes(node)
	for i, card := range node.Cards {
		memory, used := float64(card.Memory)*unit, float64(node.Used[i])*unit
		t.total += memory
		t.held += used
		free := math.Max(memory-used, 0)
		switch {
		case !card.Healthy() || node.Closed != "":
		case used == 0:
			t.whole += free
		default:
			t.pieces += free
		}
	}
	return t
}

func (t tally) add(o tally) tally {
	return tally{t.total + o.total, t.held + o.held, t.whole + o.whole, t.pieces + o.pieces}
}
