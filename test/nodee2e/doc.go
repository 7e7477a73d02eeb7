// Package nodee2e shows on a real kubelet, with containerd, runc and real containers, that the card in a container is
// the card on its pod's annotations, in the extender's ledger and in the kubelet's books, whatever happens to the node.
//
// The node is a machine of its own within this one: namespaces of mounts and processes that end with the test, however
// that ends (machine.go). Its containers run a program that bears witness to the environment it got (witness). What they
// tell is compared with all the books (truth_test.go), and looked at all the time while a test runs (watcher_test.go).
package nodee2e
