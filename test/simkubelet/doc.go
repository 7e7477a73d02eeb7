// Package simkubelet simulates a kubelet without containers: it registers a node, serves the device-plugin and
// PodResources APIs on real sockets, and allocates devices to the pods that are bound to its node as the kubelet of
// Kubernetes 1.37 does.
//
// Order of calls, reuse of devices, visibility of pods, error texts, the checkpoint and the known races follow the
// kubelet's source; comments name files below k8s.io/kubernetes/pkg/kubelet. TestTrace in test/nodee2e compares it with a
// real kubelet. A container is a record that runs until it is stopped. Like containers, the records outlive a restart of
// the simulated kubelet.
//
// Not simulated, because no test depends on it: admission by anything but devices, topology manager policies, NUMA nodes
// of devices, CPU and memory managers, DRA, eviction, resizing, probes, static pods, PreStartContainer.
package simkubelet
