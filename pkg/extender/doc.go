// Package extender answers over HTTP the calls of kube-scheduler: filter, prioritize, bind and preempt
// (k8s.io/kube-scheduler/extender/v1). For users it serves inspect, version, health and metrics.
//
// A handler decodes the request, calls a Scheduler, and writes the answer. kube-scheduler discards the body of every answer
// with a status other than 200. So an error is answered with status 200 and the field Error, if the verb's answer has that
// field.
package extender
