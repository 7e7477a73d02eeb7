// Package nodee2e tests the node's side on a real kubelet, with containerd, runc and real containers. The card that a
// container gets must be the card in its pod's annotations, in the extender's ledger and in the kubelet's PodResources,
// also after faults of the node.
//
// The node is a machine within this one: mount and process namespaces that end with the test, even if the test is killed
// (machine.go). Its containers run a program that records its environment (recordenv). A test compares these environments
// with the annotations, the ledger and PodResources (state_test.go). A watcher checks the running containers all the time
// (watcher_test.go).
package nodee2e
