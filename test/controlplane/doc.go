// Package controlplane runs the real etcd, kube-apiserver, kube-scheduler and, where asked, kube-controller-manager on
// loopback, for tests and for the demo. They are the binaries that hack/kube builds, with RBAC on and the shipped
// scheduler configuration; nothing in them is faked.
//
// Each part is a Process that can be killed, paused and started again on the same port and data; the project's own
// binaries run as Processes too. A Proxy in front of the API server plays the faults of a network. None of the
// processes outlives the program that started it, however it ends.
package controlplane
