package protocol

import (
	"fmt"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// PodCards returns the number of cards that the pod asks for by LabelCount; 1 without the label.
func PodCards(pod *corev1.Pod) (int, error) {
	text, ok := pod.Labels[LabelCount]
	if !ok {
		return 1, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > gpu.MaxCards || strconv.Itoa(n) != text {
		return 0, fmt.Errorf("label %s: %.32q is not a number of cards, 1 to %d", LabelCount, text, gpu.MaxCards)
	}
	return n, nil
}

// PodRDMA returns whether the pod asks for cards near an RDMA adapter by LabelRDMA.
func PodRDMA(pod *corev1.Pod) (gpu.RDMA, error) {
	text, ok := pod.Labels[LabelRDMA]
	switch {
	case !ok:
		return gpu.RDMANone, nil
	case text == RDMAPreferred:
		return gpu.RDMAPreferred, nil
	case text == RDMARequired:
		return gpu.RDMARequired, nil
	}
	return gpu.RDMANone, fmt.Errorf("label %s: %.32q is neither %s nor %s: write one of these, or remove the label",
		LabelRDMA, text, RDMAPreferred, RDMARequired)
}

// CheckRequest returns an error if no node can give the pod what it asks for: a label is invalid, a container's memory or cores
// can't be divided by the number of cards, a container asks for cores without memory, the pod asks for more cores than its cards have, or an
// annotated limit is invalid. The error names the container and the numbers, and is the same each time. It depends on labels and the
// annotations of limits, which can change, and on the containers' spec.
func CheckRequest(pod *corev1.Pod) error {
	if _, err := MemoryLimits(pod); err != nil {
		return err
	}
	if _, err := PodRDMA(pod); err != nil && PodRequest(pod) > 0 {
		return err
	}
	cores := PodCores(pod)
	if _, labelled := pod.Labels[LabelCount]; cores == 0 && (!labelled || PodRequest(pod) == 0) {
		return nil // Most pods. The label alone means nothing.
	}
	n, err := PodCards(pod)
	if err != nil {
		return err
	}
	for _, containers := range [...][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			if err := checkContainer(&containers[i], n); err != nil {
				return fmt.Errorf("container %s: %w", containers[i].Name, err)
			}
		}
	}
	if has := gpu.CardCores * gpu.Cores(n); cores > has {
		return fmt.Errorf("%s is %d in total, %s %d", ResourceCores, cores, haveCards(n), has)
	}
	return nil
}

func haveCards(n int) string {
	if n == 1 {
		return "one card has"
	}
	return strconv.Itoa(n) + " cards have"
}

// checkContainer checks the request of a container of a pod with n cards.
func checkContainer(container *corev1.Container, n int) error {
	memory, cores := ContainerRequest(container), ContainerCores(container)
	switch {
	case memory%gpu.Memory(n) != 0:
		return fmt.Errorf("%s %d can't be divided evenly over %d cards", ResourceMemory, memory, n)
	case cores%gpu.Cores(n) != 0:
		return fmt.Errorf("%s %d can't be divided evenly over %d cards", ResourceCores, cores, n)
	case cores > 0 && memory == 0:
		return fmt.Errorf("%s %d without %s", ResourceCores, cores, ResourceMemory)
	}
	return nil
}
