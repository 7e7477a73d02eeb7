// Package deviceplugin is the node's half: it reports a node's GPU memory to the kubelet, unit by unit, and hands each
// container the card that the scheduler's half chose for its pod.
//
// The kubelet never says which pod it allocates for. So the package keeps a record of what was served (record.go),
// rebuilt from the kubelet's own checkpoint, and decides from a snapshot: which pod (matching.go), which card
// (placing.go); both are pure. What was decided is acted on in plugin.go; the pods' annotations follow later and are
// repaired to what the containers really got (annotate.go), so a missing API server never stops a pod from starting.
package deviceplugin
