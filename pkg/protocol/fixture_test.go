package protocol

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
)

// list builds a resource list of one resource; an empty amount is an empty list.
func list(name corev1.ResourceName, amount string) corev1.ResourceList {
	if amount == "" {
		return nil
	}
	return corev1.ResourceList{name: resource.MustParse(amount)}
}

// asks builds a container as the API server stores it, with equal limit and request.
func asks(amount string) corev1.Container {
	return corev1.Container{Resources: corev1.ResourceRequirements{
		Limits: list(ResourceMemory, amount), Requests: list(ResourceMemory, amount),
	}}
}

// limited builds a container with a limit only, as in most manifests.
func limited(amount string) corev1.Container { return limitedTo(ResourceMemory, amount) }

func limitedTo(name corev1.ResourceName, amount string) corev1.Container {
	return corev1.Container{Resources: corev1.ResourceRequirements{Limits: list(name, amount)}}
}

// requesting builds a container with a request only.
func requesting(amount string) corev1.Container {
	return corev1.Container{Resources: corev1.ResourceRequirements{Requests: list(ResourceMemory, amount)}}
}

func sidecar(container corev1.Container) corev1.Container {
	container.RestartPolicy = ptr.To(corev1.ContainerRestartPolicyAlways)
	return container
}

// annotated builds a pod with these annotations.
func annotated(annotations map[string]string, containers ...corev1.Container) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: annotations}, Spec: corev1.PodSpec{Containers: containers}}
}

// plain builds a healthy card with index and memory only.
func plain(index int, memory gpu.Memory) gpu.Card {
	return gpu.Card{Index: index, Memory: memory, NUMANode: gpu.NoNUMANode}
}

// message returns the error's text, empty for nil.
func message(err error) string {
	if err == nil {
		return ""
	}
	return fmt.Sprint(err)
}

var expect = check.Equal
