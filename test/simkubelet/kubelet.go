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

// errClosed is returned where the node's Run has ended.
var errClosed = errors.New("simkubelet: the node is gone")

// Kubelet is one simulated node: its containers, and the kubelet process that comes and goes.
type Kubelet struct {
	options    Options
	containers *containers

	mu      sync.Mutex
	process *process // nil while the kubelet is away
	closed  bool
}

// New returns a node whose kubelet isn't started yet.
func New(options Options) (*Kubelet, error) {
	options, err := options.withDefaults()
	if err != nil {
		return nil, err
	}
	return &Kubelet{options: options, containers: newContainers()}, nil
}

// Run starts the kubelet and waits for the context's end; then the node is gone for good. Start, Stop and Restart may
// be used meanwhile.
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

// Start starts the kubelet and returns once its sockets are served. Only Stop ends it, not the context. Starting one
// that runs does nothing.
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
		return fmt.Errorf("start kubelet on %s: %w", k.options.NodeName, err)
	}
	k.process = process
	return nil
}

// Stop kills the kubelet. Containers run on; pods bound meanwhile are found, as one batch, by the next one.
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

// RestartOptions say what is lost between two runs of the kubelet.
type RestartOptions struct {
	// DropCheckpoint removes the file in which the kubelet keeps who has which device.
	DropCheckpoint bool
	// Reboot ends all containers; the kubelet starts them again.
	Reboot bool
}

// Restart kills the kubelet and starts a new one.
func (k *Kubelet) Restart(ctx context.Context, what RestartOptions) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.stop()
	if what.Reboot {
		k.containers.reboot()
	}
	if what.DropCheckpoint {
		if err := os.Remove(k.options.checkpointFile()); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("drop checkpoint: %w", err)
		}
	}
	return k.start(ctx)
}

// Containers returns what runs and ran on the node, by pod and container, of pods whose object or containers are there.
func (k *Kubelet) Containers() []Container {
	list := k.containers.list()
	slices.SortFunc(list, func(a, b Container) int {
		return strings.Compare(a.Namespace+"/"+a.Name+"/"+a.Container, b.Namespace+"/"+b.Name+"/"+b.Container)
	})
	return list
}

// Env returns the environment variables that the container got from device plugins, nil if it never started.
func (k *Kubelet) Env(uid types.UID, container string) map[string]string {
	return maps.Clone(k.containers.state(uid, container).Env)
}

// CrashContainer makes a running container exit with an error; the kubelet, if it isn't away, starts it again.
func (k *Kubelet) CrashContainer(uid types.UID, container string) error {
	return k.containers.crash(uid, container)
}

// DevicePluginDir is where plugins find kubelet.sock.
func (k *Kubelet) DevicePluginDir() string { return k.options.DevicePluginDir }

// PodResourcesSocket is where PodResources is served.
func (k *Kubelet) PodResourcesSocket() string { return k.options.podResourcesSocket() }
