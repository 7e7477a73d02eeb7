package inspect

import (
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/waiting"
)

// The identity of a Report in JSON and YAML. Within one version fields are added, never renamed or given another
// meaning.
const (
	ReportAPIVersion = "inspect.gpushare.aliyun.com/v1"
	ReportKind       = "GPUShareReport"
)

// Report is everything that is shown, in the structure that `-o json` and `-o yaml` print. Lists are never null, and
// are sorted: nodes by name, cards by index, pods by first card and then by name.
type Report struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	// Cluster sums up the nodes below, in a unit that counts all of them exactly.
	Cluster Cluster `json:"cluster"`
	Nodes   []Node  `json:"nodes"`
	// PendingPods ask for GPU memory and are on no node yet. It is empty where only some nodes were asked for.
	PendingPods []PendingPod `json:"pendingPods"`
}

// Sum is how much is promised out of how much, in units of Unit.
type Sum struct {
	Unit      Unit       `json:"unit"`
	Allocated gpu.Memory `json:"allocated"`
	Total     gpu.Memory `json:"total"`
	// Percent is Allocated of Total, rounded down.
	Percent int `json:"percent"`
}

// Cluster is the sum of the nodes.
type Cluster struct {
	Sum
	// Free is what healthy cards of usable nodes have left, in pieces.
	Free gpu.Memory `json:"free"`
	// LargestFree is the largest of these pieces: the biggest pod that would find a card now.
	LargestFree gpu.Memory `json:"largestFree"`
}

// Node is a node that shares GPU memory. All amounts in it are in its own unit.
type Node struct {
	Name string `json:"name"`
	// Address is the internal IP address where there is one, "unknown" where there is no address.
	Address string `json:"address"`
	Sum
	// UnitInferred says that the node doesn't tell its unit, and that it was concluded from the size of its cards.
	UnitInferred bool `json:"unitInferred,omitempty"`
	// UnknownCard is the part of Allocated that is on no card of Cards: pods bound without a card, or to a vanished one.
	UnknownCard gpu.Memory `json:"unknownCard"`
	// Free is what healthy cards have left, in pieces; nothing where no pod can go to the node.
	Free gpu.Memory `json:"free"`
	// LargestFree is the largest request that a card of the node has room for now.
	LargestFree gpu.Memory `json:"largestFree"`
	// Problems tells people what is wrong with the node and its cards.
	Problems []string `json:"problems"`
	Cards    []Card   `json:"cards"`
	Pods     []Pod    `json:"pods"`

	// closed is the first of the problems for which no pod can go to the node, empty for a node in order.
	closed string
}

// Card is one GPU.
type Card struct {
	Index     int        `json:"index"`
	UUID      string     `json:"uuid,omitempty"`
	Model     string     `json:"model,omitempty"`
	NUMANode  *int       `json:"numaNode,omitempty"`
	Allocated gpu.Memory `json:"allocated"`
	Total     gpu.Memory `json:"total"`
	Healthy   bool       `json:"healthy"`
	// Reason is why the card isn't healthy.
	Reason string `json:"reason,omitempty"`
	// Oversubscribed says that more is promised than the card has.
	Oversubscribed bool `json:"oversubscribed"`
}

// Pod is a pod that holds GPU memory of its node: from its binding until it has ended.
type Pod struct {
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	UID       types.UID `json:"uid"`
	Phase     string    `json:"phase"`
	// Terminating says that the pod is being deleted; it holds its memory until it is gone.
	Terminating bool       `json:"terminating"`
	Request     gpu.Memory `json:"request"`
	// Shares are the cards that the pod was given; empty where none is known.
	Shares []Share `json:"shares"`
	// Notes tells people what is unusual about the pod.
	Notes []string `json:"notes,omitempty"`
}

// Share is a pod's memory on one card.
type Share struct {
	Card   int        `json:"card"`
	Memory gpu.Memory `json:"memory"`
}

// PendingPod is a pod that waits for a node. Its request counts in the unit of whatever node it will land on.
type PendingPod struct {
	Namespace string     `json:"namespace"`
	Name      string     `json:"name"`
	UID       types.UID  `json:"uid"`
	Request   gpu.Memory `json:"request"`
	Scheduler string     `json:"schedulerName"`
	// Reason is the scheduler's message in full.
	Reason string `json:"reason"`
	// Cause and Explanation are gpushare's own view, from nodes and pods as they are now.
	Cause       waiting.Cause `json:"cause"`
	Explanation string        `json:"explanation"`
}

// Unit is a gpu.Unit that is written by its name, such as "GiB"; the zero Unit, of no node at all, is written "".
type Unit gpu.Unit

// String returns the unit's name.
func (u Unit) String() string {
	if u == 0 {
		return ""
	}
	return gpu.Unit(u).String()
}

// MarshalText writes the unit's name into JSON and YAML.
func (u Unit) MarshalText() ([]byte, error) { return []byte(u.String()), nil }

// node returns the node of that name, or nil.
func (r *Report) node(name string) *Node {
	for i := range r.Nodes {
		if r.Nodes[i].Name == name {
			return &r.Nodes[i]
		}
	}
	return nil
}

// InNamespace returns the report without the pods of other namespaces. The sums and cards stay as they are: a card is
// full whoever fills it.
func (r Report) InNamespace(namespace string) Report {
	nodes := make([]Node, len(r.Nodes))
	for i, node := range r.Nodes {
		pods := []Pod{}
		for _, pod := range node.Pods {
			if pod.Namespace == namespace {
				pods = append(pods, pod)
			}
		}
		node.Pods = pods
		nodes[i] = node
	}
	pending := []PendingPod{}
	for _, pod := range r.PendingPods {
		if pod.Namespace == namespace {
			pending = append(pending, pod)
		}
	}
	r.Nodes, r.PendingPods = nodes, pending
	return r
}
