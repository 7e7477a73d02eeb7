// Package diagnosis determines why a pod is pending: a reason from a fixed list, and a message about the nodes as they are
// now. The web page, the metrics and kubectl inspect all use it, so they never contradict each other. It has no side
// effects. kube-scheduler may have further reasons, such as a lack of CPU; Pod.Message holds them.
package diagnosis
