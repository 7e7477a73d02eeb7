// Package eligibility decides which nodes a pod can use, whatever GPU memory is free there, and counts what nodes have free besides GPU memory.
// The former depends on the pod's node selector, required node affinity and tolerations, on what the node supports, and on whether the node is
// closed. The latter are CPU, memory, pods and extended resources. Everything else asks this package, of which Cluster is the state.
package eligibility
