package simkubelet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/types"
)

// errClosed is returned after Run has ended.
var errClosed = errors.New("simkubelet: the node is closed")

// Kubelet is a simulated node: its containers, and a kubelet process that can be stopped and started.
type Kubelet struct {
	options    Options
	containers *containers

	mu      sync.Mutex
	process *process // nil while the kubelet is stopped.
	closed  bool
}

// New returns a node whose kubelet is not started.
func New(options Options) (*Kubelet, error) {
	options, err := options.withDefaults()
	if err != nil {
		return nil, err
	}
	return &Kubelet{options: options, containers: newContainers()}, nil
}

// Run starts the kubelet and waits until ctx ends. Then it closes the node. Start, Stop and Restart can be used while
// it runs.
func (k *Kubelet) Run(ctx context.Context) error {
	if err := k.Start(ctx); err != nil {
		return err
	}
	<-ctx.Done()
	k.Stop()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.closed = true
	k.containers.reboot() // Stops their timers.
	return nil
}

// Start starts the kubelet and returns when its sockets are served. Only Stop ends it, not the end of ctx. Starting a
// running kubelet is no error.
func (k *Kubelet) Start(ctx context.Context) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.start(ctx)
}

func (k *Kubelet) start(ctx context.Context) error {
	if k.closed {
		return errClosed
	}
	if k.process != nil {
		return nil
	}
	process, err := startProcess(ctx, k.options, k.containers)
	if err != nil {
		return fmt.Errorf("starting the kubelet on %s: %w", k.options.NodeName, err)
	}
	k.process = process
	return nil
}

// Stop kills the kubelet. Containers continue. The next start finds the pods that were bound meanwhile as one batch.
func (k *Kubelet) Stop() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.stop()
}

func (k *Kubelet) stop() {
	if k.process != nil {
		k.process.kill()
		k.process = nil
	}
}

// Restart kills the kubelet and starts a new one.
func (k *Kubelet) Restart(ctx context.Context) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.stop()
	return k.start(ctx)
}

// RestartWithoutCheckpoint is Restart, and removes the kubelet's file of allocated devices in between.
func (k *Kubelet) RestartWithoutCheckpoint(ctx context.Context) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.stop()
	if err := os.Remove(k.options.checkpointFile()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("removing the checkpoint: %w", err)
	}
	return k.start(ctx)
}

// Containers returns the running and ended containers of the pods that still have an object or a container, sorted by
// pod and container.
func (k *Kubelet) Containers() []Container {
	list := k.containers.list()
	slices.SortFunc(list, func(a, b Container) int {
		return strings.Compare(a.Namespace+"/"+a.Name+"/"+a.Container, b.Namespace+"/"+b.Name+"/"+b.Container)
	})
	return list
}

// Env returns the environment variables that device plugins set for the container, or nil if it never started.
func (k *Kubelet) Env(uid types.UID, container string) map[string]string {
	return maps.Clone(k.containers.state(uid, container).Env)
}

// CrashContainer makes a running container exit with an error. A running kubelet starts it again.
func (k *Kubelet) CrashContainer(uid types.UID, container string) error {
	return k.containers.crash(uid, container)
}

// DevicePluginDir returns the directory of kubelet.sock.
func (k *Kubelet) DevicePluginDir() string { return k.options.devicePluginDir() }

// PodResourcesSocket returns the path of the PodResources socket.
func (k *Kubelet) PodResourcesSocket() string { return k.options.podResourcesSocket() }
