package inspect

import (
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// The apiVersion and kind of a Report in JSON and YAML. Within one version, fields can be added, but never renamed or
// changed in meaning.
const (
	ReportAPIVersion = "inspect.gpushare.aliyun.com/v1"
	ReportKind       = "GPUShareReport"
)

// Report is the whole output, in the structure of `-o json` and `-o yaml`. Lists are never null. They are sorted: nodes by
// name, cards by index, pods by first card and then by name.
type Report struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	// Cluster is the sum of the nodes that have cards, in their unit, or in MiB if they have several.
	Cluster Cluster `json:"cluster"`
	// Problems describe for the user what is wrong with the cluster as a whole, or with the nodes that were selected.
	Problems []string `json:"problems"`
	Nodes    []Node   `json:"nodes"`
	// NodesWithoutCards are labelled for sharing, but have neither cards nor pods that request GPU memory.
	NodesWithoutCards []NodeWithoutCards `json:"nodesWithoutCards"`
	// PendingPods ask for GPU memory and have no node. The list is empty if only some nodes were selected.
	PendingPods []PendingPod `json:"pendingPods"`
	// RequestProblems are pods that seem to have asked for GPU memory, or for a group, in a way that has no effect.
	RequestProblems []RequestProblem `json:"requestProblems"`
	// NotSeen is a sentence about what the user has no right to read, and what follows for the report; empty if nothing.
	NotSeen string `json:"notSeen,omitempty"`
}

// Sum is allocated and total memory, in units of Unit.
type Sum struct {
	Unit      gpu.Unit   `json:"unit"`
	Allocated gpu.Memory `json:"allocated"`
	Total     gpu.Memory `json:"total"`
	// Percent is Allocated in percent of Total, rounded down.
	Percent int `json:"percent"`
}

// Cluster is the sum of the nodes.
type Cluster struct {
	Sum
	// Free is the free memory of all healthy cards of usable nodes.
	Free gpu.Memory `json:"free"`
	// LargestFree is the most that one of these cards has free: the largest request that fits now.
	LargestFree gpu.Memory `json:"largestFree"`
}

// NodeWithoutCards is a node on which no pod can share a card.
type NodeWithoutCards struct {
	Name string `json:"name"`
	// Problems describe for the user what is wrong with the node.
	Problems []string `json:"problems"`
}

// Node is a node that shares GPU memory, or has pods that request it. All its amounts are in its own unit.
type Node struct {
	Name string `json:"name"`
	// Gone is true if the Node object doesn't exist, and pods are bound to it.
	Gone bool `json:"gone,omitempty"`
	// Address is the internal IP address if there is one, another address otherwise, "unknown" if there is none.
	Address string `json:"address"`
	Sum
	// UnitInferred is true if the node doesn't report its unit, so that it was inferred from the size of its cards, or from
	// other nodes if it has no cards.
	UnitInferred bool `json:"unitInferred,omitempty"`
	// UnknownCard is the part of Allocated that is on none of Cards: of pods bound to a card that no longer exists, or without
	// a card while no card has room for them.
	UnknownCard gpu.Memory `json:"unknownCard"`
	// Stranded is free memory that is of no use, because the node lacks CPU, memory, or both, for every kind of pods: the amount by what the node
	// lacks, as in metrics. It is left out if only some nodes were selected.
	Stranded placement.Stranded `json:"stranded,omitzero"`
	// Free is the free memory of all healthy cards; zero if no new pod can run on the node.
	Free gpu.Memory `json:"free"`
	// LargestFree is the largest request that fits a card of the node now.
	LargestFree gpu.Memory `json:"largestFree"`
	// Isolation is how the node limits new containers to their share; empty if it doesn't.
	Isolation string `json:"isolation,omitempty"`
	// Simulated is true if the node's cards don't exist: its device plugin simulates them for a trial.
	Simulated bool `json:"simulated,omitempty"`
	// Problems describe for the user what is wrong with the node and its cards.
	Problems []string `json:"problems"`
	Cards    []Card   `json:"cards"`
	// Adapters are the node's RDMA adapters, sorted by name; left out if it has none.
	Adapters []gpu.Adapter `json:"adapters,omitempty"`
	Pods     []Pod         `json:"pods"`

	// closed is the first reason why no new pod can run on the node; empty if pods can.
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
	// Reason is why the card is unhealthy.
	Reason string `json:"reason,omitempty"`
	// Cores is the card's computing, 100; left out if the node doesn't count it. AllocatedCores is what pods ask for of it.
	Cores          gpu.Cores `json:"cores,omitempty"`
	AllocatedCores gpu.Cores `json:"allocatedCores,omitempty"`
	// Oversubscribed is true if more memory or cores are allocated than the card has.
	Oversubscribed bool `json:"oversubscribed"`
	// RDMAPorts are the active ports of the RDMA adapters near the card, such as "mlx5_0:1", separated by commas.
	RDMAPorts string `json:"rdmaPorts,omitempty"`
}

// Pod is a pod that holds GPU memory of its node: from its binding until it has ended.
type Pod struct {
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	UID       types.UID `json:"uid"`
	Phase     string    `json:"phase"`
	// Terminating is true for a pod that is being deleted; it holds its memory until it has ended.
	Terminating bool       `json:"terminating"`
	Request     gpu.Memory `json:"request"`
	// Cores is the computing that the pod asks for in total; left out if it asks for none.
	Cores gpu.Cores `json:"cores,omitempty"`
	// Shares are the pod's cards with its part of each, sorted by card; empty if unknown.
	Shares []Share `json:"shares"`
	// Presumed is true if the pod's annotations name no card, and Shares is the card on which the node is likely to place it.
	Presumed bool `json:"presumed,omitempty"`
	// Isolation is how the pod's containers are limited to their share; empty if they aren't, or if that isn't known yet.
	Isolation string `json:"isolation,omitempty"`
	// Notes describe for the user what is unusual about the pod.
	Notes []string `json:"notes,omitempty"`

	// unknownCard is the part of Request that is on none of the node's cards.
	unknownCard gpu.Memory
}

// Share is a pod's part of one card.
type Share struct {
	Card   int        `json:"card"`
	Memory gpu.Memory `json:"memory"`
	// Cores is left out for a pod that asks for none.
	Cores gpu.Cores `json:"cores,omitempty"`
}

// PendingPod is a pod without a node. The unit of its request is that of the node to which it will be bound.
type PendingPod struct {
	Namespace string     `json:"namespace"`
	Name      string     `json:"name"`
	UID       types.UID  `json:"uid"`
	Request   gpu.Memory `json:"request"`
	// Cards is the number of cards over which the request is divided, and Cores the computing that the pod asks for in total. They
	// are left out for a pod with one card and without cores, and Cards also if the request can't be divided.
	Cards     int       `json:"cards,omitempty"`
	Cores     gpu.Cores `json:"cores,omitempty"`
	Scheduler string    `json:"schedulerName"`
	// Reason is kube-scheduler's message, unshortened.
	Reason string `json:"reason"`
	// Cause and Explanation are the reason and message of gpushare's own diagnosis, from the current nodes and pods.
	Cause       reasons.Reason `json:"cause"`
	Explanation string         `json:"explanation"`
	// Ahead and Since are the pod's diagnosis.Position; Ahead is left out if the pod isn't queued.
	Ahead *int      `json:"ahead,omitempty"`
	Since time.Time `json:"since,omitzero"`
}

// RequestProblem is a pod that runs or waits without what it seems to ask for, see diagnosis.RequestProblem.
type RequestProblem struct {
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	UID       types.UID `json:"uid"`
	// Node is empty for a pod that isn't bound.
	Node    string `json:"node,omitempty"`
	Problem string `json:"problem"`
}

// keepNamespace removes the pods of other namespaces. The sums and cards still include them.
func (r *Report) keepNamespace(namespace string) {
	for i := range r.Nodes {
		node := &r.Nodes[i]
		node.Pods = slices.DeleteFunc(node.Pods, func(p Pod) bool { return p.Namespace != namespace })
	}
	r.PendingPods = slices.DeleteFunc(r.PendingPods, func(p PendingPod) bool { return p.Namespace != namespace })
	r.RequestProblems = slices.DeleteFunc(r.RequestProblems, func(p RequestProblem) bool { return p.Namespace != namespace })
}
