// Package extender answers kube-scheduler over HTTP: filter, prioritize, bind and preempt
// (k8s.io/kube-scheduler/extender/v1), and people: inspect, version, health and metrics.
//
// Its handlers parse, ask and answer; what they ask is the ledger (which nodes have room) and package cluster (bind,
// preempt). kube-scheduler throws away the body of any answer but 200, so what goes wrong travels as 200 with Error set wherever
// the verb's answer has such a field.
package extender
