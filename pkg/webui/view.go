package webui

import (
	"math"
	"time"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/dispatch"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/pkg/scheduling"
)

// nodeView is the JSON form of a node. Amounts are in the node's unit.
type nodeView struct {
	Name string `json:"name"`
	// Unit is as reported by the node; empty if it reports none.
	Unit string `json:"unit"`
	// UnitMiB is the size of the node's unit in MiB, to compare amounts of several nodes.
	UnitMiB float64 `json:"unitMiB"`
	// Closed is true if no new pod can run on the node.
	Closed bool `json:"closed,omitempty"`
	// Problems are what is wrong with the node, see diagnosis.NodeProblems.
	Problems []string `json:"problems,omitempty"`
	// Isolation is how the node limits containers to their share; empty if it doesn't.
	Isolation string `json:"isolation,omitempty"`
	// Simulated is true if the node's cards don't exist.
	Simulated bool `json:"simulated,omitempty"`
	// Pool is the node's pool as one of its labels names it; empty if none does.
	Pool string `json:"pool,omitempty"`
	// CountsCores is true if the node counts the computing that pods ask for.
	CountsCores bool `json:"countsCores,omitempty"`
	// CoresEnforced is true if Isolation limits computing too.
	CoresEnforced bool       `json:"coresEnforced,omitempty"`
	Cards         []cardView `json:"cards"`
	// Cardless are pods on the node whose card is unknown.
	Cardless []podView `json:"cardless,omitempty"`
}

type cardView struct {
	ID    int        `json:"id"`
	Total gpu.Memory `json:"total"`
	Used  gpu.Memory `json:"used"`
	// UsedCores is the computing that pods ask for, in percent of the card.
	UsedCores gpu.Cores `json:"usedCores,omitempty"`
	Model     string    `json:"model,omitempty"`
	UUID      string    `json:"uuid,omitempty"`
	// RDMAPorts are the active ports of the RDMA adapters near the card.
	RDMAPorts string `json:"rdmaPorts,omitempty"`
	// Unhealthy is the reason why no new pod is placed on the card.
	Unhealthy string `json:"unhealthy,omitempty"`
	// Vanished is true for a card that the node doesn't report any more while pods have allocations on it.
	Vanished bool      `json:"vanished,omitempty"`
	Pods     []podView `json:"pods"`
}

type podView struct {
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
	// Owner is the pod's controller as Kind/name; empty if it has none.
	Owner string `json:"owner,omitempty"`
	// Memory and Cores are the pod's part of one card, and Cards is the number of its cards if it has several.
	Memory gpu.Memory `json:"memory"`
	Cores  gpu.Cores  `json:"cores,omitempty"`
	Cards  int        `json:"cards,omitempty"`
	// Limit is the largest annotated limit of a container on one card, in MiB; 0 if there is none.
	Limit uint32 `json:"limitMiB,omitempty"`
	// Since is when the pod's card was chosen, in Unix milliseconds; left out if unknown.
	Since int64 `json:"since,omitempty"`
	// State is "assumed" (the bind isn't confirmed yet), "presumed" (the card is unknown), "leaving" (terminating) or
	// empty.
	State string `json:"state,omitempty"`
}

type pendingView struct {
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
	// Owner is the pod's controller as Kind/name; empty if it has none.
	Owner string `json:"owner,omitempty"`
	// Request and Cores are the pod's total, and Cards is the number of cards over which they are divided, if there are several.
	Request gpu.Memory `json:"request"`
	Cores   gpu.Cores  `json:"cores,omitempty"`
	Cards   int        `json:"cards,omitempty"`
	// Reason and Message are the diagnosis.
	Reason           reasons.Reason `json:"reason"`
	Message          string         `json:"message"`
	SchedulerMessage string         `json:"schedulerMessage"`
	// Ahead is diagnosis.Position.Ahead; left out for a pod that isn't queued.
	Ahead *int `json:"ahead,omitempty"`
	// Created is in Unix milliseconds.
	Created int64 `json:"created"`
}

// problemView is the JSON form of a request problem.
type problemView struct {
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
	Problem   string `json:"problem"`
}

// reportView is the JSON form of a problem of a bound pod: over-use, a limit that is not in force, or a bind without the extender.
type reportView struct {
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
	Node      string `json:"node"`
	// Used is what the pod uses of the cards on which it uses more than it requests, in MiB; 0 if it doesn't. Allowed is its limit there, 0 for one
	// without a limit above its request. Since is in Unix milliseconds; 0 for a pod that is reported because its card is low on free memory: Borrowed
	// is what such a pod uses above its request.
	Used      int64 `json:"usedMiB,omitempty"`
	Requested int64 `json:"requestedMiB,omitempty"`
	Allowed   int64 `json:"allowedMiB,omitempty"`
	Since     int64 `json:"since,omitempty"`
	Borrowed  int64 `json:"borrowedMiB,omitempty"`
	// Limit is which limit is not in force, and why.
	Limit           string `json:"limit,omitempty"`
	WithoutExtender bool   `json:"withoutExtender,omitempty"`
}

// strandedView is the JSON form of a node's free memory that is of no use.
type strandedView struct {
	Node   string  `json:"node"`
	Memory float64 `json:"MiB"`
	// Text says how much it is in the node's unit, and why.
	Text string `json:"text"`
}

// runView is the JSON form of a run of a group of pods.
type runView struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Phase     string `json:"phase"`
	// Size is how many members must be bound together, 0 if unknown; Counted is how many count towards it.
	Size    int `json:"size"`
	Counted int `json:"counted"`
	// Bound and Pending are names of pods.
	Bound   []string   `json:"bound,omitempty"`
	Pending []string   `json:"pending,omitempty"`
	Memory  gpu.Memory `json:"memory"`
	Reason  string     `json:"reason,omitempty"`
	// Since is in Unix milliseconds.
	Since int64 `json:"since"`
}

// viewNode returns the node's cards, followed by the vanished cards on which pods still have allocations, with a total of
// zero. ownerOf returns a pod's controller.
func viewNode(node ledger.Node, ownerOf func(namespace, name string) string) nodeView {
	view := nodeView{
		Name: node.Name, UnitMiB: mebibytes(node), Closed: node.Closed != "", Simulated: node.Simulated, Pool: node.Pool,
		Isolation: node.Isolation, CoresEnforced: protocol.RulesOfIsolation(node.Isolation).Cores,
		CountsCores: len(node.Cards) > 0 && node.Cores == reasons.Fits, Cards: make([]cardView, len(node.Cards)),
	}
	for _, problem := range diagnosis.NodeProblems(&node) {
		view.Problems = append(view.Problems, problem.Text)
	}
	if node.Unit > 0 {
		view.Unit = node.Unit.String()
	}
	at := make(map[int]int, len(node.Cards)) // Card index to position in Cards.
	for i, card := range node.Cards {
		at[card.Index] = i
		view.Cards[i] = cardView{
			ID: card.Index, Total: card.Memory, Used: node.Used[i], UsedCores: node.UsedCores[i], Model: card.Model, UUID: card.UUID,
			RDMAPorts: card.RDMAPorts, Unhealthy: card.Unhealthy, Pods: []podView{},
		}
	}
	for _, allocation := range node.Allocations {
		owner := ownerOf(allocation.Namespace, allocation.Name)
		if len(allocation.Placement) == 0 {
			view.Cardless = append(view.Cardless, viewPod(allocation, owner, gpu.Share{Memory: allocation.Request, Cores: allocation.Cores}))
		}
		for _, share := range allocation.Placement {
			i, ok := at[share.Card]
			if !ok {
				i = len(view.Cards)
				at[share.Card] = i
				view.Cards = append(view.Cards, cardView{ID: share.Card, Vanished: true})
			}
			card := &view.Cards[i]
			card.Pods = append(card.Pods, viewPod(allocation, owner, share))
			if card.Vanished {
				card.Used, card.UsedCores = card.Used.Add(share.Memory), card.UsedCores.Add(share.Cores)
			}
		}
	}
	return view
}

func viewPod(allocation ledger.Allocation, owner string, share gpu.Share) podView {
	view := podView{
		Name: allocation.Name, Namespace: allocation.Namespace, Owner: owner, Memory: share.Memory, Cores: share.Cores,
		Limit: allocation.Limits.Largest, Since: milliseconds(allocation.AssumeTime),
	}
	if n := len(allocation.Placement); n > 1 {
		view.Cards = n
	}
	switch {
	case allocation.State == ledger.Assumed:
		view.State = "assumed"
	case allocation.Leaving:
		view.State = "leaving"
	case allocation.Presumed:
		view.State = "presumed"
	}
	return view
}

func viewPending(e *scheduling.Explanation) []pendingView {
	views := make([]pendingView, len(e.Pending))
	for i, pod := range e.Pending {
		why := &e.Diagnoses[i]
		views[i] = pendingView{
			Name: pod.Name, Namespace: pod.Namespace, Owner: pod.OwnerName(), Request: pod.Request, Cores: pod.Cores,
			SchedulerMessage: protocol.Shorten(pod.Pending.Message),
			Reason:           why.Reason, Message: why.Message, Created: milliseconds(pod.Pending.Created),
		}
		if n := pod.NumCards(); n > 1 && pod.Pending.RequestError == "" {
			views[i].Cards = n
		}
		if why.Position.Queued {
			views[i].Ahead = &why.Position.Ahead
		}
	}
	return views
}

func viewProblems(e *scheduling.Explanation) []problemView {
	views := make([]problemView, len(e.RequestProblems))
	for i, pod := range e.RequestProblems {
		views[i] = problemView{Name: pod.Name, Namespace: pod.Namespace, Problem: pod.RequestProblem}
	}
	return views
}

// tenantView is the JSON form of a tenant. Amounts are in units.
type tenantView struct {
	dispatch.Tenant
	// Reason is why the tenant's next pod waits; empty if none does.
	Reason string `json:"reason"`
}

// viewTenants returns nil if fair sharing is off.
func viewTenants(e *scheduling.Explanation) []tenantView {
	if e.Tenants == nil {
		return nil
	}
	views := make([]tenantView, len(e.Tenants))
	for i, t := range e.Tenants {
		views[i] = tenantView{t, t.Reason()}
	}
	return views
}

// viewReports returns the problems of bound pods that still count.
func viewReports(e *scheduling.Explanation) []reportView {
	views := []reportView{}
	for _, pod := range e.Reported {
		view := reportView{Name: pod.Name, Namespace: pod.Namespace, Node: pod.Node, Limit: pod.LimitProblem, WithoutExtender: pod.WithoutExtender}
		if pod.Overuse.Current(e.At) {
			sum := pod.Overuse.Sum()
			view.Used, view.Requested, view.Allowed = sum.Used, sum.Requested, sum.Limit
			if sum.ForLowCard() {
				view.Borrowed = sum.Used - sum.Requested
			} else {
				view.Since = milliseconds(pod.Overuse.Since)
			}
		}
		if view.Used > 0 || view.Limit != "" || view.WithoutExtender {
			views = append(views, view)
		}
	}
	return views
}

func viewStranded(e *scheduling.Explanation) []strandedView {
	views := make([]strandedView, len(e.Stranded.Nodes))
	for i := range e.Stranded.Nodes {
		node := &e.Stranded.Nodes[i]
		views[i] = strandedView{Node: node.Name, Text: node.Text(node.Unit)}
		for _, memory := range node.Stranded {
			views[i].Memory += float64(node.Unit.Bytes(memory)) / float64(gpu.MiB)
		}
	}
	return views
}

func viewRuns(reports []gang.Report) []runView {
	views := make([]runView, len(reports))
	for i, r := range reports {
		views[i] = runView{
			Namespace: r.Group.Namespace, Name: r.Group.Name, Phase: r.Phase.String(), Size: r.Size, Counted: r.Counted,
			Bound: r.Bound, Pending: r.Pending, Memory: r.Memory, Reason: protocol.Shorten(reasonOf(&r)), Since: milliseconds(r.Since),
		}
	}
	return views
}

// reasonOf returns why members of the run are pending: what makes the group invalid comes first.
func reasonOf(r *gang.Report) string {
	if r.Problem != "" {
		return reasons.GroupInvalid(r.Problem).Words
	}
	return r.Reason.Words
}

func milliseconds(at time.Time) int64 {
	if at.IsZero() {
		return 0
	}
	return at.UnixMilli()
}

// mebibytes returns the size of the node's unit in MiB.
func mebibytes(node ledger.Node) float64 {
	return float64(gpu.UnitOf(node.Unit, node.Cards)) / float64(gpu.MiB)
}

// tally holds sums of memory for one node or for all nodes, in MiB.
type tally struct {
	Total     float64 `json:"total"`
	Allocated float64 `json:"allocated"`
	// Whole is the free memory of unused cards, Pieces that of partly used cards. Unhealthy cards and closed nodes count as
	// having no free memory.
	Whole  float64 `json:"whole"`
	Pieces float64 `json:"pieces"`
}

func tallyNode(node ledger.Node) tally {
	var t tally
	unit := mebibytes(node)
	for i, card := range node.Cards {
		memory, used := float64(card.Memory)*unit, float64(node.Used[i])*unit
		t.Total += memory
		t.Allocated += used
		free := math.Max(memory-used, 0)
		switch {
		case !card.Healthy() || node.Closed != "":
		case used == 0:
			t.Whole += free
		default:
			t.Pieces += free
		}
	}
	return t
}

func (t tally) add(o tally) tally {
	return tally{t.Total + o.Total, t.Allocated + o.Allocated, t.Whole + o.Whole, t.Pieces + o.Pieces}
}
