// Package simkubelet is a kubelet without containers: it registers a node, serves the device-plugin and PodResources
// APIs on real sockets, admits the pods bound to its node and hands them devices as the kubelet of Kubernetes 1.36 does.
//
// It is no stand-in that makes a device plugin's life easy: order of calls, reuse of devices, visibility of pods, error
// texts, checkpoint and the known races follow the kubelet's source (files below k8s.io/kubernetes/pkg/kubelet are
// named where a rule comes from them). Only the container runtime is made up: a container is a record that runs until
// it is stopped. The records outlive a restart of the simulated kubelet, as containers do.
//
// Left out, because nothing here depends on them: topology manager policies other than none, CPU and memory managers,
// DRA, eviction, resizing, probes, and the preemption that makes room for critical pods.
package simkubelet
