// Package preemption chooses the victims on a node, so that a pod of higher priority fits its cards.
//
// kube-scheduler chooses victims by the node's sums and doesn't know cards. Its victims may use two cards, and evicting
// them would free neither. This package takes kube-scheduler's victims as a proposal. It returns pods that free as many cards as
// the pod asks for, mostly one, and those of the proposal that the node's other resources need. It has no side effects; its callers provide the input.
package preemption
