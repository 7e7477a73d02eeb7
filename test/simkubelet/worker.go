package simkubelet

import (
	"context"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

// worker manages one admitted pod: it starts, watches and ends its containers.
type worker struct {
	process *process
	uid     types.UID
	started metav1.Time
	wake    chan struct{} // Buffer of one: a container exited.
	stop    chan struct{} // Closed when the pod must end.

	mu         sync.Mutex
	pod        *corev1.Pod
	stopping   bool
	grace      time.Duration
	starting   bool // A container is being started.
	terminated bool
	waiting    map[string]error // Containers that couldn't be started, with the error.
}

// startWorker creates the pod's worker. It runs until the pod has ended or the process is stopped.
func (p *process) startWorker(ctx context.Context, pod *corev1.Pod) {
	w := &worker{
		process: p, uid: pod.UID, pod: pod, waiting: map[string]error{}, started: metav1.Now(),
		wake: make(chan struct{}, 1), stop: make(chan struct{}),
	}
	if pod.Status.StartTime != nil {
		w.started = *pod.Status.StartTime // Set before a restart of the kubelet.
	}
	p.mu.Lock()
	p.workers[pod.UID] = w
	p.mu.Unlock()
	w.update(pod)
	p.wg.Go(func() { w.run(ctx) })
}

func (w *worker) run(ctx context.Context) {
	if !w.runContainers(ctx) {
		return
	}
	w.mu.Lock()
	grace := w.grace
	w.mu.Unlock()
	w.publish()
	if err := w.process.containers.stop(ctx, w.uid, grace); err != nil {
		return // The kubelet is stopped; the containers continue.
	}
	w.mu.Lock()
	w.terminated = true
	w.mu.Unlock()
	w.process.ended(w)
}

// runContainers starts containers until all have ended or the pod must stop. It returns false if ctx ended.
func (w *worker) runContainers(ctx context.Context) bool {
	for {
		select {
		case <-w.stop:
			return true
		default:
		}
		err := w.startMissing(ctx)
		if ctx.Err() != nil {
			return false
		}
		if w.exited() {
			w.requestStop(0)
			return true
		}
		w.publish()
		var again <-chan time.Time
		if err != nil {
			klog.FromContext(ctx).V(2).Info("Could not start a container", "pod", klog.KObj(w.latest()), "err", err)
			again = time.After(retryInterval)
		}
		select {
		case <-w.wake:
		case <-again:
		case <-w.stop:
		case <-ctx.Done():
			return false
		}
	}
}

// startMissing starts, in order, the containers that neither run nor have ended. Init containers exit immediately.
func (w *worker) startMissing(ctx context.Context) error {
	pod := w.latest()
	for n, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			container := &containers[i]
			if state := w.process.containers.state(pod.UID, container.Name); state.known && !state.crashed {
				continue
			}
			if !w.mayStart() {
				return nil
			}
			env, err := w.process.devices.env(ctx, pod, container)
			if err == nil {
				err = w.process.containers.start(pod, container, n == 0, env)
			}
			w.mu.Lock()
			w.starting = false
			if err != nil {
				w.waiting[container.Name] = err
			} else {
				delete(w.waiting, container.Name)
			}
			w.mu.Unlock()
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// mayStart reports whether a container may still be started. If so, the pod can't end until that is done.
func (w *worker) mayStart() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.starting = !w.stopping
	return w.starting
}

// publish requests a write of the pod's status. A terminal phase in the API server stays unchanged.
func (w *worker) publish() {
	if !terminal(w.latest().Status.Phase) {
		w.process.status.set(w.uid, w.status())
	}
}

// exited reports whether all app containers have ended.
func (w *worker) exited() bool {
	pod := w.latest()
	for i := range pod.Spec.Containers {
		state := w.process.containers.state(pod.UID, pod.Spec.Containers[i].Name)
		if !state.known || state.Running || state.crashed {
			return false
		}
	}
	return true
}

func (w *worker) latest() *corev1.Pod {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.pod
}

// update stores a newer version of the pod, and stops the pod if that is terminating or ended.
func (w *worker) update(pod *corev1.Pod) {
	w.mu.Lock()
	w.pod = pod
	w.mu.Unlock()
	if pod.DeletionTimestamp != nil || terminal(pod.Status.Phase) {
		w.requestStop(gracePeriod(pod))
	}
}

// requestStop stops the pod, with the grace period of the first request.
func (w *worker) requestStop(grace time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stopping {
		return
	}
	w.stopping, w.grace = true, grace
	// A pod without running containers has ended already. It must not count as active until the worker notices.
	w.terminated = !w.starting && !w.process.containers.anyRunning(w.uid)
	close(w.stop)
}

func (w *worker) notify() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (w *worker) state() (stopping, terminated bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.stopping, w.terminated
}

// gracePeriod returns the grace period of the deletion, or that of the pod's spec if no deletion was seen (a forced
// one).
func gracePeriod(pod *corev1.Pod) time.Duration {
	seconds := ptr.Deref(pod.Spec.TerminationGracePeriodSeconds, corev1.DefaultTerminationGracePeriodSeconds)
	if pod.DeletionTimestamp != nil && pod.DeletionGracePeriodSeconds != nil {
		seconds = *pod.DeletionGracePeriodSeconds
	}
	return time.Duration(seconds) * time.Second
}
