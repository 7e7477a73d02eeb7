// Package extender answers over HTTP the calls of kube-scheduler: filter, prioritize, bind and preempt
// (k8s.io/kube-scheduler/extender/v1). For users it serves inspect, version, health and metrics.
//
// A handler decodes the request, calls a Scheduler, and writes the answer. kube-scheduler discards the body of an answer with
// another status than 200, so an error is answered with 200 and the field Error if the verb's answer has it.
package extender
