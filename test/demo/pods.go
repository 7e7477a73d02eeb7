package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
)

// pod returns a pod that requests GPU memory, in MiB.
func pod(name string, memory int64) *framework.PodWrapper {
	return framework.MakePod(name).Namespace(metav1.NamespaceDefault).GPUMem(memory)
}

func (d *demo) create(ctx context.Context, p *framework.PodWrapper) (*corev1.Pod, error) {
	created, err := d.cluster.Client.CoreV1().Pods(metav1.NamespaceDefault).Create(ctx, p.Obj(), metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("creating pod %s: %w", p.Name, err)
	}
	return created, nil
}

// run creates a pod and waits until it runs and the device plugin has set its assigned annotation.
func (d *demo) run(ctx context.Context, p *framework.PodWrapper) (*corev1.Pod, error) {
	created, err := d.create(ctx, p)
	if err != nil {
		return nil, err
	}
	return d.running(ctx, created)
}

func (d *demo) running(ctx context.Context, of *corev1.Pod) (*corev1.Pod, error) {
	return d.await(ctx, of, "run on its card", func(pod *corev1.Pod) bool {
		return pod.Status.Phase == corev1.PodRunning && pod.Annotations[protocol.AnnotationAssigned] == "true"
	})
}

// rejected waits until kube-scheduler has reported the pod as unschedulable, and returns its message.
func (d *demo) rejected(ctx context.Context, of *corev1.Pod) (message string, err error) {
	_, err = d.await(ctx, of, "be unschedulable", func(pod *corev1.Pod) bool {
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
				message = c.Message
				return true
			}
		}
		return false
	})
	return message, err
}

func (d *demo) await(ctx context.Context, of *corev1.Pod, what string, done func(*corev1.Pod) bool) (pod *corev1.Pod, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err = wait.PollUntilContextCancel(ctx, 20*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		if pod, err = d.cluster.Client.CoreV1().Pods(of.Namespace).Get(ctx, of.Name, metav1.GetOptions{}); err != nil {
			return false, err
		}
		return done(pod), nil
	})
	if err != nil {
		return nil, fmt.Errorf("pod %s should %s, but: %w", of.Name, what, err)
	}
	return pod, nil
}

// delete deletes a pod and waits until the object is gone, because until then the pod keeps its memory.
func (d *demo) delete(ctx context.Context, pod *corev1.Pod) error {
	pods := d.cluster.Client.CoreV1().Pods(pod.Namespace)
	if err := pods.Delete(ctx, pod.Name, metav1.DeleteOptions{}); err != nil {
		return fmt.Errorf("deleting pod %s: %w", pod.Name, err)
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err := wait.PollUntilContextCancel(ctx, 20*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		_, err := pods.Get(ctx, pod.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return true, nil
		}
		return false, err
	})
	if err != nil {
		return fmt.Errorf("pod %s should be gone, but: %w", pod.Name, err)
	}
	return nil
}

// expect checks the pod's node and cards, also in its container, and prints them with the reason.
func (d *demo) expect(pod *corev1.Pod, node, cards, why string) error {
	say("    %s runs on %s, card %s: %s", pod.Name, pod.Spec.NodeName, pod.Annotations[protocol.AnnotationIndex], why)
	if pod.Spec.NodeName != node || pod.Annotations[protocol.AnnotationIndex] != cards {
		return fmt.Errorf("pod %s should be on %s, card %s", pod.Name, node, cards)
	}
	return agree(pod, d.node[node].Env(pod, "main"))
}

// agree checks that the container's environment matches the pod's annotations.
func agree(pod *corev1.Pod, env map[string]string) error {
	var errs []error
	for _, name := range []string{protocol.AnnotationIndex, protocol.AnnotationPod, protocol.AnnotationDevice} {
		if pod.Annotations[name] == "" || env[name] != pod.Annotations[name] {
			errs = append(errs, fmt.Errorf("pod %s: annotation %s is %q, but the container has %q", pod.Name, name, pod.Annotations[name], env[name]))
		}
	}
	return errors.Join(errs...)
}

func contains(message, want string) error {
	if !strings.Contains(message, want) {
		return fmt.Errorf("the message should contain %q", want)
	}
	return nil
}
