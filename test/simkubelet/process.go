package simkubelet

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
)

// hostIP is the address of every simulated node.
const hostIP = "127.0.0.1"

// process is one run of the kubelet. Its state is lost when it ends, except for the checkpoint.
type process struct {
	options    Options
	containers *containers
	devices    *devices
	pods       *pods
	status     *statuses
	node       *node
	changes    chan change
	// sourcesReady is true once the first batch of pods is admitted.
	sourcesReady atomic.Bool

	mu      sync.Mutex
	workers map[types.UID]*worker

	registration *registration
	podResources *podResources
	cancel       context.CancelFunc
	wg           sync.WaitGroup
}

// startProcess starts the kubelet. It returns when both sockets are served; it doesn't wait for the API server.
func startProcess(ctx context.Context, options Options, containers *containers) (_ *process, err error) {
	// Like a real process, it ends only when it is stopped, not with ctx.
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithValues("node", options.NodeName))
	p := &process{
		options: options, containers: containers, devices: newDevices(options.checkpointFile()), pods: &pods{byUID: map[types.UID]*corev1.Pod{}},
		changes: make(chan change, changeBuffer), workers: map[types.UID]*worker{}, cancel: cancel,
	}
	p.status = newStatuses(p)
	p.node = newNode(options, p.devices)
	defer func() {
		if err != nil {
			p.kill()
		}
	}()

	running := containers.running()
	p.devices.activePods = p.activePods
	p.devices.sourcesReady = p.sourcesReady.Load
	p.devices.wasRunning = func(uid types.UID, container string) bool { return running[uid].Has(container) }
	p.devices.changed = p.devicesChanged
	if err := p.devices.readCheckpoint(); err != nil {
		// Like the kubelet, continue without it.
		klog.FromContext(ctx).Error(err, "Could not read the checkpoint")
	}
	if p.registration, err = serveRegistration(ctx, &options, p.devices); err != nil {
		return nil, err
	}
	if p.podResources, err = servePodResources(ctx, p); err != nil {
		return nil, err
	}
	containers.listen(p.containerExited)

	p.wg.Go(func() { p.status.run(ctx) })
	p.wg.Go(func() { p.syncLoop(ctx) })
	p.wg.Go(func() {
		p.node.registerUntilDone(ctx)
		p.wg.Go(func() { p.node.keepStatus(ctx) })
		p.wg.Go(func() { p.node.keepLease(ctx) })
		select {
		case <-time.After(nodeSyncDelay):
		case <-ctx.Done():
			return
		}
		watchPods(ctx, options.Client, options.NodeName, &source{changes: p.changes})
	})
	return p, nil
}

// kill ends the process like SIGKILL: nothing more is written, and containers continue.
func (p *process) kill() {
	p.containers.listen(nil)
	p.cancel()
	if p.podResources != nil {
		p.podResources.stop()
	}
	if p.registration != nil {
		p.registration.stop()
	}
	p.wg.Wait()
}

// syncLoop processes one change after the other: while a pod is admitted, all other changes wait.
func (p *process) syncLoop(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case c := <-p.changes:
			switch c.operation {
			case added:
				p.add(ctx, c.pods)
			case updated:
				p.update(ctx, c.pods)
			case removed:
				p.remove(c.pods)
			}
			if ctx.Err() == nil && !p.sourcesReady.Swap(true) {
				p.stopOrphans(ctx)
			}
		}
	}
}

// add admits the pods of a batch one by one by their creation time, which the API server keeps in whole seconds
// (kubelet.go, HandlePodAdditions). As in the kubelet, a terminating pod is admitted, an ended one isn't.
func (p *process) add(ctx context.Context, batch []*corev1.Pod) {
	slices.SortStableFunc(batch, func(a, b *corev1.Pod) int { return a.CreationTimestamp.Compare(b.CreationTimestamp.Time) })
	for _, pod := range batch {
		p.pods.set(pod)
		if terminal(pod.Status.Phase) {
			p.startWorker(ctx, pod)
			continue
		}
		if reason := pod.Annotations[AnnotationRejected]; reason != "" {
			defer p.reject(pod, reason, "set by the pod's annotation") // After the batch, as with a slow API server.
			continue
		}
		err := p.admit(ctx, pod)
		switch {
		case ctx.Err() != nil:
			return // The kubelet was killed during the admission, so it reports no result.
		case err != nil:
			p.reject(pod, "UnexpectedAdmissionError", fmt.Sprintf("Allocate failed due to %v, which is unexpected", err))
		default:
			p.startWorker(ctx, pod)
		}
	}
}

// admit allocates the pod's devices (cm/topologymanager/scope.go, admitPolicyNone).
func (p *process) admit(ctx context.Context, pod *corev1.Pod) error {
	for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			if err := p.devices.allocate(ctx, pod, &containers[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *process) update(ctx context.Context, pods []*corev1.Pod) {
	for _, pod := range pods {
		p.pods.set(pod)
		switch w := p.worker(pod.UID); {
		case w != nil:
			w.update(pod)
			if _, terminated := w.state(); terminated {
				p.status.finish(pod.UID) // Deleted after it had ended.
			}
		case pod.DeletionTimestamp != nil:
			p.startWorker(ctx, pod) // Rejected and then deleted.
		}
	}
}

func (p *process) remove(pods []*corev1.Pod) {
	for _, pod := range pods {
		p.pods.remove(pod.UID)
		p.status.forget(pod.UID)
		if w := p.worker(pod.UID); w != nil {
			w.requestStop(gracePeriod(w.latest()))
			if _, terminated := w.state(); terminated {
				p.drop(pod.UID)
			}
		}
	}
}

func (p *process) reject(pod *corev1.Pod, reason, message string) {
	now := metav1.Now()
	p.status.set(pod.UID, corev1.PodStatus{
		QOSClass: pod.Status.QOSClass, StartTime: &now,
		Phase: corev1.PodFailed, Reason: reason, Message: "Pod was rejected: " + message,
	})
}

// inactive reports whether the pod's devices are free and PodResources doesn't show it (kubelet_pods.go,
// isPodInactive).
func (p *process) inactive(pod *corev1.Pod) bool {
	stopping, terminated := false, false
	if w := p.worker(pod.UID); w != nil {
		stopping, terminated = w.state()
	}
	ended := terminal(pod.Status.Phase) || terminal(p.status.phase(pod.UID))
	return terminated || ended && !stopping
}

func (p *process) activePods() []*corev1.Pod {
	var active []*corev1.Pod
	for _, pod := range p.pods.list() {
		if !p.inactive(pod) {
			active = append(active, pod)
		}
	}
	return active
}

func (p *process) worker(uid types.UID) *worker {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.workers[uid]
}

// ended is called when none of the worker's containers runs any more.
func (p *process) ended(w *worker) {
	if p.pods.get(w.uid) == nil {
		p.drop(w.uid)
		return
	}
	w.publish()
	p.status.finish(w.uid)
}

// drop removes a pod whose object and containers are gone.
func (p *process) drop(uid types.UID) {
	p.mu.Lock()
	delete(p.workers, uid)
	p.mu.Unlock()
	p.containers.forget(uid)
}

func (p *process) containerExited(uid types.UID) {
	if w := p.worker(uid); w != nil {
		w.notify()
	}
}

// devicesChanged requests a node status update, and a status update of the pods whose devices changed their health.
func (p *process) devicesChanged(pods sets.Set[types.UID]) {
	p.node.changed()
	if p.options.OmitResourceHealth {
		return
	}
	for uid := range pods {
		if w := p.worker(uid); w != nil {
			w.notify()
		}
	}
}

// stopOrphans ends the containers of pods that were removed while the kubelet was stopped, as the kubelet's
// housekeeping does.
func (p *process) stopOrphans(ctx context.Context) {
	for uid := range p.containers.running() {
		if p.pods.get(uid) != nil {
			continue
		}
		p.wg.Go(func() {
			if err := p.containers.stop(ctx, uid, minimumGrace); err == nil {
				p.containers.forget(uid)
			}
		})
	}
}
