package simkubelet

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/client-go/kubernetes"
)

// Annotations on pods that define how their containers behave.
const (
	// AnnotationIgnoresSIGTERM, with the value "true", makes the containers run through the pod's grace period.
	AnnotationIgnoresSIGTERM = "simkubelet/ignores-sigterm"
	// AnnotationExitAfter is the duration after which the app containers exit. The pod then ends with any restart
	// policy.
	AnnotationExitAfter = "simkubelet/exit-after"
	// AnnotationExitCode is their exit code; 0 by default.
	AnnotationExitCode = "simkubelet/exit-code"
	// AnnotationRejected is the reason with which the kubelet rejects the pod before it calls a device plugin, as under
	// resource pressure. The API server gets the status after the rest of the batch is admitted.
	AnnotationRejected = "simkubelet/rejected"
)

// maxSocketPath is the longest path in sockaddr_un, without the terminating zero byte.
const maxSocketPath = 107

// Options configure a simulated node. NodeName, Client and Root are required.
type Options struct {
	NodeName string
	Client   kubernetes.Interface
	// Root is the kubelet's root directory. PodResources is served on <Root>/pod-resources/kubelet.sock.
	Root string
	// DevicePluginDir contains kubelet.sock, the plugins' sockets and the checkpoint; <Root>/device-plugins by default.
	DevicePluginDir string

	Labels map[string]string
	// CPU, Memory and Pods are the node's capacity: 64, 512Gi and 110 by default.
	CPU, Memory resource.Quantity
	Pods        int64

	// Seed makes arbitrary choices (which devices, in which order) repeatable. With 0 they follow Go's map order, as in
	// the kubelet.
	Seed uint64

	// StatusInterval is the time between two periodic updates of the node status (10 s). Changed devices are reported
	// immediately.
	StatusInterval time.Duration
	// LeaseInterval is the time between two renewals of the node's Lease (10 s).
	LeaseInterval time.Duration
	// EndpointStopGrace is how long the capacity of a lost plugin is kept (5 minutes).
	EndpointStopGrace time.Duration
	// NodeSyncDelay is the time between the node's registration and the first list of its pods: the kubelet checks once
	// a second whether its node is known (config/apiserver.go). Plugins can register again in that time; otherwise the
	// pods that were bound meanwhile are rejected.
	NodeSyncDelay time.Duration
	// BackOff is the time between two attempts to start a container (10 s).
	BackOff time.Duration

	// LiftNotReadyTaint removes the taint that the API server sets on new nodes, for control planes without the node
	// lifecycle controller.
	LiftNotReadyTaint bool
	// LateRuntime registers the node before the device-plugin directory is served, as when the container runtime starts
	// late. Only then can the kubelet find that directory empty at registration, and only then does it set extended
	// resources that other clients patched into the node status to zero (kubelet.go, Run; kubelet_node_status.go,
	// reconcileExtendedResource; its check for a checkpoint counts every file, even kubelet.sock).
	LateRuntime bool
	// ShowRejected makes PodResources Get answer also for rejected pods, as kubelets 1.34 and 1.35 do (v1.34
	// apis/podresources/server_v1.go, Get).
	ShowRejected bool
	// OmitResourceHealth omits allocatedResourcesStatus from pod statuses, as the feature gates
	// ResourceHealthStatus=false,ResourceHealthStatusMessage=false do.
	OmitResourceHealth bool

	// Trace is called after each call of the device-plugin and PodResources APIs, possibly concurrently.
	Trace func(Event)
}

// withDefaults returns the options with defaults set, or an error for invalid ones.
func (o Options) withDefaults() (Options, error) {
	if o.NodeName == "" || o.Client == nil || o.Root == "" {
		return o, errors.New("simkubelet: NodeName, Client and Root are required")
	}
	if o.DevicePluginDir == "" {
		o.DevicePluginDir = filepath.Join(o.Root, "device-plugins")
	}
	if o.CPU.IsZero() {
		o.CPU = resource.MustParse("64")
	}
	if o.Memory.IsZero() {
		o.Memory = resource.MustParse("512Gi")
	}
	if o.Pods == 0 {
		o.Pods = 110
	}
	for _, d := range []struct {
		value *time.Duration
		def   time.Duration
	}{
		{&o.StatusInterval, 10 * time.Second},
		{&o.LeaseInterval, 10 * time.Second},
		{&o.EndpointStopGrace, 5 * time.Minute},
		{&o.NodeSyncDelay, time.Second},
		{&o.BackOff, 10 * time.Second},
	} {
		if *d.value == 0 {
			*d.value = d.def
		}
	}
	if o.Trace == nil {
		o.Trace = func(Event) {}
	}
	for _, socket := range []string{o.registrationSocket(), o.podResourcesSocket()} {
		if len(socket) > maxSocketPath {
			return o, fmt.Errorf("simkubelet: socket path %q has %d bytes, more than %d", socket, len(socket), maxSocketPath)
		}
	}
	return o, nil
}

func (o *Options) registrationSocket() string {
	return filepath.Join(o.DevicePluginDir, "kubelet.sock")
}

func (o *Options) podResourcesSocket() string {
	return filepath.Join(o.Root, "pod-resources", "kubelet.sock")
}

func (o *Options) checkpointFile() string {
	return filepath.Join(o.DevicePluginDir, "kubelet_internal_checkpoint")
}

func (o *Options) capacity() corev1.ResourceList {
	return corev1.ResourceList{
		corev1.ResourceCPU:    o.CPU,
		corev1.ResourceMemory: o.Memory,
		corev1.ResourcePods:   *resource.NewQuantity(o.Pods, resource.DecimalSI),
	}
}
