// Package framework is what the suites in test/ share.
//
//   - Start and StartForTest run a Cluster on one machine: a real control plane (package controlplane), the extender, and
//     GPU nodes, each a simulated kubelet with the real device plugin on a fake driver library.
//   - MakePod and MakeNode build objects.
//   - A Namespace keeps the pods and nodes of one test apart from those of other tests in the same cluster.
//   - Eventually waits for a condition. The assertions check pods, cards, Events and metrics.
//
// The project's programs run as in their manifests: with the same ServiceAccounts and rights, and kube-scheduler with
// the shipped configuration.
package framework
