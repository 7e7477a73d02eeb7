// Package e2e shows on a real control plane that the parts do their job together: real etcd, kube-apiserver and
// kube-scheduler with the shipped configuration, the extender and the device plugin as processes, nodes that are
// simulated kubelets with a fake driver library, or mere Node objects where nothing needs to run on them.
//
// Whatever a test does, the books must hold: no card over its total, and the extender's ledger equal to what the API
// server's pods and nodes add up to (books_test.go).
package e2e
