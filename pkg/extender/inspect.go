package extender

import (
	"fmt"
	"net/http"

	"github.com/julienschmidt/httprouter"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// inspection is what inspect answers: the JSON shape that users of the existing extender read.
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

// inspect shows the ledger: every node, or the one that the path names.
func (s *Server) inspect(w http.ResponseWriter, r *http.Request, params httprouter.Params) {
	if err := s.Cluster.Ready(); err != nil {
		w.WriteHeader(http.StatusServiceUnavailable)
		write(w, r, inspection{Nodes: []nodeView{}, Error: err.Error()})
		return
	}
	answer := inspection{Nodes: []nodeView{}}
	if name := params.ByName("node"); name != "" {
		node, ok := s.Cluster.Ledger().Node(name)
		if !ok {
			w.WriteHeader(http.StatusNotFound)
			answer.Error = fmt.Sprintf("node %.253q shares no GPU memory, or doesn't exist", name)
		} else {
			answer.Nodes = append(answer.Nodes, viewNode(node))
		}
	} else {
		for _, node := range s.Cluster.Ledger().Nodes() {
			answer.Nodes = append(answer.Nodes, viewNode(node))
		}
	}
	write(w, r, answer)
}

func viewNode(node ledger.Node) nodeView {
	view := nodeView{Name: node.Name, Devs: []cardView{}}
	for i, card := range node.Cards {
		dev := cardView{ID: card.Index, TotalGPU: card.Memory, UsedGPU: node.Used[i], Pods: []podView{}}
		for _, holder := range node.Holders {
			for _, share := range holder.Placement {
				if share.Card == card.Index {
					dev.Pods = append(dev.Pods, podView{holder.Name, holder.Namespace, share.Memory})
				}
			}
		}
		view.TotalGPU = view.TotalGPU.Add(card.Memory)
		view.UsedGPU = view.UsedGPU.Add(node.Used[i])
		view.Devs = append(view.Devs, dev)
	}
	return view
}
