// Package allocation decides which container the kubelet calls Allocate for (pod matching) and which cards the container gets
// (card selection). The kubelet's call names neither.
//
// Decide has no side effects: it reads a Snapshot, and asks the kubelet. Package deviceplugin takes the snapshot, calls Decide and acts on
// the decision. Record keeps what each container of the node was given; DueAnnotations compares a pod's annotations with it.
//
// A kubelet that has lost its checkpoint repeats its calls, also for containers that run. recovery.go has the code for that.
package allocation
