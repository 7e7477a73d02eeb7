package simkubelet

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"k8s.io/client-go/kubernetes"
)

// Annotations on pods that define how their containers behave.
const (
	// AnnotationIgnoresSIGTERM, with the value "true", makes the containers run through the pod's grace period.
	AnnotationIgnoresSIGTERM = "simkubelet/ignores-sigterm"
	// AnnotationExitAfter is the duration after which the app containers exit with code 0. The pod then ends with any
	// restart policy.
	AnnotationExitAfter = "simkubelet/exit-after"
	// AnnotationRejected is the reason with which the kubelet rejects the pod before it calls a device plugin, as under
	// resource pressure. The API server gets the status after the rest of the batch is admitted.
	AnnotationRejected = "simkubelet/rejected"
)

const (
	// statusInterval is the time between two periodic updates of the node status and two renewals of the node's Lease.
	// Changed devices are reported immediately.
	statusInterval = 10 * time.Second
	// nodeSyncDelay is the time between the node's registration and the first list of its pods: the kubelet checks once a
	// second whether its node is known (config/apiserver.go). Plugins can register again in that time; otherwise the pods
	// that were bound meanwhile are rejected.
	nodeSyncDelay = time.Second
	// retryInterval is the time between two attempts to register the node, and to start a container.
	retryInterval = time.Second
	// maxSocketPath is the longest path in sockaddr_un, without the terminating zero byte.
	maxSocketPath = 107
)

// Options configure a simulated node. NodeName, Client and Root are required.
type Options struct {
	NodeName string
	Client   kubernetes.Interface
	// Root is the kubelet's root directory.
	Root   string
	Labels map[string]string

	// LiftNotReadyTaint removes the taint that the API server sets on new nodes, for control planes without the node
	// lifecycle controller.
	LiftNotReadyTaint bool
	// ShowRejected makes PodResources Get answer also for rejected pods, as kubelets 1.34 and 1.35 do (v1.34
	// apis/podresources/server_v1.go, Get).
	ShowRejected bool
	// OmitResourceHealth omits allocatedResourcesStatus from pod statuses, as the feature gates
	// ResourceHealthStatus=false,ResourceHealthStatusMessage=false do.
	OmitResourceHealth bool

	// Trace is called after each traced call, possibly concurrently.
	Trace func(Event)
}

// withDefaults returns the options with defaults set, or an error for invalid ones.
func (o Options) withDefaults() (Options, error) {
	if o.NodeName == "" || o.Client == nil || o.Root == "" {
		return o, errors.New("simkubelet: NodeName, Client and Root are required")
	}
	if socket := o.podResourcesSocket(); len(socket) > maxSocketPath { // The longest of all sockets.
		return o, fmt.Errorf("simkubelet: socket path %q has %d bytes, more than %d", socket, len(socket), maxSocketPath)
	}
	if o.Trace == nil {
		o.Trace = func(Event) {}
	}
	return o, nil
}

// devicePluginDir contains kubelet.sock, the plugins' sockets and the checkpoint.
func (o *Options) devicePluginDir() string { return filepath.Join(o.Root, "device-plugins") }

func (o *Options) podResourcesSocket() string {
	return filepath.Join(o.Root, "pod-resources", "kubelet.sock")
}

func (o *Options) checkpointFile() string {
	return filepath.Join(o.devicePluginDir(), "kubelet_internal_checkpoint")
}
