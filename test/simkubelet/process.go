package simkubelet

import (
	"context"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
)

// hostIP is every simulated node's address.
const hostIP = "127.0.0.1"

// process is one run of the kubelet, from its start to its death. What it knows dies with it, but for the checkpoint.
type process struct {
	options    Options
	containers *containers
	devices    *devices
	pods       *pods
	status     *statuses
	node       *node
	changes    chan change
	rand       *rand.Rand // nil: arbitrary; used by the sync loop alone
	// sourcesReady says whether the first batch of pods has been admitted.
	sourcesReady atomic.Bool

	mu      sync.Mutex
	workers map[types.UID]*worker

	registration *registration
	podResources *podResources
	cancel       context.CancelFunc
	wg           sync.WaitGroup
}

// startProcess starts the kubelet. It returns once both sockets are served; the API server need not be there.
func startProcess(ctx context.Context, options Options, containers *containers) (_ *process, err error) {
	// The process ends when it is stopped and not before, like one of the operating system.
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithValues("node", options.NodeName))
	p := &process{
		options: options, containers: containers, devices: newDevices(options), pods: newPods(),
		changes: make(chan change, changeBuffer), workers: map[types.UID]*worker{}, cancel: cancel,
	}
	p.status = newStatuses(p)
	p.node = newNode(options, p.devices)
	if options.Seed != 0 {
		p.rand = rand.New(rand.NewPCG(options.Seed, 1))
	}
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
	if err := os.MkdirAll(options.DevicePluginDir, 0o750); err != nil {
		return nil, fmt.Errorf("make device-plugin directory: %w", err)
	}
	if options.LateRuntime {
		p.node.registerUntilDone(ctx)
	}
	if err := p.devices.readCheckpoint(); err != nil {
		// The kubelet goes on with what it could read, too.
		klog.FromContext(ctx).Error(err, "Could not read the checkpoint")
	}
	if p.registration, err = serveRegistration(ctx, options, p.devices); err != nil {
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
		case <-time.After(options.NodeSyncDelay):
		case <-ctx.Done():
			return
		}
		watchPods(ctx, options.Client, options.NodeName, &source{changes: p.changes})
	})
	return p, nil
}

// kill ends the process as a SIGKILL would: nothing is written any more, containers run on.
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

// syncLoop takes up one change after the other: while a pod is being admitted, everything else waits.
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

// add admits the pods of a batch one by one (kubelet.go, HandlePodAdditions). A pod that is deleted already is admitted
// all the same, as in the kubelet; one that has ended isn't.
func (p *process) add(ctx context.Context, batch []*corev1.Pod) {
	for _, pod := range p.inOrder(batch) {
		p.pods.set(pod)
		if !terminal(pod.Status.Phase) {
			why := p.admit(ctx, pod)
			if ctx.Err() != nil {
				return // The kubelet died at it, and has no opinion on the pod.
			}
			if why != nil && pod.Annotations[AnnotationRejected] != "" {
				defer p.reject(ctx, pod, why) // After the batch, as where the API server is slow.
				continue
			}
			if why != nil {
				p.reject(ctx, pod, why)
				continue
			}
		}
		p.startWorker(ctx, pod)
	}
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
		p.pods.remove(pod)
		p.status.forget(pod.UID)
		if w := p.worker(pod.UID); w != nil {
			w.requestStop(gracePeriod(w.latest()))
			if _, terminated := w.state(); terminated {
				p.drop(pod.UID)
			}
		}
	}
}

func (p *process) reject(ctx context.Context, pod *corev1.Pod, why *rejection) {
	klog.FromContext(ctx).Info("Pod rejected", "pod", klog.KObj(pod), "reason", why.reason, "message", why.message)
	now := metav1.Now()
	p.status.set(pod.UID, corev1.PodStatus{
		QOSClass: pod.Status.QOSClass, StartTime: &now,
		Phase: corev1.PodFailed, Reason: why.reason, Message: "Pod was rejected: " + why.message,
	})
	event := &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{GenerateName: pod.Name + ".", Namespace: pod.Namespace},
		InvolvedObject: corev1.ObjectReference{
			Kind: "Pod", APIVersion: "v1", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID,
		},
		Type: corev1.EventTypeWarning, Reason: why.reason, Message: why.message,
		Source:         corev1.EventSource{Component: "kubelet", Host: p.options.NodeName},
		FirstTimestamp: now, LastTimestamp: now, Count: 1,
	}
	p.wg.Go(func() { // Beside the sync loop, which no slow API server may hold up.
		if _, err := p.options.Client.CoreV1().Events(pod.Namespace).Create(ctx, event, metav1.CreateOptions{}); err != nil {
			klog.FromContext(ctx).V(2).Info("Could not write an event", "pod", klog.KObj(pod), "err", err)
		}
	})
}

// inactive says whether the pod's devices are free and the pod is out of sight (kubelet_pods.go, isPodInactive).
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

// ended takes note that none of the worker's containers runs any more.
func (p *process) ended(w *worker) {
	if _, known := p.pods.get(w.uid); !known {
		p.drop(w.uid)
		return
	}
	w.publish()
	p.status.finish(w.uid)
}

// drop forgets a pod whose object and containers are gone.
func (p *process) drop(uid types.UID) {
	p.mu.Lock()
	delete(p.workers, uid)
	p.mu.Unlock()
	p.containers.forget(uid)
}

func (p *process) containerExited(uid types.UID) {
	if w := p.worker(uid); w != nil {
		w.poke()
	}
}

// devicesChanged reports the node's devices, and the health of those that pods hold, at once.
func (p *process) devicesChanged(pods sets.Set[types.UID]) {
	p.node.changed()
	if p.options.OmitResourceHealth {
		return
	}
	for uid := range pods {
		if w := p.worker(uid); w != nil {
			w.poke()
		}
	}
}

// podIP makes an address up that no other running pod is likely to have.
func (p *process) podIP(uid types.UID) string {
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(uid)) // A hash never fails to write.
	sum := hash.Sum32()
	return fmt.Sprintf("10.%d.%d.%d", byte(sum>>16), byte(sum>>8), byte(sum)|1)
}

// stopOrphans ends the containers of pods that were removed while the kubelet was away: the work of its housekeeping.
func (p *process) stopOrphans(ctx context.Context) {
	for uid := range p.containers.running() {
		if _, known := p.pods.get(uid); known {
			continue
		}
		p.wg.Go(func() {
			if err := p.containers.stop(ctx, uid, minimumGrace); err == nil {
				p.containers.forget(uid)
			}
		})
	}
}
