package diagnosis

import (
	corev1 "k8s.io/api/core/v1"
)

// RequestProblem returns why a pod runs, or waits, without the GPU memory that its owner seems to want; false if nothing
// looks like a mistake. kube-scheduler and the kubelet accept such pods: a resource that no node has, the amount 0,
// gpu-count alone, or a key in a place where nothing reads it. The pod may be pending, running or ended.
func RequestProblem(*corev1.Pod) (problem string, found bool) { return "", false }
