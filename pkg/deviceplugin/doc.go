// Package deviceplugin is the node's side of gpushare: it reports a node's GPU memory to the kubelet, unit by unit, and gives
// each container the card that the extender chose for its pod.
//
// The kubelet's Allocate call doesn't name the pod. So the package keeps a record of what each container was given (record.go),
// which is rebuilt from the kubelet's checkpoint. It decides from a snapshot: pod matching (matching.go) and card selection
// (placing.go) have no side effects. allocate.go acts on the decision. The pods' annotations are written later and repaired to
// what the containers really got (annotate.go), so an unreachable API server doesn't keep a pod from starting.
package deviceplugin
