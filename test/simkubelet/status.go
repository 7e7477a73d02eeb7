package simkubelet

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
)

// statuses writes pod statuses to the API server, one after the other, and deletes the objects of ended pods that are
// terminating (status/status_manager.go). Its own state takes precedence over the API server's.
type statuses struct {
	process *process
	queue   workqueue.TypedRateLimitingInterface[types.UID]

	mu       sync.Mutex
	podState map[types.UID]*podState
}

type podState struct {
	status   *corev1.PodStatus // nil: don't write.
	finished bool              // No container runs: the object can be deleted.
	written  []byte
}

func newStatuses(p *process) *statuses {
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[types.UID](50*time.Millisecond, 5*time.Second)
	return &statuses{process: p, queue: workqueue.NewTypedRateLimitingQueue(limiter), podState: map[types.UID]*podState{}}
}

// set sets the pod's status. The status of an ended or rejected pod stays unchanged.
func (s *statuses) set(uid types.UID, status corev1.PodStatus) {
	s.mu.Lock()
	w := s.of(uid)
	if w.status == nil || !terminal(w.status.Phase) {
		w.status = &status
	}
	s.mu.Unlock()
	s.queue.Add(uid)
}

// finish records that none of the pod's containers runs any more.
func (s *statuses) finish(uid types.UID) {
	s.mu.Lock()
	s.of(uid).finished = true
	s.mu.Unlock()
	s.queue.Add(uid)
}

func (s *statuses) of(uid types.UID) *podState {
	if s.podState[uid] == nil {
		s.podState[uid] = &podState{}
	}
	return s.podState[uid]
}

func (s *statuses) forget(uid types.UID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.podState, uid)
}

// phase returns the phase that the kubelet has set, or an empty string.
func (s *statuses) phase(uid types.UID) corev1.PodPhase {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w := s.podState[uid]; w != nil && w.status != nil {
		return w.status.Phase
	}
	return ""
}

func (s *statuses) run(ctx context.Context) {
	stop := context.AfterFunc(ctx, s.queue.ShutDown)
	defer stop()
	for {
		uid, shutdown := s.queue.Get()
		if shutdown {
			return
		}
		if err := s.sync(ctx, uid); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).V(2).Info("Could not write a pod's status", "podUID", uid, "err", err)
			s.queue.AddRateLimited(uid)
		} else {
			s.queue.Forget(uid)
		}
		s.queue.Done(uid)
	}
}

func (s *statuses) sync(ctx context.Context, uid types.UID) error {
	pod := s.process.pods.get(uid)
	if pod == nil {
		s.forget(uid)
		return nil
	}
	s.mu.Lock()
	w := *s.of(uid)
	s.mu.Unlock()

	if w.status != nil {
		patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": pod.UID}, "status": w.status})
		if err != nil {
			return fmt.Errorf("marshal status: %w", err)
		}
		if !bytes.Equal(patch, w.written) {
			pod, err = s.process.options.Client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name,
				types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
			if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
				return nil // Deleted, or another pod with this name.
			}
			if err != nil {
				return fmt.Errorf("patch status: %w", err)
			}
			s.mu.Lock()
			s.of(uid).written = patch
			s.mu.Unlock()
		}
	}
	// The object is deleted only when its phase is terminal.
	if w.finished && pod.DeletionTimestamp != nil && terminal(pod.Status.Phase) {
		err := s.process.options.Client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
			GracePeriodSeconds: new(int64(0)),
			Preconditions:      metav1.NewUIDPreconditions(string(uid)),
		})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return fmt.Errorf("deleting the ended pod: %w", err)
		}
	}
	return nil
}

// status computes the pod's status from its containers.
func (w *worker) status() corev1.PodStatus {
	w.mu.Lock()
	defer w.mu.Unlock()
	pod, process := w.pod, w.process
	status := corev1.PodStatus{
		QOSClass: pod.Status.QOSClass, StartTime: &w.started,
		HostIP: hostIP, HostIPs: []corev1.HostIP{{IP: hostIP}},
	}
	initialized := true
	running, waiting, succeeded := 0, 0, 0
	for n, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			container := &containers[i]
			state := process.containers.state(w.uid, container.Name)
			cs := containerStatus(container, state, w.waiting[container.Name], n == 1)
			if n == 0 {
				initialized = initialized && state.known
				status.InitContainerStatuses = append(status.InitContainerStatuses, cs)
				continue
			}
			switch {
			case state.Running:
				running++
			case !state.known || state.crashed:
				waiting++
			case state.ExitCode == 0:
				succeeded++
			}
			if !process.options.OmitResourceHealth {
				cs.AllocatedResourcesStatus = resourceStatus(process.devices.health(w.uid, container.Name))
			}
			status.ContainerStatuses = append(status.ContainerStatuses, cs)
		}
	}
	switch {
	case w.terminated && succeeded == len(pod.Spec.Containers):
		status.Phase = corev1.PodSucceeded
	case w.terminated:
		status.Phase = corev1.PodFailed
	case waiting > 0:
		status.Phase = corev1.PodPending
	default:
		status.Phase = corev1.PodRunning
	}
	ready := running == len(pod.Spec.Containers)
	status.Conditions = []corev1.PodCondition{
		condition(corev1.PodInitialized, initialized, w.started),
		condition(corev1.ContainersReady, ready, w.started),
		condition(corev1.PodReady, ready, w.started),
	}
	return status
}

func condition(kind corev1.PodConditionType, value bool, at metav1.Time) corev1.PodCondition {
	status := corev1.ConditionFalse
	if value {
		status = corev1.ConditionTrue
	}
	return corev1.PodCondition{Type: kind, Status: status, LastTransitionTime: at}
}

func containerStatus(container *corev1.Container, state containerState, waiting error, app bool) corev1.ContainerStatus {
	cs := corev1.ContainerStatus{
		Name: container.Name, Image: container.Image, Ready: state.Running, RestartCount: state.Restarts,
		Started: new(state.Running),
	}
	switch {
	case waiting != nil:
		cs.State.Waiting = &corev1.ContainerStateWaiting{Reason: "CreateContainerConfigError", Message: waiting.Error()}
	case !state.known || state.crashed:
		reason := "PodInitializing"
		if !app {
			reason = "ContainerCreating"
		}
		cs.State.Waiting = &corev1.ContainerStateWaiting{Reason: reason}
	case state.Running:
		cs.State.Running = &corev1.ContainerStateRunning{}
	default:
		reason := "Completed"
		if state.ExitCode != 0 {
			reason = "Error"
		}
		cs.Ready = !app && state.ExitCode == 0
		cs.State.Terminated = &corev1.ContainerStateTerminated{ExitCode: state.ExitCode, Reason: reason}
	}
	if state.known {
		id := sha256.Sum256(fmt.Append(nil, state.PodUID, container.Name, state.Restarts)) // As long as a runtime's.
		cs.ContainerID = "sim://" + hex.EncodeToString(id[:])
		cs.ImageID = container.Image
	}
	return cs
}

// resourceStatus returns one entry for each device, as kubelets since 1.36 write them.
func resourceStatus(health map[string]map[string]bool) []corev1.ResourceStatus {
	var out []corev1.ResourceStatus
	for resource, devices := range health {
		rs := corev1.ResourceStatus{Name: corev1.ResourceName(resource)}
		for id, healthy := range devices {
			h := corev1.ResourceHealthStatusHealthy
			if !healthy {
				h = corev1.ResourceHealthStatusUnhealthy
			}
			rs.Resources = append(rs.Resources, corev1.ResourceHealth{ResourceID: corev1.ResourceID(id), Health: h})
		}
		slices.SortFunc(rs.Resources, func(a, b corev1.ResourceHealth) int {
			return strings.Compare(string(a.ResourceID), string(b.ResourceID))
		})
		out = append(out, rs)
	}
	slices.SortFunc(out, func(a, b corev1.ResourceStatus) int { return strings.Compare(string(a.Name), string(b.Name)) })
	return out
}
