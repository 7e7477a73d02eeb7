package extender

import (
	"fmt"
	"net/http"

	"github.com/julienschmidt/httprouter"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// inspection is the answer of inspect. Users of the existing extender read this JSON shape.
type inspection struct {
	Nodes []nodeView `json:"nodes"`
	Error string     `json:"error,omitempty"`
}

type nodeView struct {
	Name     string     `json:"name"`
	TotalGPU gpu.Memory `json:"totalGPU"`
	UsedGPU  gpu.Memory `json:"usedGPU"`
	Devs     []cardView `json:"devs"`
}

type cardView struct {
	ID       int        `json:"id"`
	TotalGPU gpu.Memory `json:"totalGPU"`
	UsedGPU  gpu.Memory `json:"usedGPU"`
	Pods     []podView  `json:"pods"`
}

type podView struct {
	Name      string     `json:"name"`
	Namespace string     `json:"namespace"`
	UsedGPU   gpu.Memory `json:"usedGPU"`
}

// inspectAll answers with all nodes of the ledger that shown accepts.
func (s *Server) inspectAll(w http.ResponseWriter, r *http.Request) {
	if s.unready(w, r) {
		return
	}
	answer := inspection{Nodes: []nodeView{}}
	for _, node := range s.Scheduler.Nodes() {
		if shown(node) {
			answer.Nodes = append(answer.Nodes, viewNode(node))
		}
	}
	write(w, r, http.StatusOK, answer)
}

// inspectNode answers with the node that the path names.
func (s *Server) inspectNode(w http.ResponseWriter, r *http.Request) {
	if s.unready(w, r) {
		return
	}
	name := httprouter.ParamsFromContext(r.Context()).ByName("node")
	node, ok := s.Scheduler.Node(name)
	if !ok || !shown(node) {
		write(w, r, http.StatusNotFound, inspection{
			Nodes: []nodeView{}, Error: fmt.Sprintf("node %.253q shares no GPU memory, or doesn't exist", name),
		})
		return
	}
	write(w, r, http.StatusOK, inspection{Nodes: []nodeView{viewNode(node)}})
}

// unready answers with status 503 if the cache is not synced, and reports whether it did.
func (s *Server) unready(w http.ResponseWriter, r *http.Request) bool {
	err := s.Scheduler.Ready()
	if err != nil {
		write(w, r, http.StatusServiceUnavailable, inspection{Nodes: []nodeView{}, Error: err.Error()})
	}
	return err != nil
}

// shown reports whether inspect shows the node: it has cards or offers whole cards, or pods are still bound to it after its
// Node object was deleted. A nomination alone is no reason to show a node.
func shown(node ledger.Node) bool {
	return len(node.Cards) > 0 || node.WholeCards || len(node.Allocations) > 0
}

// viewNode returns the node's cards, then those that no longer exist but have pods, with a total of zero.
func viewNode(node ledger.Node) nodeView {
	view := nodeView{Name: node.Name, Devs: make([]cardView, 0, len(node.Cards))}
	dev := map[int]int{} // Maps a card's index to its position in Devs.
	add := func(index int, total gpu.Memory) {
		dev[index] = len(view.Devs)
		view.Devs = append(view.Devs, cardView{ID: index, TotalGPU: total, Pods: []podView{}})
		view.TotalGPU = view.TotalGPU.Add(total)
	}
	for _, card := range node.Cards {
		add(card.Index, card.Memory)
	}
	for _, holder := range node.Allocations {
		for _, share := range holder.Placement {
			if _, ok := dev[share.Card]; !ok {
				add(share.Card, 0)
			}
			card := &view.Devs[dev[share.Card]]
			card.Pods = append(card.Pods, podView{holder.Name, holder.Namespace, share.Memory})
			card.UsedGPU = card.UsedGPU.Add(share.Memory)
			view.UsedGPU = view.UsedGPU.Add(share.Memory)
		}
	}
	return view
}
