// Package preemption shows through the real kube-scheduler that a pod of higher priority gets a whole card, and that
// nobody dies for it in vain: kube-scheduler, which counts by node, proposes victims on two cards, and the extender puts
// it right.
//
// Nothing runs on the nodes; the tests stand in for the kubelet where pods have to end.
package preemption
