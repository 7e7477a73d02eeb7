// Package eligibility decides which nodes a pod can use, whatever GPU memory is free there: by the pod's node selector, required node
// affinity and tolerations, by what the node supports, and by whether the node is closed. Everything else asks this package. It has no side
// effects.
package eligibility
