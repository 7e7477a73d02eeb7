// Package preemption tests preemption with the real kube-scheduler: a pod of higher priority gets a card, and no pod is
// evicted without need. kube-scheduler counts memory by node and can propose victims on two cards; the extender corrects
// that.
//
// Nothing runs on the nodes. The tests end evicted pods in place of the kubelet.
package preemption
