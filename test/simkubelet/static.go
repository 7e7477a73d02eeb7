package simkubelet

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/klog/v2"
)

// AddStaticPod gives the node a static pod, as a file in the kubelet's manifest folder does, and returns the pod as the
// kubelet knows it: the name ends with the node's, and the UID isn't that of the mirror pod which appears in the API
// after the pod has had its devices. It stays through restarts.
func (k *Kubelet) AddStaticPod(ctx context.Context, pod *corev1.Pod) *corev1.Pod {
	pod = pod.DeepCopy()
	pod.Name += "-" + strings.ToLower(k.options.NodeName)
	if pod.Namespace == "" {
		pod.Namespace = metav1.NamespaceDefault
	}
	if pod.UID == "" {
		pod.UID = uuid.NewUUID() // The kubelet takes a hash of the file.
	}
	if pod.Annotations == nil {
		pod.Annotations = map[string]string{}
	}
	pod.Annotations[annotationSource] = sourceFile
	pod.Annotations[annotationHash] = string(pod.UID)
	pod.Spec.NodeName = k.options.NodeName
	pod.Status.Phase = corev1.PodPending
	for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			// The kubelet sets the API's defaults on what it reads, this one among them.
			resources := &containers[i].Resources
			for name, quantity := range resources.Limits {
				if _, ok := resources.Requests[name]; !ok {
					if resources.Requests == nil {
						resources.Requests = corev1.ResourceList{}
					}
					resources.Requests[name] = quantity
				}
			}
		}
	}

	k.mu.Lock()
	defer k.mu.Unlock()
	k.static = append(k.static, pod)
	k.mergeStatic(ctx)
	return pod.DeepCopy()
}

// RemoveStaticPod takes the static pod away; the name is the one that the kubelet knows it by.
func (k *Kubelet) RemoveStaticPod(ctx context.Context, namespace, name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.static = slices.DeleteFunc(k.static, func(pod *corev1.Pod) bool { return pod.Namespace == namespace && pod.Name == name })
	k.mergeStatic(ctx)
}

// mergeStatic tells the running kubelet of the static pods. Callers hold the lock.
func (k *Kubelet) mergeStatic(ctx context.Context) {
	if k.process != nil {
		k.process.file.merge(ctx, slices.Clone(k.static))
	}
}

// mirrorChanged has the status of the mirror's static pod written, which makes the mirror first if it is gone. A mirror
// without a static pod is an orphan, and goes.
func (p *process) mirrorChanged(ctx context.Context, mirror *corev1.Pod) {
	if static, ok := p.pods.named(fullName(mirror)); ok && isStatic(static) {
		p.status.queue.Add(static.UID)
		return
	}
	p.deleteMirror(ctx, mirror)
}

// createMirror shows a static pod in the API (pod/mirror_client.go). The API server gives it another UID.
func (p *process) createMirror(ctx context.Context, static *corev1.Pod) error {
	mirror := static.DeepCopy()
	mirror.Annotations = maps.Clone(static.Annotations)
	mirror.Annotations[annotationMirror] = static.Annotations[annotationHash]
	node := p.node.last()
	mirror.OwnerReferences = []metav1.OwnerReference{{
		APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID, Controller: new(true),
	}}
	_, err := p.options.Client.CoreV1().Pods(mirror.Namespace).Create(ctx, mirror, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create mirror pod: %w", err)
	}
	return nil
}

// deleteMirror removes the mirror of a static pod that is gone.
func (p *process) deleteMirror(ctx context.Context, mirror *corev1.Pod) {
	p.wg.Go(func() {
		err := p.options.Client.CoreV1().Pods(mirror.Namespace).Delete(ctx, mirror.Name, metav1.DeleteOptions{
			GracePeriodSeconds: new(int64(0)), Preconditions: metav1.NewUIDPreconditions(string(mirror.UID)),
		})
		if err != nil && !apierrors.IsNotFound(err) && ctx.Err() == nil {
			klog.FromContext(ctx).V(2).Info("Could not delete a mirror pod", "pod", klog.KObj(mirror), "err", err)
		}
	})
}
