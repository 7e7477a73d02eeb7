package main

// rule is how pods that ask for no GPU memory get their nodes.
type rule string

const (
	// byPolicy is by the node policy, as if the extender saw these pods too: what the policy can do. The policies that see GPU memory only
	// leave them to kube-scheduler.
	byPolicy rule = "all"
	// byScheduler is by kube-scheduler's default scores: what users get.
	byScheduler rule = "default"
	// away is by kube-scheduler's scores and a preference for nodes that share no cards. The shipped configuration doesn't have it, see
	// docs/performance.md.
	away rule = "away"
)

// rules returns the rules to compare. allNodes is true if there are nodes without cards.
func rules(allNodes bool) []rule {
	if allNodes {
		return []rule{byScheduler, away}
	}
	return []rule{byPolicy, byScheduler}
}
