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

// worker leads one admitted pod through its life: starts its containers, watches them, and ends them.
type worker struct {
	process *process
	uid     types.UID
	started metav1.Time
	wake    chan struct{} // has room for one: a container exited
	stop    chan struct{} // closed when the pod is to end

	mu         sync.Mutex
	pod        *corev1.Pod
	stopping   bool
	grace      time.Duration
	starting   bool // a container is on its way
	terminated bool
	waiting    map[string]error // containers that couldn't be started, and why
}

// startWorker makes the pod's worker and lets it run until the pod has ended or the process is stopped.
func (p *process) startWorker(ctx context.Context, pod *corev1.Pod) {
	w := &worker{
		process: p, uid: pod.UID, pod: pod, waiting: map[string]error{}, started: metav1.Now(),
		wake: make(chan struct{}, 1), stop: make(chan struct{}),
	}
	if pod.Status.StartTime != nil {
		w.started = *pod.Status.StartTime // The kubelet restarted.
	}
	p.mu.Lock()
	p.workers[pod.UID] = w
	p.mu.Unlock()
	w.update(pod)
	p.wg.Go(func() { w.run(ctx) })
}

func (w *worker) run(ctx context.Context) {
	if !w.live(ctx) {
		return
	}
	w.mu.Lock()
	grace := w.grace
	w.mu.Unlock()
	w.publish()
	if err := w.process.containers.stop(ctx, w.uid, grace); err != nil {
		return // The kubelet is stopped; the containers run on.
	}
	w.mu.Lock()
	w.terminated = true
	w.mu.Unlock()
	w.process.ended(w)
}

// live starts what has to run until all has ended or the pod is to stop. It returns false if the context ended.
func (w *worker) live(ctx context.Context) bool {
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
			again = time.After(w.process.options.BackOff)
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

// startMissing starts, in order, the containers that don't run and haven't ended. Init containers end as they start.
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
			settings, err := w.process.devices.settings(ctx, pod, container)
			if err == nil {
				err = w.process.containers.start(pod, container, n == 0, settings)
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

// mayStart says whether a container may still be started, and holds the pod's end off until it was.
func (w *worker) mayStart() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.starting = !w.stopping
	return w.starting
}

// publish has the pod's status written. What the API has as ended stays so.
func (w *worker) publish() {
	if !terminal(w.latest().Status.Phase) {
		w.process.status.set(w.uid, w.status())
	}
}

// exited says whether every app container has come to its end.
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

// update takes over a newer version of the pod, and ends it if that says so.
func (w *worker) update(pod *corev1.Pod) {
	w.mu.Lock()
	w.pod = pod
	w.mu.Unlock()
	if pod.DeletionTimestamp != nil || terminal(pod.Status.Phase) {
		w.requestStop(gracePeriod(pod))
	}
}

// requestStop makes the pod end, with the grace period of the first request.
func (w *worker) requestStop(grace time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stopping {
		return
	}
	w.stopping, w.grace = true, grace
	// A pod without running containers has ended already: it shall not count as active until the worker comes to it.
	w.terminated = !w.starting && !w.process.containers.anyRunning(w.uid)
	close(w.stop)
}

func (w *worker) poke() {
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

// gracePeriod is the deletion's, or the pod's own where there was no deletion to be seen (a forced one).
func gracePeriod(pod *corev1.Pod) time.Duration {
	seconds := ptr.Deref(pod.Spec.TerminationGracePeriodSeconds, corev1.DefaultTerminationGracePeriodSeconds)
	if pod.DeletionTimestamp != nil && pod.DeletionGracePeriodSeconds != nil {
		seconds = *pod.DeletionGracePeriodSeconds
	}
	return time.Duration(seconds) * time.Second
}
