package main

import "math/rand/v2"

// scheduler is what kube-scheduler does beside the extender: it knows what nodes have free of CPU and memory, and places pods that ask for no
// GPU memory.
type scheduler struct {
	// names are the names of all nodes in the order that decides between equal ones, and nodes are what they have.
	names []string
	nodes map[string]*schedulerNode
	ties  *rand.Rand
}

// schedulerNode is what a node has of CPU and memory, and what its pods use.
type schedulerNode struct {
	cpu, memory         int64
	usedCPU, usedMemory int64
	// order is the node's place in the order.
	order int
}

func newScheduler(nodes []traceNode, order []int, ties *rand.Rand) scheduler {
	s := scheduler{names: make([]string, len(nodes)), nodes: map[string]*schedulerNode{}, ties: ties}
	for i := range nodes {
		s.names[order[i]] = nodes[i].name
		s.nodes[nodes[i].name] = &schedulerNode{cpu: nodes[i].cpu, memory: nodes[i].memory, order: order[i]}
	}
	return s
}

func (n *schedulerNode) fits(pod *tracePod) bool {
	return n.cpu-n.usedCPU >= pod.cpu && n.memory-n.usedMemory >= pod.memory
}

func (s *scheduler) take(node string, pod *tracePod) {
	n := s.nodes[node]
	n.usedCPU, n.usedMemory = n.usedCPU+pod.cpu, n.usedMemory+pod.memory
}

// fitting returns those of the nodes that have enough CPU and memory for the pod, in the order of the run.
func (s *scheduler) fitting(pod *tracePod, nodes []string) []string {
	listed := make([]bool, len(s.names))
	for _, name := range nodes {
		if n := s.nodes[name]; n.fits(pod) {
			listed[n.order] = true
		}
	}
	var fitting []string
	for i, name := range s.names {
		if listed[i] {
			fitting = append(fitting, name)
		}
	}
	return fitting
}

// leastAllocated returns the node that kube-scheduler prefers for a pod without GPU by default, any of the best.
func (s *scheduler) leastAllocated(pod *tracePod) (best string, found bool) {
	most, equal := int64(-1), 0
	for _, name := range s.names {
		n := s.nodes[name]
		if !n.fits(pod) {
			continue
		}
		switch score := n.score(pod); {
		case score > most:
			best, most, equal = name, score, 1
		case score == most:
			if equal++; s.ties.IntN(equal) == 0 {
				best = name
			}
		}
	}
	return best, most >= 0
}

// score is the sum of the two scores by which kube-scheduler rates what a node has free (k8s.io/kubernetes
// pkg/scheduler/framework/plugins/noderesources, least_allocated.go and balanced_allocation.go).
func (n *schedulerNode) score(pod *tracePod) int64 {
	cpu, memory := n.usedCPU+pod.cpu, n.usedMemory+pod.memory
	least := ((n.cpu-cpu)*100/n.cpu + (n.memory-memory)*100/n.memory) / 2
	difference := float64(cpu)/float64(n.cpu) - float64(memory)/float64(n.memory)
	if difference < 0 {
		difference = -difference
	}
	return least + int64((1-difference/2)*100)
}
