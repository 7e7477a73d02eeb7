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

// Annotations on pods that say how their containers behave.
const (
	// AnnotationIgnoresSIGTERM, with the value "true", keeps the containers running through the pod's grace period.
	AnnotationIgnoresSIGTERM = "simkubelet/ignores-sigterm"
	// AnnotationExitAfter is the duration after which the app containers exit, and the pod ends whatever its restart
	// policy says.
	AnnotationExitAfter = "simkubelet/exit-after"
	// AnnotationExitCode is the code they exit with, 0 if absent.
	AnnotationExitCode = "simkubelet/exit-code"
	// AnnotationRejected is the reason with which the kubelet rejects the pod before it asks a device plugin, as under
	// pressure. The API server hears of it when the rest of the batch has been admitted.
	AnnotationRejected = "simkubelet/rejected"
)

// maxSocketPath is what fits into sockaddr_un with its final zero byte.
const maxSocketPath = 107

// Options describe one simulated node. NodeName, Client and Root are required.
type Options struct {
	NodeName string
	Client   kubernetes.Interface
	// Root is the kubelet's root directory: PodResources is served on <Root>/pod-resources/kubelet.sock.
	Root string
	// DevicePluginDir holds kubelet.sock, the plugins' sockets and the checkpoint; <Root>/device-plugins by default.
	DevicePluginDir string

	Labels map[string]string
	// CPU, Memory and Pods are the node's ordinary capacity: 64, 512Gi and 110 by default.
	CPU, Memory resource.Quantity
	Pods        int64

	// Seed makes the arbitrary choices (which devices, in which order) repeatable. With 0 they are Go's map order, as
	// the kubelet's are.
	Seed uint64

	// StatusInterval is the time between two looks at the node status (10 s). A change of devices is reported at once.
	StatusInterval time.Duration
	// LeaseInterval is the time between two renewals of the node's lease (10 s).
	LeaseInterval time.Duration
	// EndpointStopGrace is how long a lost plugin's capacity stays (5 minutes).
	EndpointStopGrace time.Duration
	// NodeSyncDelay is the time between the node's registration and the first list of its pods: the kubelet looks once a
	// second whether it knows its own node (config/apiserver.go). Plugins use it to register again, or the pods that were
	// bound meanwhile are rejected.
	NodeSyncDelay time.Duration
	// BackOff is the time between two attempts at starting a container (10 s).
	BackOff time.Duration

	// LiftNotReadyTaint removes the taint that the API server puts on new nodes: the node-lifecycle controller's work,
	// for control planes without a controller manager.
	LiftNotReadyTaint bool
	// LateRuntime registers the node before the device-plugin directory is served, as happens where the container
	// runtime comes up late. Only then can the kubelet find that directory empty at registration, and only then does
	// it set extended resources that others patched into the node status to zero (kubelet.go, Run; kubelet_node_status.go,
	// reconcileExtendedResource; its test for a checkpoint counts every file, kubelet.sock too).
	LateRuntime bool
	// ShowRejected makes PodResources Get answer for every pod that the kubelet has, also one that it has rejected, as
	// kubelets 1.34 and 1.35 do (v1.34 apis/podresources/server_v1.go, Get).
	ShowRejected bool
	// OmitResourceHealth leaves allocatedResourcesStatus out of pod statuses, as the feature gates
	// ResourceHealthStatus=false,ResourceHealthStatusMessage=false do.
	OmitResourceHealth bool

	// Trace is called after each call on the device-plugin and PodResources APIs, from several goroutines.
	Trace func(Event)
}

// withDefaults returns the options with every gap filled, or what is wrong with them.
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
