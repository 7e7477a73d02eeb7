package simkubelet

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
)

// minimumGrace is the shortest time between SIGTERM and SIGKILL (kuberuntime_manager.go).
const minimumGrace = 2 * time.Second

// Exit codes of containers.
const (
	exitCrash = 1
	exitKill  = 137
)

// Container is a running or ended container on the node. Tests compare the state of other components with it.
type Container struct {
	PodUID          types.UID
	Namespace, Name string // Of the pod.
	Container       string
	// Env are the environment variables in the device plugins' answers.
	Env      map[string]string
	Running  bool
	ExitCode int32
	Restarts int32
}

// record is a container in the simulated runtime.
type record struct {
	Container
	ignoresTERM bool
	crashed     bool // The kubelet must start it again.
	done        chan struct{}
	timer       *time.Timer // Of a container that exits by itself.
}

// containers is the simulated container runtime. Its containers continue while the kubelet is stopped.
type containers struct {
	mu     sync.Mutex
	pods   map[types.UID]map[string]*record
	exited func(types.UID) // The kubelet's callback; nil while it is stopped.
}

func newContainers() *containers {
	return &containers{pods: map[types.UID]map[string]*record{}}
}

// listen sets the callback for containers that exit.
func (c *containers) listen(exited func(types.UID)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.exited = exited
}

// start starts the container, or restarts a crashed one.
func (c *containers) start(pod *corev1.Pod, container *corev1.Container, init bool, env map[string]string) error {
	r := &record{
		Container: Container{
			PodUID: pod.UID, Namespace: pod.Namespace, Name: pod.Name, Container: container.Name, Env: env, Running: true,
		},
		ignoresTERM: pod.Annotations[AnnotationIgnoresSIGTERM] == "true",
		done:        make(chan struct{}),
	}
	var exitAfter time.Duration
	if value, ok := pod.Annotations[AnnotationExitAfter]; ok && !init {
		var err error
		if exitAfter, err = time.ParseDuration(value); err != nil {
			return fmt.Errorf("annotation %s: %w", AnnotationExitAfter, err)
		}
	}

	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pods[pod.UID] == nil {
		c.pods[pod.UID] = map[string]*record{}
	}
	if before := c.pods[pod.UID][container.Name]; before != nil {
		r.Restarts = before.Restarts + 1
	}
	c.pods[pod.UID][container.Name] = r
	switch {
	case exitAfter > 0:
		r.timer = time.AfterFunc(exitAfter, func() { c.exit(r, 0, false) })
	case init && !restartable(container):
		c.exitLocked(r, 0, false) // Init containers exit immediately.
	}
	return nil
}

func (c *containers) exit(r *record, code int32, crashed bool) {
	c.mu.Lock()
	c.exitLocked(r, code, crashed)
	exited := c.exited
	c.mu.Unlock()
	if exited != nil {
		exited(r.PodUID)
	}
}

func (c *containers) exitLocked(r *record, code int32, crashed bool) {
	if !r.Running {
		return
	}
	if r.timer != nil {
		r.timer.Stop()
	}
	r.Running, r.ExitCode, r.crashed = false, code, crashed
	close(r.done)
}

// stop ends the pod's containers and returns when all have ended: those that react to SIGTERM immediately, the others
// after the grace period. If ctx ends first, they continue.
func (c *containers) stop(ctx context.Context, uid types.UID, grace time.Duration) error {
	c.mu.Lock()
	var waiting []*record
	for _, r := range c.pods[uid] {
		if !r.Running {
			continue
		}
		if r.ignoresTERM {
			waiting = append(waiting, r)
		} else {
			c.exitLocked(r, 0, false)
		}
	}
	c.mu.Unlock()
	if len(waiting) == 0 {
		return nil
	}
	timer := time.NewTimer(max(grace, minimumGrace))
	defer timer.Stop()
	for _, r := range waiting {
		select {
		case <-timer.C:
			for _, r := range waiting {
				c.exit(r, exitKill, false)
			}
			return nil
		case <-r.done: // It exited by itself.
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// crash makes a running container exit so that the kubelet restarts it.
func (c *containers) crash(uid types.UID, container string) error {
	c.mu.Lock()
	r := c.pods[uid][container]
	running := r != nil && r.Running
	c.mu.Unlock()
	if !running {
		return fmt.Errorf("container %s of pod %s doesn't run", container, uid)
	}
	c.exit(r, exitCrash, true)
	return nil
}

// containerState is the kubelet's view of a container.
type containerState struct {
	Container
	known   bool
	crashed bool
}

func (c *containers) state(uid types.UID, container string) containerState {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.pods[uid][container]
	if r == nil {
		return containerState{}
	}
	return containerState{r.Container, true, r.crashed}
}

// running returns the running containers by pod.
func (c *containers) running() map[types.UID]sets.Set[string] {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := map[types.UID]sets.Set[string]{}
	for uid, records := range c.pods {
		out[uid] = sets.New[string]()
		for name, r := range records {
			if r.Running {
				out[uid].Insert(name)
			}
		}
	}
	return out
}

func (c *containers) anyRunning(uid types.UID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.pods[uid] {
		if r.Running {
			return true
		}
	}
	return false
}

func (c *containers) list() []Container {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []Container
	for _, records := range c.pods {
		for _, r := range records {
			out = append(out, r.Container)
		}
	}
	return out
}

// forget removes the records of a pod if all of its containers have ended.
func (c *containers) forget(uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.pods[uid] {
		if r.Running {
			return
		}
	}
	delete(c.pods, uid)
}

// reboot ends all containers.
func (c *containers) reboot() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, records := range c.pods {
		for _, r := range records {
			c.exitLocked(r, exitKill, true)
		}
	}
}
