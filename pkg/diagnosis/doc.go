// Package diagnosis determines why a pod is pending: a reason from a fixed list, and a message about the nodes as they are
// now. The web page, the metrics and kubectl inspect all use it, so they never contradict each other. It has no side
// effects. kube-scheduler's message on the pod counts for what the package doesn't check itself, such as a lack of CPU, and
// whether the pod was tried at all.
package diagnosis
