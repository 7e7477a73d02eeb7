// Package deviceplugin is the node's side of gpushare: it reports a node's GPU memory to the kubelet, unit by unit, and gives
// each container the card that the extender chose for its pod.
//
// service.go serves the kubelet's calls. allocate.go takes a snapshot of the cards, the pods and the record, has package
// allocation decide, and acts on the decision. checkpoint.go rebuilds the record from the kubelet's checkpoint. annotate.go
// writes and repairs the pods' annotations later, so an unreachable API server doesn't keep a pod from starting.
package deviceplugin
