// Package preemption decides who must leave a node so that a pod of higher priority finds a card there.
//
// kube-scheduler chooses victims by the node's sums and doesn't know cards: those it names may sit on two cards, and
// then die for nothing. This package takes its choice as a proposal, and answers with pods that free one card, together
// with those of the proposal that the node's other resources need. It is pure: package cluster gathers what it asks for.
package preemption
