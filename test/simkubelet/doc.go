// Package simkubelet simulates a kubelet without containers: it registers a node, serves the device-plugin and
// PodResources APIs on real sockets, admits the pods that are bound to its node, and allocates devices to them as the
// kubelet of Kubernetes 1.36 does.
//
// Order of calls, reuse of devices, visibility of pods, error texts, the checkpoint and the known races follow the
// kubelet's source; comments name files below k8s.io/kubernetes/pkg/kubelet. Only the container runtime is simulated: a
// container is a record that runs until it is stopped. Like containers, the records outlive a restart of the simulated
// kubelet.
//
// Not simulated, because no test depends on it: topology manager policies other than none, CPU and memory managers,
// DRA, eviction, resizing, probes, and preemption for critical pods.
package simkubelet
