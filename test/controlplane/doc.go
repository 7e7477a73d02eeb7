// Package controlplane runs the real etcd, kube-apiserver, kube-scheduler and optionally kube-controller-manager on
// loopback, for tests and for the demo. They are the binaries that hack/kube builds, with RBAC enabled and the shipped
// scheduler configuration; none of them is a fake.
//
// Each component is a Process that can be killed, paused and started again with the same port and data. The project's
// own binaries run as Processes too. A Proxy in front of the API server injects network faults. All processes end with
// the program that started them, even if it is killed.
package controlplane
